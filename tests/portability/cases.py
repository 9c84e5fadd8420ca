"""What is compiled for every described GPU: each op at the shapes of real models. Import it behind `described.prepare`.

A case's name ends in the type of its products.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.attention import paged_attention
from pallas_kernels.expert_matmul import expert_matmul
from pallas_kernels.formats import Fp8Block, Int8, MxFp4
from pallas_kernels.int8_matmul import int8_matmul

Case = tuple[str, Any, tuple[Any, ...]]
MakeArray = Callable[..., Any]

# (seqs, step, KV heads, group, head_dim, v_dim, tokens a page, pages a sequence, window)
ATTENTION = {
    "decode, full": (8, 1, 4, 16, 192, 128, 16, 256, None),
    "decode, window": (8, 1, 8, 8, 192, 128, 16, 10, 128),
    "verify, full": (8, 4, 4, 16, 192, 128, 16, 256, None),
    "verify, window": (8, 4, 8, 8, 192, 128, 16, 10, 128),
    "prefill, full": (2, 256, 4, 16, 192, 128, 64, 64, None),
    "prefill, window": (2, 256, 8, 8, 192, 128, 64, 7, 128),
    "prefill, 256 wide": (2, 64, 1, 4, 256, 256, 64, 64, None),
    "decode, odd group": (3, 1, 3, 3, 64, 64, 128, 20, None),
}
# (rows, out, in, group): one scale a row, groups of 128, and sizes that no block divides
INT8_MATMUL = {
    "decode": (8, 13568, 4096, 4096),
    "decode, groups": (8, 4096, 8192, 128),
    "prefill": (2048, 13568, 4096, 4096),
    "prefill, groups": (2048, 4096, 8192, 128),
    "prefill, odd": (77, 999, 576, 128),
}
# (tokens, experts a token, experts, out, in), and the weights' formats: experts, and one group: a dense layer
EXPERT_MATMUL = {
    "decode": (8, 8, 256, 2048, 4096),
    "prefill": (2048, 8, 256, 4096, 2048),
}
DENSE_MATMUL = {
    "dense, decode": (8, 1, 1, 13568, 4096),
    "dense, prefill": (2048, 1, 1, 4096, 8192),
}


def cases(device: Any) -> Iterator[Case]:
    """Name, function and shapes of its arguments, on the device."""
    mesh = Mesh(np.array([device]), ("x",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec())

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    yield from attention(array)
    yield from int8_matmuls(array)
    yield from expert_matmuls(array)


def attention(array: MakeArray) -> Iterator[Case]:
    types = [(name, jnp.bfloat16) for name in ATTENTION] + [
        ("decode, window", jnp.float32),
        ("prefill, full", jnp.float32),
    ]
    for name, dtype in types:
        seqs, step, kv_heads, group, head_dim, v_dim, page, width, window = ATTENTION[name]
        pages = 1 << 16  # indices of keys go past 2^31
        arguments = (
            array(dtype, seqs, step, kv_heads * group, head_dim),
            array(dtype, pages, page, kv_heads, head_dim),
            array(dtype, pages, page, kv_heads, v_dim),
            array(jnp.int32, seqs, width),
            array(jnp.int32, seqs),
            array(jnp.int32, seqs, step),
            array(jnp.int32, seqs),
        )
        options = {"scale": head_dim**-0.5, "window_tokens": window, "first_position": 0, "impl": "pallas"}
        sink = None if window is None else array(jnp.float32, kv_heads * group)

        def attend(sink: Any, *arguments: Any, options: Any = options) -> Any:
            return paged_attention(*arguments, **options, sink=sink)

        yield f"attention: {name}, {dtype.__name__}", attend, (sink, *arguments)


def int8_matmuls(array: MakeArray) -> Iterator[Case]:
    for name, (rows, outputs, columns, group) in INT8_MATMUL.items():
        groups = -(-columns // group)
        arguments = (
            array(jnp.bfloat16, rows, columns),
            array(jnp.int8, outputs, columns),
            array(jnp.float32, outputs, groups),
        )
        for int8_activations in (False, True):
            multiply = partial(int8_matmul, group=group, int8_activations=int8_activations, impl="pallas")
            yield f"int8_matmul: {name}, {'int8' if int8_activations else 'bfloat16'}", multiply, arguments


def expert_matmuls(array: MakeArray) -> Iterator[Case]:
    for name, (tokens, chosen, experts, outputs, columns) in (EXPERT_MATMUL | DENSE_MATMUL).items():
        arguments = (array(jnp.bfloat16, tokens * chosen, columns), array(jnp.int32, tokens * chosen))
        multiply = partial(expert_matmul, most_rows=tokens, impl="pallas")
        for kind in ("bfloat16", "int8", "fp8", "mxfp4") if experts > 1 else ("fp8", "mxfp4"):
            weight = weight_of(kind, array, experts, outputs, columns)

            def swapped(weight: Any, x: Any, expert_of_row: Any, multiply: Any = multiply) -> Any:
                return multiply(x, weight, expert_of_row)

            yield f"expert_matmul: {name}, {kind} weights, bfloat16", swapped, (weight, *arguments)


def weight_of(kind: str, array: MakeArray, experts: int, outputs: int, columns: int) -> Any:
    """As published: one scale a row for int8, blocks of 128 x 128 for float8."""
    shape = (experts, outputs, columns)
    if kind == "int8":
        return Int8(array(jnp.int8, *shape), array(jnp.float32, experts, outputs, 1), columns)
    if kind == "fp8":
        scale = array(jnp.float32, experts, -(-outputs // 128), -(-columns // 128))
        return Fp8Block(array(jnp.float8_e4m3fn, *shape), scale, (128, 128))
    if kind == "mxfp4":
        packed = array(jnp.uint8, experts, outputs, columns // 2)
        return MxFp4(packed, array(jnp.uint8, experts, outputs, columns // 32))
    return array(jnp.bfloat16, *shape)
