"""Compiles every op for one described GPU and reads the emitted code.

    python -m tests.portability.compile_ops h200

Prints one JSON line a case: the matrix instruction in the kernel's own code, whether there is float64 in it, bytes of
temporaries, seconds. Exits with 1 if a case does not compile.
"""

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.portability import described

_MATRIX = re.compile(
    r"wgmma\.mma_async[\w.:]*|tcgen05\.mma[\w.:]*|(?<!w)(?<!\.)mma\.sync[\w.:]*|llvm\.amdgcn\.(?:s?mfma)[\w.]*"
)
_FLOAT64 = re.compile(r"\.f64\b|\bdouble\b")


def main(name: str) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        dump = Path(scratch)
        described.prepare(dump)
        failed = 0
        for case, function, arguments in cases(described.device(name)):
            line: dict[str, Any] = {"gpu": name, "case": case}
            try:
                line |= compiled(function, arguments, dump, "rocm" if described.is_amd(name) else "cuda")
            except Exception as error:  # whatever a compiler says is the result
                failed, line["error"] = 1, str(error)[:500]
            print(json.dumps(line), flush=True)
    return failed


def compiled(function: Any, arguments: Any, dump: Path, platform: str) -> dict[str, Any]:
    import jax

    before = set(dump.iterdir())
    start = time.perf_counter()
    program = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).compile()
    seconds = time.perf_counter() - start
    code = "\n".join(file.read_text() for file in set(dump.iterdir()) - before if _is_code(file))
    instructions = sorted(set(_MATRIX.findall(code)))
    return {
        "matrix": instructions,
        "float64": bool(_FLOAT64.search(code)),
        "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
        "seconds": round(seconds, 1),
    }


def _is_code(file: Path) -> bool:
    return file.name.endswith((".ptx", ".ir-with-opt.ll"))


def cases(device: Any) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Name, function and shapes of its arguments, on the device."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from pallas_kernels.attention import paged_attention

    mesh = Mesh(np.array([device]), ("x",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec())

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    # (seqs, step, KV heads, group, head_dim, v_dim, tokens a page, pages a sequence, window)
    attention = {
        "decode, full": (8, 1, 4, 16, 192, 128, 16, 256, None),
        "decode, window": (8, 1, 8, 8, 192, 128, 16, 10, 128),
        "verify, full": (8, 4, 4, 16, 192, 128, 16, 256, None),
        "verify, window": (8, 4, 8, 8, 192, 128, 16, 10, 128),
        "prefill, full": (2, 256, 4, 16, 192, 128, 64, 64, None),
        "prefill, window": (2, 256, 8, 8, 192, 128, 64, 7, 128),
        "prefill, 256 wide": (2, 64, 1, 4, 256, 256, 64, 64, None),
        "decode, odd group": (3, 1, 3, 3, 64, 64, 128, 20, None),
    }
    types = [(name, jnp.bfloat16) for name in attention] + [
        ("decode, window", jnp.float32),
        ("prefill, full", jnp.float32),
    ]
    for name, dtype in types:
        seqs, step, kv_heads, group, head_dim, v_dim, page, width, window = attention[name]
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
