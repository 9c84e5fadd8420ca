"""The signature and the checks of the grouped matmul."""

from jax import Array

from pallas_kernels.expert_matmul.reference import expert_matmul_reference
from pallas_kernels.expert_matmul.xla import expert_matmul_tiled

# Up to here one gathered copy of an expert per row is cheaper than the tiles' padding (a decode step of few sequences).
_GATHER_ROWS = 16


def expert_matmul(x: Array, weights: Array, expert_of_row: Array) -> Array:
    """Row r of x times the transposed weight of expert_of_row[r].

    x              [rows, in]
    weights        [experts, out, in]
    expert_of_row  [rows] int32, ascending: the rows are sorted by expert

    Returns [rows, out] in x's dtype, accumulated in float32. Raises ValueError when shapes do not fit together.
    """
    if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != weights.shape[2]:
        raise ValueError(f"x is {x.shape} and weights {weights.shape}; [rows, in] and [experts, out, in] are needed")
    if expert_of_row.shape != x.shape[:1]:
        raise ValueError(f"expert_of_row is {expert_of_row.shape}; ({x.shape[0]},) is needed")
    form = expert_matmul_reference if x.shape[0] <= _GATHER_ROWS else expert_matmul_tiled
    return form(x, weights, expert_of_row)
