"""The signature and the checks of the grouped matmul."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from pallas_kernels.expert_matmul.reference import as_is, expert_matmul_reference
from pallas_kernels.expert_matmul.xla import expert_matmul_tiled

# Up to here one gathered copy of an expert per row is cheaper than the tiles' padding (a decode step of few sequences).
_GATHER_ROWS = 16


def expert_matmul(x: Array, weights: Any, expert_of_row: Array, widen: Callable[[Any], Array] = as_is) -> Array:
    """Row r of x times the transposed weight of expert_of_row[r].

    x              [rows, in]
    weights        [experts, out, in], or a tree of arrays [experts, ...] that `widen` makes one array of
    expert_of_row  [rows] int32, ascending: the rows are sorted by expert
    widen          tree of a row's or a tile's experts -> [.., out, in]; never called with all experts

    Returns [rows, out] in x's dtype, accumulated in float32. Raises ValueError when shapes do not fit together.
    """
    wide = jax.eval_shape(widen, weights).shape
    if x.ndim != 2 or len(wide) != 3 or x.shape[1] != wide[2]:
        raise ValueError(f"x is {x.shape} and weights {wide}; [rows, in] and [experts, out, in] are needed")
    if expert_of_row.shape != x.shape[:1]:
        raise ValueError(f"expert_of_row is {expert_of_row.shape}; ({x.shape[0]},) is needed")
    form = expert_matmul_reference if x.shape[0] <= _GATHER_ROWS else expert_matmul_tiled
    return form(x, weights, expert_of_row, widen)
