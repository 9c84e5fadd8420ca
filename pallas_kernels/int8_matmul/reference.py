"""The int8 matmul in plain jnp and float32: the specification, and the way it runs where no kernel is at hand."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats import Int8, widen

_LARGEST = 127  # -128 is not used: the scale is symmetric


def quantize_rows(x: Array) -> tuple[Array, Array]:
    """x [rows, in] -> int8 [rows, in] and float32 [rows]: each row by its largest magnitude, ties to even.

    x[r, i] is about values[r, i] * scale[r]; a row of zeros has scale 0.
    """
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / _LARGEST
    values = jnp.round(wide / jnp.where(scale == 0, 1.0, scale))
    return jnp.clip(values, -_LARGEST, _LARGEST).astype(jnp.int8), scale[:, 0]


def int8_matmul_reference(x: Array, values: Array, scale: Array, *, group: int, int8_activations: bool) -> Array:
    """See `api.int8_matmul`; x [rows, in] -> float32 [rows, out]."""
    if int8_activations:
        return _exact(*quantize_rows(x), values, scale, group)
    weight = widen(Int8(values, scale, group), jnp.float32)
    return jnp.einsum("ri,oi->ro", x.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)


def _exact(x: Array, row_scale: Array, values: Array, scale: Array, group: int) -> Array:
    """A group's products are summed as int32; only then is anything rounded."""
    total = jnp.zeros((x.shape[0], values.shape[0]), jnp.float32)
    for index in range(scale.shape[1]):
        columns = slice(index * group, (index + 1) * group)
        sums = jnp.einsum("ri,oi->ro", x[:, columns], values[:, columns], preferred_element_type=jnp.int32)
        total += sums.astype(jnp.float32) * scale[:, index]
    return total * row_scale[:, None]
