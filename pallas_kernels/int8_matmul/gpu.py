"""The int8 matmul for GPUs: one Pallas kernel, lowered by Triton to NVIDIA and AMD.

A program computes a block of outputs for a block of rows, tile after tile along `in`. The weight is the left operand
and the result is written transposed: so a step of a few rows fills a matrix unit (whose left side is the long one),
and NVIDIA's units take a weight that is widened in registers.

    weight [out block, tile] @ rows [row block, tile].T -> [out block, row block]

Float rows are multiplied by widened weights: int8 is exact in bfloat16. int8 rows give int32. Either way the scale of
a group of columns is applied to the tile's sum, which is outside the inner product. Where few outputs would leave most
of a GPU idle, `splits` programs share `in` and their sums are added behind the kernel.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.int8_matmul.reference import quantize_rows
from pallas_kernels.triton import precision

LEAST_GROUP = 32  # columns that one int8 matrix instruction goes through
_DECODE_ROWS = 16
_WANTED_PROGRAMS = 512  # some for each of the 100 to 304 units of a GPU
_LEAST_SPLIT_TILES = 4


@dataclass(frozen=True)
class Blocks:
    """What a program holds, and how many share a block's columns."""

    rows: int
    outputs: int
    columns: int
    splits: int
    num_warps: int
    num_stages: int


def int8_matmul_gpu(
    x: Array,
    values: Array,
    scale: Array,
    *,
    group: int,
    int8_activations: bool,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Array:
    """See `api.int8_matmul`; x [rows, in] -> float32 [rows, out]. `interpret` runs the body as plain JAX, anywhere."""
    rows, outputs = x.shape[0], values.shape[0]
    row_scale = None
    if int8_activations:
        x, row_scale = quantize_rows(x)
    if blocks is None:
        blocks = choose_blocks(rows, outputs, values.shape[1], min(group, values.shape[1]), x.dtype.itemsize)
    out = pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, group=group),
        out_shape=jax.ShapeDtypeStruct((blocks.splits, rows, outputs), jnp.float32),
        grid=(pl.cdiv(outputs, blocks.outputs), pl.cdiv(rows, blocks.rows), blocks.splits),
        in_specs=[pl.no_block_spec] * 3,
        out_specs=pl.no_block_spec,
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="int8_matmul",
    )(x, values, scale)
    total = out[0] if blocks.splits == 1 else out.sum(axis=0)
    return total if row_scale is None else total * row_scale[:, None]


def choose_blocks(rows: int, outputs: int, columns: int, group: int, row_bytes: int) -> Blocks:
    """For rows of `row_bytes` an element, and groups of so many columns (all of them: one group)."""
    whole = columns <= group  # then tiles need not end where a group does
    if rows <= _DECODE_ROWS:  # bound by reading the weight: 128 bytes of a row at a time, much of it under way
        tile, block = 128, 64
        tiles = pl.cdiv(columns, tile)
        splits = _WANTED_PROGRAMS // pl.cdiv(outputs, block)
        splits = max(1, min(pl.next_power_of_2(splits + 1) // 2, tiles // _LEAST_SPLIT_TILES))
        made = Blocks(_DECODE_ROWS, block, tile, splits, num_warps=4, num_stages=4)
    else:  # bound by the products
        block = min(128, pl.next_power_of_2(rows))
        made = Blocks(block, 128, 128 // row_bytes, 1, num_warps=8 if block == 128 else 4, num_stages=3)
    fitting = made.columns if whole else min(made.columns, group & -group)
    return Blocks(made.rows, made.outputs, fitting, made.splits, made.num_warps, made.num_stages)


def _kernel(x_ref: Any, values_ref: Any, scale_ref: Any, out_ref: Any, *, blocks: Blocks, group: int) -> None:
    outputs, columns = values_ref.shape
    rows, groups = x_ref.shape[0], scale_ref.shape[1]
    output = pl.program_id(0) * blocks.outputs + jnp.arange(blocks.outputs)
    row = pl.program_id(1) * blocks.rows + jnp.arange(blocks.rows)
    split = pl.program_id(2)
    exact = x_ref.dtype == jnp.int8
    sum_type = jnp.int32 if exact else jnp.float32

    def load(ref: Any, index: Array, most: int, column: Array) -> Array:
        mask = None if most % index.size == 0 else (index < most)[:, None]
        if columns % blocks.columns:
            inside = (column < columns)[None, :]
            mask = inside if mask is None else mask & inside
        return plgpu.load(ref.at[index[:, None], column[None, :]], mask=mask, other=None if mask is None else 0)

    def scale_of(part: Array) -> Array:
        return plgpu.load(scale_ref.at[output, part], mask=output < outputs, other=0.0)[:, None]

    def tile(index: Array, total: Array) -> Array:
        column = index * blocks.columns + jnp.arange(blocks.columns)
        weight = load(values_ref, output, outputs, column)
        part = jax.lax.dot_general(
            weight if exact else weight.astype(x_ref.dtype),
            load(x_ref, row, rows, column),
            (((1,), (1,)), ((), ())),
            preferred_element_type=sum_type,
            precision=precision(x_ref.dtype),
        )
        return total + (part if groups == 1 else part.astype(jnp.float32) * scale_of(index * blocks.columns // group))

    tiles = pl.cdiv(columns, blocks.columns)
    share = pl.cdiv(tiles, blocks.splits)
    begin, end = split * share, jnp.minimum(tiles, (split + 1) * share)
    zeros = jnp.zeros((blocks.outputs, blocks.rows), sum_type if groups == 1 else jnp.float32)
    total = jax.lax.fori_loop(begin, end, tile, zeros)
    if groups == 1:
        total = total.astype(jnp.float32) * scale_of(jnp.int32(0))
    inside = (output < outputs)[:, None] & (row < rows)[None, :]
    plgpu.store(out_ref.at[split, row[None, :], output[:, None]], total, mask=inside)
