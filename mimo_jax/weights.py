"""The one way to multiply by a weight, whatever format it has (`pallas_kernels/formats.py`)."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.expert_matmul import expert_matmul
from pallas_kernels.formats import FORMATS, Int8, Weight
from pallas_kernels.int8_matmul import int8_matmul


def linear(x: Array, weight: Weight) -> Array:
    """x [..., in] times weight [out, in] -> [..., out], in x's dtype, accumulated in float32."""
    return linear_float32(x, weight).astype(x.dtype)


def linear_float32(x: Array, weight: Weight) -> Array:
    """The same with a float32 result, for logits and the router."""
    if not isinstance(weight, FORMATS):
        return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32)
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(weight, Int8):
        out = int8_matmul(rows, weight.values, weight.scale, group=weight.group)
    else:
        one = jax.tree.map(lambda array: array[None], weight)  # a grouped matmul with one group
        out = expert_matmul(rows, one, jnp.zeros(rows.shape[0], jnp.int32), out_dtype=jnp.float32)
    return out.reshape(*x.shape[:-1], -1)


def expert_linear(x: Array, weight: Weight, expert_of_row: Array, most_rows: int) -> Array:
    """Row r of x [rows, in] times expert_of_row[r] of weight [experts, out, in] -> [rows, out], in x's dtype.

    The rows are sorted by expert; no expert has more than `most_rows`.
    """
    return expert_matmul(x, weight, expert_of_row, most_rows=most_rows)
