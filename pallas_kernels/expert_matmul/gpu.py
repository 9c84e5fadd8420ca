"""The grouped matmul for GPUs: one Pallas kernel for every weight format, lowered by Triton to NVIDIA and AMD.

A program computes a block of one expert's outputs for a tile of the rows that chose it. A tile belongs to one expert
and the rows are sorted, so with tiles of 4 and three experts:

    rows     0 0 0 0 0 2 2        sorted by expert
    tile     0 0 0 0 1 2 2        expert 0, 0, 2; the second tile has one row
    unused tiles                  no rows: nothing is loaded

In a decode step no expert has more rows than a tile holds, so each of its weights is read once.

The weight is the left operand and the result is written transposed, as in the int8 matmul: a few rows fill a matrix
unit, and weights are widened in registers, a tile at a time. Whatever is constant over a tile's columns (a row's scale,
a block's, a power of two) is multiplied behind the product. Where few outputs would leave most of a GPU idle, `splits`
programs share `in` and their sums are added behind the kernel.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.formats import MXFP4_GROUP, Fp8Block, Int8, MxFp4, Weight, scale_block
from pallas_kernels.triton import precision

LEAST_GROUP = 16  # columns that a matrix instruction goes through
_LEAST_ROWS = 16  # a matrix unit's
_DECODE_ROWS = 64  # up to here reading the weights takes longer than multiplying them
_PREFILL_ROWS = 128
_WANTED_PROGRAMS = 512  # some for each of the 100 to 304 units of a GPU
_LEAST_SPLIT_TILES = 4
_PAIR = MXFP4_GROUP // 2  # bytes that share a scale
_FP8_FACTOR = 2.0**8  # of a float8 whose bits are read as a float16's
_FP4_FACTOR = 2.0**14


@dataclass(frozen=True)
class Blocks:
    """What a program holds (`columns` of the stored weight: two weights are in a byte of mxfp4), and how many share a
    block's columns."""

    rows: int
    outputs: int
    columns: int
    splits: int
    num_warps: int
    num_stages: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """Which rows a tile has, [tiles] int32 each: rows first .. first + count - 1, all of `expert`."""

    expert: Array
    first: Array
    count: Array


def expert_matmul_gpu(
    x: Array,
    weight: Weight,
    expert_of_row: Array,
    *,
    most_rows: int,
    out_dtype: Any,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Array:
    """See `api.expert_matmul`. `interpret` runs the kernel's body as plain JAX, anywhere."""
    arrays = _arrays(weight)
    experts, outputs, _ = arrays[0].shape
    rows = x.shape[0]
    if blocks is None:
        blocks = choose_blocks(weight, rows, most_rows, x.dtype.itemsize)
    tiles = make_tiles(expert_of_row, experts, blocks.rows)
    if isinstance(weight, MxFp4):  # even and odd columns are the low and the high halves of the bytes
        x = x.reshape(rows, -1, 2).transpose(2, 0, 1)
    summed = out_dtype if blocks.splits == 1 else jnp.float32
    out = pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, weight=jax.tree.map(lambda _: None, weight)),
        out_shape=jax.ShapeDtypeStruct((blocks.splits, rows, outputs), summed),
        grid=(pl.cdiv(outputs, blocks.outputs), tiles.count.size, blocks.splits),
        in_specs=[pl.no_block_spec] * (4 + len(arrays)),
        out_specs=pl.no_block_spec,
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="expert_matmul",
    )(tiles.expert, tiles.first, tiles.count, x, *arrays)
    return out[0] if blocks.splits == 1 else out.sum(axis=0).astype(out_dtype)


def _arrays(weight: Weight) -> tuple[Array, ...]:
    """As the kernel takes them. float8 comes as bytes: no GPU but the newest converts it."""
    if isinstance(weight, Fp8Block):
        return jax.lax.bitcast_convert_type(weight.values, jnp.int8), weight.scale
    if isinstance(weight, Int8):
        return weight.values, weight.scale
    if isinstance(weight, MxFp4):
        return weight.packed, weight.scale
    return (weight,)


def make_tiles(expert_of_row: Array, experts: int, tile_rows: int) -> Tiles:
    """For ascending expert_of_row [rows]. There are as many tiles as any routing needs."""
    rows = expert_of_row.size
    most = min(rows, rows // tile_rows + experts)
    # Comparisons and sums instead of a search, which would be a loop of many small kernels.
    bounds = (expert_of_row < jnp.arange(experts + 1, dtype=jnp.int32)[:, None]).sum(axis=1, dtype=jnp.int32)
    starts, sizes = bounds[:-1], jnp.diff(bounds)
    tiles = (sizes + tile_rows - 1) // tile_rows
    ends = jnp.cumsum(tiles)
    index = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.minimum((ends <= index[:, None]).sum(axis=1, dtype=jnp.int32), experts - 1)
    done = (index - (ends - tiles)[expert]) * tile_rows
    return Tiles(expert, starts[expert] + done, jnp.clip(sizes[expert] - done, 0, tile_rows))


def choose_blocks(weight: Weight, rows: int, most_rows: int, row_bytes: int) -> Blocks:
    """For `rows` of `row_bytes` an element, of which no expert has more than `most_rows`."""
    stored = _arrays(weight)[0]
    experts, outputs, columns = stored.shape
    most = pl.next_power_of_2(min(most_rows, -(-2 * rows // experts)) if most_rows > _DECODE_ROWS else most_rows)
    tile = min(_PREFILL_ROWS, max(_LEAST_ROWS, most))
    if tile <= _DECODE_ROWS:  # bound by reading the weight: 128 bytes of a row at a time, much of it under way
        block, width = 64, 128 // stored.dtype.itemsize
        programs = pl.cdiv(outputs, block) * min(rows, rows // tile + experts)
        splits = max(1, _WANTED_PROGRAMS // programs)
        splits = min(pl.next_power_of_2(splits + 1) // 2, max(1, columns // width // _LEAST_SPLIT_TILES))
        made = Blocks(tile, block, width, splits, num_warps=4, num_stages=4 if tile == _LEAST_ROWS else 3)
    else:  # bound by the products
        width = 128 // row_bytes // (2 if isinstance(weight, MxFp4) else 1)
        made = Blocks(tile, 128, width, 1, num_warps=8, num_stages=3)
    return replace(made, columns=_fitting(weight, made.columns))


def _fitting(weight: Weight, columns: int) -> int:
    """At most so many columns; they have one scale, but for mxfp4."""
    if isinstance(weight, Int8 | Fp8Block):
        group = scale_block(weight)[1]
        if group < weight.values.shape[-1]:
            return min(columns, group & -group)
    return columns


def _kernel(
    expert_ref: Any, first_ref: Any, count_ref: Any, x_ref: Any, *refs: Any, blocks: Blocks, weight: Weight
) -> None:
    *weight_refs, out_ref = refs
    tile, split = pl.program_id(1), pl.program_id(2)
    expert, first, count = expert_ref[tile], first_ref[tile], count_ref[tile]
    _, outputs, columns = weight_refs[0].shape
    output = pl.program_id(0) * blocks.outputs + jnp.arange(blocks.outputs)
    place = jnp.arange(blocks.rows)
    row, row_inside = first + place, place < count
    output_inside = None if outputs % blocks.outputs == 0 else output < outputs
    read = _READERS.get(type(weight), _read_plain)

    def product(wide: Array, column: Array, half: tuple[int, ...]) -> Array:
        mask = row_inside[:, None]
        if columns % blocks.columns:
            mask = mask & (column < columns)[None, :]
        rows = plgpu.load(x_ref.at[(*half, row[:, None], column[None, :])], mask=mask, other=0)
        return jax.lax.dot_general(
            wide,
            rows,
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
            precision=precision(wide.dtype),
        )

    def step(index: Array, total: Array) -> Array:
        at = _Place(expert, output, index * blocks.columns, blocks.columns, output_inside, columns)
        wide, scale = read(weight, weight_refs, at, x_ref.dtype)
        halves = [()] if len(wide) == 1 else [(0,), (1,)]
        parts = [product(part, at.column, half) for part, half in zip(wide, halves, strict=True)]
        part = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        return total + (part if scale is None else part * scale[:, None])

    tiles = pl.cdiv(columns, blocks.columns)
    share = pl.cdiv(tiles, blocks.splits)
    begin = split * share
    end = jnp.where(count > 0, jnp.minimum(tiles, begin + share), begin)
    total = jax.lax.fori_loop(begin, end, step, jnp.zeros((blocks.outputs, blocks.rows), jnp.float32))
    if isinstance(weight, MxFp4):
        total = total * _FP4_FACTOR
    mask = row_inside[None, :] if output_inside is None else output_inside[:, None] & row_inside[None, :]
    plgpu.store(out_ref.at[split, row[None, :], output[:, None]], total.astype(out_ref.dtype), mask=mask)


@dataclass(frozen=True)
class _Place:
    """A tile of one expert's weight: `output` [outputs] and columns [begin, begin + size) of `columns`."""

    expert: Array
    output: Array
    begin: Array
    size: int
    output_inside: Array | None  # [outputs]; None: all are
    columns: int

    @property
    def column(self) -> Array:
        return self.begin + jnp.arange(self.size)

    def load(self, ref: Any, columns_apart: int = 1) -> Array:
        """[outputs, size / columns_apart]: every so many columns share an element."""
        column = self.begin // columns_apart + jnp.arange(self.size // columns_apart)
        mask = None if self.output_inside is None else self.output_inside[:, None]
        if self.columns % self.size:
            inside = (column < self.columns // columns_apart)[None, :]
            mask = inside if mask is None else mask & inside
        at = ref.at[self.expert, self.output[:, None], column[None, :]]
        return plgpu.load(at, mask=mask, other=None if mask is None else 0)

    def scale(self, ref: Any, rows: int, columns: int) -> Array:
        """[outputs], of the tile's one block of columns."""
        at = ref.at[self.expert, self.output // rows, self.begin // columns]
        return plgpu.load(at, mask=self.output_inside, other=None if self.output_inside is None else 0.0)


# Each reads a tile as (one part of [outputs, columns], or the even and the odd columns'; what its product is to be
# multiplied by, [outputs] or None).
_Read = tuple[tuple[Array, ...], Array | None]


def _read_plain(weight: Weight, refs: list[Any], at: _Place, dtype: Any) -> _Read:
    return (at.load(refs[0]).astype(dtype),), None


def _read_int8(weight: Int8, refs: list[Any], at: _Place, dtype: Any) -> _Read:
    return (at.load(refs[0]).astype(dtype),), at.scale(refs[1], 1, weight.group)


def _read_fp8(weight: Fp8Block, refs: list[Any], at: _Place, dtype: Any) -> _Read:
    """seeeemmm becomes the float16 s0eeeemmm0000000: the value times 2^-8, subnormals included."""
    bits = (at.load(refs[0]).astype(jnp.int16) << 7) & jnp.int16(-0x4001)  # the sign's second copy goes
    return (_from_float16(bits, dtype),), at.scale(refs[1], *weight.block) * _FP8_FACTOR


def _read_mxfp4(weight: MxFp4, refs: list[Any], at: _Place, dtype: Any) -> _Read:
    """seem becomes the float16 s000eem000000000: the value times 2^-14."""
    packed, scale = at.load(refs[0]), at.load(refs[1], _PAIR)
    groups = packed.shape[1] // _PAIR
    factor = jax.lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)[:, :, None]

    def half(nibble: Array) -> Array:
        bits = ((nibble & 8) << 12) | ((nibble & 7) << 9)
        wide = jax.lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.float16).astype(jnp.float32)
        scaled = wide.reshape(-1, groups, _PAIR) * factor
        return scaled.reshape(packed.shape).astype(dtype)

    wide = packed.astype(jnp.int16)
    return (half(wide & 15), half(wide >> 4)), None


def _from_float16(bits: Array, dtype: Any) -> Array:
    wide = jax.lax.bitcast_convert_type(bits, jnp.float16)
    return wide if dtype == jnp.float16 else wide.astype(jnp.float32).astype(dtype)


_READERS: dict[type, Any] = {Int8: _read_int8, Fp8Block: _read_fp8, MxFp4: _read_mxfp4}
