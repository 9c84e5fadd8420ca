"""Paged attention for GPUs: one Pallas kernel, lowered by Triton to NVIDIA and AMD.

A program computes a block of query rows of one sequence and one KV head against the keys those rows can see, tile after
tile with a running softmax. A query row is one (token, query head of the group) pair, so that grouped heads share the
keys they load and a decode step of 16 heads a group fills a matrix unit:

    row    0      1      2      3      4      5          group = 2, three query tokens
    token  0      0      1      1      2      2

Tiles before the window, behind the last query or behind the sequence's end are never loaded. Where a decode step meets
a long context, `splits` programs share the keys of a row block and a second pass merges their sums by log-sum-exp.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.masks import visible
from pallas_kernels.triton import parts, precision

_LEAST_ROWS = 16  # a matrix unit's
_MOST_ROWS = 64
_TILE_BYTES = 48 << 10  # keys and values of a tile, within the 64 KiB that an AMD compute unit shares
_UNSEEN = -1e30  # a logit nobody sees; finite, so that a difference of two is 0 and not NaN
# A context is shared by so many programs that each has about this much of the table to go through, and no more than
# these: a step of few sequences would leave most of a GPU idle.
_SPLIT_TOKENS = 1024
_MOST_SPLITS = 32


@dataclass(frozen=True)
class Blocks:
    """What a program holds, and how many share a row block's keys."""

    rows: int
    tile_tokens: int
    splits: int
    num_warps: int = 4
    num_stages: int = 2


def paged_attention_gpu(
    query: Array,
    key_pages: Array,
    value_pages: Array,
    page_table: Array,
    first_page: Array,
    positions: Array,
    lengths: Array,
    *,
    scale: float,
    window_tokens: int | None,
    first_position: int,
    sink: Array | None,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Array:
    """See `api.paged_attention` for the shapes. `interpret` runs the kernel's body as plain JAX, anywhere."""
    seqs, step, heads, _ = query.shape
    _, page, kv_heads, v_dim = value_pages.shape
    group = heads // kv_heads
    width = page_table.shape[1]
    if blocks is None:
        token_bytes = (query.shape[3] + v_dim) * key_pages.dtype.itemsize
        blocks = choose_blocks(step * group, width * page, window_tokens, token_bytes, seqs * kv_heads)
    row_blocks = pl.cdiv(step * group, blocks.rows)
    sinks = jnp.full((heads,), _UNSEEN) if sink is None else sink.astype(jnp.float32)

    kernel = functools.partial(
        _kernel,
        blocks=blocks,
        scale=scale,
        window_tokens=window_tokens,
        first_position=first_position,
        has_sink=sink is not None,
    )
    rows_shape = (blocks.splits, seqs, step, heads)
    sums = jax.ShapeDtypeStruct((*rows_shape, v_dim), query.dtype if blocks.splits == 1 else jnp.float32)
    beside = (jax.ShapeDtypeStruct(rows_shape, jnp.float32),) * (0 if blocks.splits == 1 else 2)
    out, *rest = pl.pallas_call(
        kernel,
        out_shape=(sums, *beside),
        grid=(row_blocks * blocks.splits, kv_heads, seqs),
        in_specs=[pl.no_block_spec] * 8,
        out_specs=(pl.no_block_spec,) * (1 + len(beside)),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="paged_attention",
    )(query, key_pages, value_pages, page_table, first_page, positions, lengths, sinks)
    return _merged(out, *rest).astype(query.dtype) if rest else out[0]


def choose_blocks(
    rows: int, context_tokens: int, window_tokens: int | None, token_bytes: int, neighbours: int
) -> Blocks:
    """For so many query rows a KV head, a table of `context_tokens` whose keys and values take `token_bytes` each, and
    `neighbours` (sequence, KV head) pairs."""
    block = min(_MOST_ROWS, max(_LEAST_ROWS, pl.next_power_of_2(rows)))
    tile = next(tile for tile in (64, 32, 16) if tile * token_bytes <= _TILE_BYTES or tile == 16)
    splits = 1
    if rows <= block and window_tokens is None:
        wanted = context_tokens // _SPLIT_TOKENS
        splits = max(1, min(_MOST_SPLITS, pl.next_power_of_2(wanted + 1) // 2, 1024 // neighbours))
    return Blocks(rows=block, tile_tokens=tile, splits=splits)


def _merged(sums: Array, tops: Array, totals: Array) -> Array:
    """[splits, .., v_dim] and [splits, ..] -> [.., v_dim]"""
    shares = jnp.exp(tops - tops.max(axis=0))
    total = (totals * shares).sum(axis=0)
    out = (sums * shares[..., None]).sum(axis=0)
    return out / jnp.where(total == 0, 1.0, total)[..., None]


def _share(begin: Array, end: Array, split: Array, splits: int) -> tuple[Array, Array]:
    """The tiles of [begin, end) that are one split's."""
    most = pl.cdiv(jnp.maximum(end - begin, 0), splits)
    return begin + split * most, jnp.minimum(end, begin + (split + 1) * most)


def _kernel(
    query_ref: Any,
    keys_ref: Any,
    values_ref: Any,
    table_ref: Any,
    first_page_ref: Any,
    positions_ref: Any,
    lengths_ref: Any,
    sink_ref: Any,
    sums_ref: Any,
    *split_refs: Any,
    blocks: Blocks,
    scale: float,
    window_tokens: int | None,
    first_position: int,
    has_sink: bool,
) -> None:
    block, split = pl.program_id(0) // blocks.splits, pl.program_id(0) % blocks.splits
    kv_head, seq = pl.program_id(1), pl.program_id(2)
    _, step, heads, head_dim = query_ref.shape
    _, page, kv_heads, v_dim = values_ref.shape
    width, group = table_ref.shape[1], heads // kv_heads
    head_parts, v_parts = parts(head_dim), parts(v_dim)
    across_columns, across_rows = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))
    dot = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)

    row = block * blocks.rows + jnp.arange(blocks.rows)
    row_valid = row < step * group
    query_token, head = row // group, kv_head * group + row % group  # of what is not there: beyond the step
    query_position = positions_ref[seq, jnp.minimum(query_token, step - 1)]  # [rows]
    query = [
        plgpu.load(
            query_ref.at[seq, query_token[:, None], head[:, None], part.columns[None, :]],
            mask=row_valid[:, None] & part.mask[None, :],
            other=0.0,
        )
        for part in head_parts
    ]

    # Tokens of the table that some row sees: [begin, end), cut into the splits' shares of whole tiles.
    table_start = first_page_ref[seq] * page
    length = lengths_ref[seq]
    first = jnp.int32(first_position)
    if window_tokens is not None:
        first = jnp.maximum(first, query_position.min() - window_tokens + 1)
    begin = jnp.clip(first - table_start, 0, width * page) // blocks.tile_tokens
    last = jnp.minimum(length, query_position.max() + 1)
    end = pl.cdiv(jnp.clip(last - table_start, 0, width * page), blocks.tile_tokens)
    begin, end = _share(begin, end, split, blocks.splits)

    def tile(index: Array, carry: tuple[Array, Array, tuple[Array, ...]]) -> tuple[Array, Array, tuple[Array, ...]]:
        top, total, sums = carry
        token = index * blocks.tile_tokens + jnp.arange(blocks.tile_tokens)
        position = table_start + token
        owned = (position < length) & (token < width * page) & (position >= first_position)
        entry = jnp.minimum(token // page, width - 1)
        page_id = plgpu.load(table_ref.at[seq, entry], mask=owned, other=0)
        # Whatever a table says, nothing outside the pages is read: another process's memory could lie there.
        page_id, place = jnp.clip(page_id, 0, keys_ref.shape[0] - 1), token % page

        def load(ref: Any, part: Any) -> Array:  # [tile, part]; nobody's tokens may hold anything, NaN included
            at = ref.at[page_id[:, None], place[:, None], kv_head, part.columns[None, :]]
            return plgpu.load(at, mask=owned[:, None] & part.mask[None, :], other=0.0)

        logits = sum(
            dot(wanted, load(keys_ref, part), across_columns, precision=precision(wanted.dtype))
            for wanted, part in zip(query, head_parts, strict=True)
        )
        seen = visible(query_position[:, None], position[None, :], window_tokens, first_position) & owned[None, :]
        logits = jnp.where(seen, logits * scale, _UNSEEN)
        new_top = jnp.maximum(top, logits.max(axis=1))
        weights = jnp.where(seen, jnp.exp(logits - new_top[:, None]), 0.0)
        shrink = jnp.exp(top - new_top)
        cast = weights.astype(values_ref.dtype)
        sums = tuple(
            old * shrink[:, None] + dot(cast, load(values_ref, part), across_rows, precision=precision(cast.dtype))
            for old, part in zip(sums, v_parts, strict=True)
        )
        return new_top, total * shrink + weights.sum(axis=1), sums

    counts = has_sink & (split == 0)  # once, whatever the number of splits
    carry = (
        jnp.where(counts, sink_ref[head], _UNSEEN),
        jnp.where(counts, jnp.ones((blocks.rows,), jnp.float32), 0.0),
        tuple(jnp.zeros((blocks.rows, part.size), jnp.float32) for part in v_parts),
    )
    top, total, sums = jax.lax.fori_loop(begin, end, tile, carry)
    if blocks.splits == 1:
        divisor = jnp.where(total == 0, 1.0, total)
        sums = tuple(part_sums / divisor[:, None] for part_sums in sums)
    for part_sums, part in zip(sums, v_parts, strict=True):
        plgpu.store(
            sums_ref.at[split, seq, query_token[:, None], head[:, None], part.columns[None, :]],
            part_sums.astype(sums_ref.dtype),
            mask=row_valid[:, None] & part.mask[None, :],
        )
    for ref, value in zip(split_refs, (top, total), strict=False):
        plgpu.store(ref.at[split, seq, query_token, head], value, mask=row_valid)
