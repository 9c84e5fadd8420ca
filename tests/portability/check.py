"""Compiles every op for every described GPU, holds the emitted code to what it must be, and prints or writes the table.

    python -m tests.portability.check [--write]      # --write: the table in pallas_kernels/README.md is made anew

No GPU is needed; `make portability` installs the compilers. Fails when a case does not compile, when a product of
bfloat16 or int8 is not on the matrix units, when there is float64, or when the committed table is not this one.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from tests.portability import described, stand_ins

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "pallas_kernels" / "README.md"
# What a matrix instruction for products of a type is called. tcgen05's f16 takes its operands' type from a descriptor.
_UNITS = {
    "bfloat16": re.compile(r"bf16|tcgen05\.mma.*kind::f16"),
    "int8": re.compile(r"\.s8|tcgen05\.mma.*kind::i8|mfma\.i32.*i8"),
}
BEGIN, END = "<!-- made by `make portability` -->\n", "<!-- end -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        libraries = Path(scratch)
        stand_ins.build(Path(sysconfig.get_path("purelib")), libraries)
        lines = [line for gpu in described.names() for line in compiled_for(gpu, libraries)]
    wrong = [f"{line['gpu']}: {line['case']}: {fault}" for line in lines if (fault := fault_of(line))]
    found = table(lines)
    before, _, rest = README.read_text().partition(BEGIN)
    committed, _, after = rest.partition(END)
    if options.write:
        README.write_text(before + BEGIN + found + END + after)
    elif committed != found:
        wrong.append(f"{README.name} does not hold this table: make portability WRITE=--write")
    print(found)
    print("\n".join(wrong), file=sys.stderr)
    return bool(wrong)


def compiled_for(gpu: str, libraries: Path) -> list[dict[str, Any]]:
    """In a process of its own: one compiler a process, and the AMD one's libraries are looked for at its start."""
    command = [sys.executable, "-m", "tests.portability.compile_ops", gpu]
    environment = os.environ | {"LD_LIBRARY_PATH": str(libraries)} if described.is_amd(gpu) else dict(os.environ)
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"{gpu}: nothing was compiled\n{run.stderr[-3000:]}")
    print(f"{gpu}: {len(lines)} programs, {sum(line.get('seconds', 0) for line in lines):.0f} s", file=sys.stderr)
    return lines


def fault_of(line: dict[str, Any]) -> str | None:
    if "error" in line:
        return str(line["error"])
    if line["float64"]:
        return "there is float64 in its code"
    kind = line["case"].rpartition(", ")[2]
    if kind in _UNITS and not any(_UNITS[kind].search(name) for name in line["matrix"]):
        return f"no {kind} matrix instruction: {line['matrix']}"
    return None


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: an op's case a row, a GPU a column, the matrix instruction that was found."""
    gpus = sorted({line["gpu"] for line in lines})
    rows = list(dict.fromkeys(line["case"] for line in lines))
    cell = {(line["case"], line["gpu"]): "<br>".join(map(short, line.get("matrix", []))) or "-" for line in lines}
    made = f"| | {' | '.join(gpus)} |\n|---|{'---|' * len(gpus)}\n"
    return made + "".join(f"| {row} | {' | '.join(cell.get((row, gpu), '') for gpu in gpus)} |\n" for row in rows)


def short(instruction: str) -> str:
    return instruction.replace("llvm.amdgcn.", "").replace(".sync.aligned", "").replace(".row.col", "")


if __name__ == "__main__":
    sys.exit(main())
