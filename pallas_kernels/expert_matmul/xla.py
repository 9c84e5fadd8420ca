"""The grouped matmul for many rows: whole tiles of rows, each tile times one expert.

Every expert's rows are padded to whole tiles, so that the loop's shapes are static. With tiles of 4 and three experts:

    sorted rows    0 0 0 0 0 | 2 2
    padded         0 0 0 0 0 . . . | 2 2 . .
    tile's expert  0         0       2
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.expert_matmul.reference import as_is

_TILE_ROWS = 16


def expert_matmul_tiled(x: Array, weights: Any, expert_of_row: Array, widen: Callable[[Any], Array] = as_is) -> Array:
    """See `api.expert_matmul`. Work and memory grow with rows + experts * tile, not with rows * experts."""
    rows = x.shape[0]
    experts = jax.tree.leaves(weights)[0].shape[0]
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
        weight = widen(jax.tree.map(lambda array: array[expert], weights))  # [out, in]
        return jnp.einsum("ri,oi->ro", tile_rows, weight, preferred_element_type=jnp.float32).astype(x.dtype)

    out = jax.lax.map(one_tile, (padded.reshape(tiles, _TILE_ROWS, -1), tile_expert))
    return out.reshape(tiles * _TILE_ROWS, -1)[place]
