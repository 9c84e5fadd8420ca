"""The device mesh. One device for now; the axis names are those that every placement rule speaks of."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

MESH_AXES = ("data", "stage", "tensor", "expert")


def make_mesh(device: jax.Device) -> Mesh:
    """A mesh of one device with every axis of size 1. Axes are Auto: XLA propagates, we constrain at named points."""
    grid = np.array([device]).reshape((1,) * len(MESH_AXES))
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
