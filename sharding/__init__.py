"""Placement: logical axis names on arrays, mesh axes on devices, and the rules between them."""

from sharding.mesh import make_mesh
from sharding.place import array_sharding
from sharding.rules import LOGICAL_AXES, Rules

__all__ = ["LOGICAL_AXES", "Rules", "array_sharding", "make_mesh"]
