"""The grouped matmul in two lines: the specification, and the way a few rows run."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats import Weight, widen


def expert_matmul_reference(x: Array, weight: Weight, expert_of_row: Array, *, out_dtype: Any) -> Array:
    """See `api.expert_matmul`. Gathers a copy of one expert a row."""
    gathered = widen(jax.tree.map(lambda array: array[expert_of_row], weight), x.dtype)  # [rows, out, in]
    return jnp.einsum("ri,roi->ro", x, gathered, preferred_element_type=jnp.float32).astype(out_dtype)
