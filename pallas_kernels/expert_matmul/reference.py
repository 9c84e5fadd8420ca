"""The grouped matmul in two lines: the specification, and the way a few rows run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def as_is(weights: Any) -> Any:
    """What `widen` is for weights that are one array already."""
    return weights


def expert_matmul_reference(
    x: Array, weights: Any, expert_of_row: Array, widen: Callable[[Any], Array] = as_is
) -> Array:
    """See `api.expert_matmul`. Gathers a copy of one expert a row."""
    gathered = widen(jax.tree.map(lambda array: array[expert_of_row], weights))  # [rows, out, in]
    return jnp.einsum("ri,roi->ro", x, gathered, preferred_element_type=jnp.float32).astype(x.dtype)
