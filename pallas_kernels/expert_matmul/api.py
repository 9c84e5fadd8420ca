"""The signature and the checks of the grouped matmul."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import Choice, choose
from pallas_kernels.expert_matmul.gpu import LEAST_GROUP, expert_matmul_gpu
from pallas_kernels.expert_matmul.xla import expert_matmul_xla
from pallas_kernels.formats import FORMATS, Fp8Block, Int8, MxFp4, Weight, scale_block

_KERNEL_DTYPES = ("float32", "bfloat16", "float16")
# The kernel counts elements in 32 bits up to arrays of 2^32 bytes, in 64 bits beyond.
_KERNEL_NARROW_BYTES, _KERNEL_NARROW_ELEMENTS = 1 << 32, 1 << 31


def expert_matmul(
    x: Array,
    weight: Weight,
    expert_of_row: Array,
    *,
    most_rows: int | None = None,
    out_dtype: Any = None,
    impl: str = "auto",
) -> Array:
    """Row r of x times the transposed weight of expert_of_row[r].

    x              [rows, in] float
    weight         [experts, out, in], an array or one of the formats of `pallas_kernels/formats.py`
    expert_of_row  [rows] int32 in [0, experts), ascending: the rows are sorted by expert
    most_rows      rows that one expert has at most: the tokens, where a token chooses an expert once. By default `rows`
    out_dtype      of the result; x's by default
    impl           "auto", "reference", "pallas" or "interpret", see `pallas_kernels/dispatch.py`

    Returns [rows, out], accumulated in float32. No more than a tile of an expert is widened at once, or where there is
    no kernel, no more experts than are multiplied at once. The kernel reads a float8 NaN as 480 times its scale. Raises
    ValueError naming the argument when shapes or types do not fit together.
    """
    _check(x, weight, expert_of_row, most_rows)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    made = expert_matmul_choice(impl, x.dtype, weight)
    if made.implementation == "reference":
        return expert_matmul_xla(x, weight, expert_of_row, out_dtype=out_dtype)
    kernel = partial(expert_matmul_gpu, interpret=made.implementation == "interpret")
    return kernel(x, weight, expert_of_row, most_rows=min(most_rows or x.shape[0], x.shape[0]), out_dtype=out_dtype)


def expert_matmul_choice(impl: str, x_dtype: Any, weight: Weight) -> Choice:
    """Which implementation runs for such arrays, or their specs, and why. Raises ValueError when `impl` names one that
    cannot take them."""
    return choose("expert_matmul", impl, _refusal(x_dtype, weight))


def _refusal(x_dtype: Any, weight: Weight) -> str | None:
    stored = jax.tree.leaves(weight)[0]
    elements, columns = math.prod(stored.shape), stored.shape[-1]
    if jnp.dtype(x_dtype).name not in _KERNEL_DTYPES:
        return f"x of type {jnp.dtype(x_dtype).name} ({', '.join(_KERNEL_DTYPES)})"
    if not isinstance(weight, FORMATS) and stored.dtype != x_dtype:
        return f"a weight of type {jnp.dtype(stored.dtype).name} with x of {jnp.dtype(x_dtype).name}"
    group = scale_block(weight)[1] if isinstance(weight, FORMATS) else columns
    if group < columns and group % LEAST_GROUP:
        return f"a scale for {group} columns (a multiple of {LEAST_GROUP}, or all {columns})"
    if elements > _KERNEL_NARROW_ELEMENTS and elements * stored.dtype.itemsize <= _KERNEL_NARROW_BYTES:
        return f"a weight of {elements} bytes (at most {_KERNEL_NARROW_ELEMENTS}, or over {_KERNEL_NARROW_BYTES})"
    return None


def _check(x: Array, weight: Weight, expert_of_row: Array, most_rows: int | None) -> None:
    stored = jax.tree.leaves(weight)[0]
    shape = (*stored.shape[:-1], 2 * stored.shape[-1]) if isinstance(weight, MxFp4) else stored.shape
    if x.ndim != 2 or len(shape) != 3 or x.shape[1] != shape[2]:
        raise ValueError(f"x is {x.shape} and weight {shape}; [rows, in] and [experts, out, in] are needed")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype}; a float type is needed")
    if isinstance(weight, FORMATS):
        _check_format(weight, shape)
    if expert_of_row.shape != x.shape[:1] or not jnp.issubdtype(expert_of_row.dtype, jnp.integer):
        raise ValueError(
            f"expert_of_row is {expert_of_row.dtype} {expert_of_row.shape}; int32 ({x.shape[0]},) is needed"
        )
    if most_rows is not None and most_rows < 1:
        raise ValueError(f"most_rows={most_rows}; at least 1 is needed")


def _check_format(weight: Any, shape: tuple[int, ...]) -> None:
    stored, scale = jax.tree.leaves(weight)
    stored_dtype = {Int8: jnp.int8, MxFp4: jnp.uint8, Fp8Block: jnp.float8_e4m3fn}[type(weight)]
    scale_dtype = jnp.uint8 if isinstance(weight, MxFp4) else jnp.float32
    rows, columns = scale_block(weight)
    if min(rows, columns) < 1:
        raise ValueError(f"weight has a scale for {rows} x {columns} elements; at least 1 x 1 is needed")
    scales = (shape[0], -(-shape[1] // rows), -(-shape[2] // columns))
    for name, array, wanted, dtype in (
        ("weight", stored, stored.shape, stored_dtype),
        ("the weight's scale", scale, scales, scale_dtype),
    ):
        if array.shape != wanted or array.dtype != dtype:
            raise ValueError(f"{name} is {array.dtype} {array.shape}; {jnp.dtype(dtype).name} {wanted} is needed")
