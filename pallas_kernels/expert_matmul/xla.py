"""The grouped matmul where there is no kernel for it: a gathered expert a row, or whole tiles of rows, each times one
expert.

Every expert's rows are padded to whole tiles, so that the loop's shapes are static. With tiles of 4 and three experts:

    sorted rows    0 0 0 0 0 | 2 2
    padded         0 0 0 0 0 . . . | 2 2 . .
    tile's expert  0         0       2
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.expert_matmul.reference import expert_matmul_reference
from pallas_kernels.formats import Fp8Block, Weight, widen

_TILE_ROWS = 16
# Up to here one gathered copy of an expert per row is cheaper than the tiles' padding (a decode step of few sequences).
_GATHER_ROWS = 16


def expert_matmul_xla(x: Array, weight: Weight, expert_of_row: Array, *, out_dtype: Any) -> Array:
    """See `api.expert_matmul`. No more experts are widened at once than are multiplied at once."""
    if isinstance(weight, Fp8Block):
        # As bytes while experts are picked: XLA's CPU compiler has no float8 and would first make float16 of all. (It
        # still copies the bytes, of one matrix at a time.)
        weight = replace(weight, values=jax.lax.bitcast_convert_type(weight.values, jnp.uint8))
    if jax.tree.leaves(weight)[0].shape[0] == 1:
        alone = widen(jax.tree.map(lambda array: array[0], weight), x.dtype)
        return jnp.einsum("ri,oi->ro", x, alone, preferred_element_type=jnp.float32).astype(out_dtype)
    form = expert_matmul_reference if x.shape[0] <= _GATHER_ROWS else expert_matmul_tiled
    return form(x, weight, expert_of_row, out_dtype=out_dtype)


def expert_matmul_tiled(x: Array, weight: Weight, expert_of_row: Array, *, out_dtype: Any) -> Array:
    """See `api.expert_matmul`. Work and memory grow with rows + experts * tile, not with rows * experts."""
    rows = x.shape[0]
    experts = jax.tree.leaves(weight)[0].shape[0]
    tiles = rows // _TILE_ROWS + experts  # no routing can need more

    sizes = jnp.bincount(expert_of_row, length=experts)  # [experts]
    padded_sizes = -(-sizes // _TILE_ROWS) * _TILE_ROWS
    starts, padded_ends = jnp.cumsum(sizes) - sizes, jnp.cumsum(padded_sizes)
    shift = (padded_ends - padded_sizes) - starts
    place = jnp.arange(rows) + shift[expert_of_row]  # [rows], where a row stands among the tiles

    padded = jnp.zeros((tiles * _TILE_ROWS, x.shape[1]), x.dtype).at[place].set(x)
    tile_starts = jnp.arange(tiles) * _TILE_ROWS
    tile_expert = jnp.minimum(jnp.searchsorted(padded_ends, tile_starts, side="right"), experts - 1)

    def one_tile(tile: tuple[Array, Array]) -> Array:
        tile_rows, expert = tile
        wide = widen(jax.tree.map(lambda array: array[expert], weight), x.dtype)  # [out, in]
        return jnp.einsum("ri,oi->ro", tile_rows, wide, preferred_element_type=jnp.float32).astype(out_dtype)

    out = jax.lax.map(one_tile, (padded.reshape(tiles, _TILE_ROWS, -1), tile_expert))
    return out.reshape(tiles * _TILE_ROWS, -1)[place]
