"""Remakes or checks `mimo2.json`: what llama.cpp (arch mimo2) computes for the tiny MiMo-V2 checkpoints.

    python -m tests.references.make_mimo2 [--check]

Needs llama-cpp-python and gguf, and imports nothing of the product. Window semantics are llama.cpp's: 128 tokens of a
window of 128, the query's own included.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from tests import tiny
from tests.tiny_gguf import write_mimo2_gguf

COMMITTED = Path(__file__).with_name("mimo2.json")
# Float32 sums in another order from one processor to the next.
TOLERANCE = 1e-4
GREEDY_TOKENS = 40
DECIMALS = 6


def main() -> int:
    made = {"versions": {"llama-cpp-python": llama_cpp.__version__}, "cases": {}}
    for case in tiny.cases():
        if case.name.startswith("mimo_v2"):
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch) / case.name
                folder.mkdir()
                made["cases"][case.name] = run(write_mimo2_gguf(case.into(folder), Path(scratch) / "tiny.gguf"))
    if sys.argv[1:] != ["--check"]:
        COMMITTED.write_text(json.dumps(made).replace('{"first', '\n{"first') + "\n")
        print(f"wrote {COMMITTED.name}: {COMMITTED.stat().st_size} bytes")
        return 0
    complaints = differences(json.loads(COMMITTED.read_text())["cases"], made["cases"])
    print("\n".join(complaints) or f"{COMMITTED.name} holds")
    return 1 if complaints else 0


def run(path: Path) -> dict[str, Any]:
    model = llama_cpp.Llama(
        str(path),
        n_ctx=256,
        n_batch=256,
        n_ubatch=256,
        n_threads=2,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        flash_attn=False,
        swa_full=True,
        logits_all=True,
        verbose=False,
    )
    model.eval(tiny.prompt())
    first = log_probs(model)
    tokens: list[int] = []
    gaps: list[float] = []
    for _ in range(GREEDY_TOKENS):
        row = log_probs(model)
        second, best = np.sort(row)[-2:]
        gaps.append(round(float(best - second), DECIMALS))
        tokens.append(int(row.argmax()))
        model.eval([tokens[-1]])
    model.close()
    return {"first": [round(float(value), DECIMALS) for value in first], "greedy": tokens, "greedy_gaps": gaps}


def log_probs(model: llama_cpp.Llama) -> np.ndarray:
    row = np.asarray(model.scores[model.n_tokens - 1], np.float64)
    row = row - row.max()
    return row - np.log(np.exp(row).sum())


def differences(committed: dict[str, Any], made: dict[str, Any]) -> list[str]:
    complaints = []
    if set(committed) != set(made):
        complaints.append(f"cases: {sorted(committed)} are committed, {sorted(made)} were made")
    for name in set(committed) & set(made):
        off = float(np.abs(np.array(committed[name]["first"]) - np.array(made[name]["first"])).max())
        if not off < TOLERANCE:
            complaints.append(f"{name}: log-probabilities are off by {off}")
        if committed[name]["greedy"] != made[name]["greedy"]:
            complaints.append(f"{name}: the greedy tokens are others")
    return complaints


if __name__ == "__main__":
    sys.exit(main())
