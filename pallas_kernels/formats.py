"""Weight formats: how a matrix lies in memory, and what it is as one array.

Weights lie as in the checkpoints, [out, in]: rows are contiguous for the CPU and K-major for a GPU's matrix units.
Experts have one more axis in front. A format is a small tree; its fields hold arrays, or their specs or sources.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_GROUP = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8Block:
    """float8 (e4m3) with a float32 factor for each block of rows and columns; the last ones may be short.

    w[r, c] = values[r, c] * scale[r // block[0], c // block[1]]
    """

    values: Any  # [.., out, in] float8_e4m3fn
    scale: Any  # [.., ceil(out / block[0]), ceil(in / block[1])] float32
    block: tuple[int, int] = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MxFp4:
    """4-bit floats (e2m1), two in a byte, the low half first, with a power of two for each 32 columns.

    w[r, c] = FP4_VALUES[half byte c of packed[r]] * 2 ^ (scale[r, c // 32] - 127)
    """

    packed: Any  # [.., out, in / 2] uint8
    scale: Any  # [.., out, in / 32] uint8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8:
    """int8 with a float32 factor for each row, or for each `group` columns of a row; the last one may be short.

    w[r, c] = values[r, c] * scale[r, c // group]
    """

    values: Any  # [.., out, in] int8
    scale: Any  # [.., out, ceil(in / group)] float32
    group: int = field(metadata={"static": True})


FORMATS = (Fp8Block, MxFp4, Int8)
Weight = Any  # an array, or one of FORMATS


def is_format(node: Any) -> bool:
    """Where a walk over a parameter tree stops, to have whole weights for leaves (`is_leaf`)."""
    return isinstance(node, FORMATS)


def scale_block(weight: Weight) -> tuple[int, int]:
    """Rows and columns of a format's weight that share a factor."""
    if isinstance(weight, Fp8Block):
        return weight.block
    return 1, weight.group if isinstance(weight, Int8) else MXFP4_GROUP


def widen(weight: Weight, dtype: Any) -> Array:
    """The weight as one array. A plain one is returned as it is, whatever its dtype."""
    if isinstance(weight, Fp8Block):
        values = weight.values
        if values.dtype == jnp.uint8:
            values = jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
        return _scaled(values, weight.scale, scale_block(weight), dtype)
    if isinstance(weight, Int8):
        return _scaled(weight.values, weight.scale, scale_block(weight), dtype)
    if isinstance(weight, MxFp4):
        return _widen_mxfp4(weight, dtype)
    return weight


def _scaled(values: Array, scale: Array, block: tuple[int, int], dtype: Any) -> Array:
    rows, columns = values.shape[-2:]
    if block[0] > 1:
        scale = jnp.repeat(scale, block[0], axis=-2)[..., :rows, :]
    if scale.shape[-1] > 1:  # one column is broadcast
        scale = jnp.repeat(scale, block[1], axis=-1)[..., :columns]
    return (values.astype(jnp.float32) * scale).astype(dtype)


def _widen_mxfp4(weight: MxFp4, dtype: Any) -> Array:
    halves = jnp.stack([weight.packed & 15, weight.packed >> 4], axis=-1)  # [.., out, in / 2, 2]
    groups = jnp.asarray(FP4_VALUES, jnp.float32)[halves.reshape(*weight.scale.shape, MXFP4_GROUP)]
    # The byte is a float32's exponent. 0 stands for 2^-127, which has no exponent but one bit of the fraction.
    exponent = weight.scale.astype(jnp.uint32)
    bits = jnp.where(exponent == 0, jnp.uint32(1 << 22), exponent << 23)
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return (groups * scale[..., None]).astype(dtype).reshape(*weight.packed.shape[:-1], -1)
