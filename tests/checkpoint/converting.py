"""Loading and comparing, for the tests of converted models."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mimo_jax import Params
from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.checkpoint.load import load_params
from sharding import Rules, make_mesh


def load(folder: Path, quantization: str | None = None, dtype: Any = jnp.float32, heads: int | None = None) -> Params:
    checkpoint = open_checkpoint(folder)
    checkpoint = checkpoint if heads is None else checkpoint.with_draft_heads(heads)
    return load_params(checkpoint, dtype, make_mesh(jax.devices()[0]), Rules(), quantization=quantization)


def assert_same(one: Params, two: Params) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
