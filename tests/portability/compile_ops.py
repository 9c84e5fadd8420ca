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
        from tests.portability.cases import cases

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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
