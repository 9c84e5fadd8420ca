"""The signature and the checks of the int8 matmul."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import Choice, choose
from pallas_kernels.int8_matmul.gpu import LEAST_GROUP, int8_matmul_gpu
from pallas_kernels.int8_matmul.reference import int8_matmul_reference

_IMPLEMENTATIONS: dict[str, Any] = {
    "reference": int8_matmul_reference,
    "pallas": int8_matmul_gpu,
    "interpret": partial(int8_matmul_gpu, interpret=True),
}
_KERNEL_DTYPES = ("float32", "bfloat16", "float16")
_KERNEL_ELEMENTS = 1 << 31  # of the weight: the kernel counts them in 32 bits
_EXACT_COLUMNS = (1 << 31) // (127 * 127)  # of a group, whose int8 products are summed in 32 bits


def int8_matmul(
    x: Array, values: Array, scale: Array, *, group: int, int8_activations: bool = False, impl: str = "auto"
) -> Array:
    """x times the transposed weight, whose element [o, i] is values[o, i] * scale[o, i // group].

    x        [rows, in] float
    values   [out, in] int8
    scale    [out, ceil(in / group)] float32
    group    columns that share a scale; `in` for one scale a row. The last group may be short
    int8_activations  each row of x is rounded to int8 by its largest magnitude (ties to even) and the products of a
             group are exact; otherwise x is multiplied as it is
    impl     "auto", "reference", "pallas" or "interpret", see `pallas_kernels/dispatch.py`

    Returns float32 [rows, out], summed in float32. Raises ValueError naming the argument when shapes or types do not
    fit together.
    """
    _check(x, values, scale, group)
    made = int8_matmul_choice(impl, x.dtype, values.shape, group)
    matmul = _IMPLEMENTATIONS[made.implementation]
    out: Array = matmul(x, values, scale, group=group, int8_activations=int8_activations)
    return out


def int8_matmul_choice(impl: str, x_dtype: Any, shape: tuple[int, ...], group: int) -> Choice:
    """Which implementation runs for a weight of [out, in], and why. Raises ValueError when `impl` names one that cannot
    take it."""
    outputs, columns = shape
    refusal = None
    if jnp.dtype(x_dtype).name not in _KERNEL_DTYPES:
        refusal = f"x of type {jnp.dtype(x_dtype).name} ({', '.join(_KERNEL_DTYPES)})"
    elif group < columns and group % LEAST_GROUP:
        refusal = f"a group of {group} columns (a multiple of {LEAST_GROUP}, or all {columns})"
    elif outputs * columns > _KERNEL_ELEMENTS:
        refusal = f"a weight of {outputs * columns} elements (at most {_KERNEL_ELEMENTS})"
    return choose("int8_matmul", impl, refusal)


def _check(x: Array, values: Array, scale: Array, group: int) -> None:
    if x.ndim != 2 or values.ndim != 2 or x.shape[1] != values.shape[1]:
        raise ValueError(f"x is {x.shape} and values {values.shape}; [rows, in] and [out, in] are needed")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype}; a float type is needed")
    if values.dtype != jnp.int8:
        raise ValueError(f"values is {values.dtype}; int8 is needed")
    if group < 1:
        raise ValueError(f"group={group}; at least 1 is needed")
    if min(group, x.shape[1]) > _EXACT_COLUMNS:
        raise ValueError(f"group={group}; products of at most {_EXACT_COLUMNS} columns fit 32 bits")
    wanted = (values.shape[0], -(-values.shape[1] // group))
    if scale.shape != wanted or scale.dtype != jnp.float32:
        raise ValueError(f"scale is {scale.dtype} {scale.shape}; float32 {wanted} is needed")
