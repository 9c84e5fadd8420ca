"""Seconds to load a model from its own files and from what `mimo-jax convert` made of them, on the CPU.

    python -m benchmarks.loading [--model demo] [--quantization int8] [--rounds 5]

Both in turns, each in a fresh process, from files that the system has in memory. The clock stops when the weights are
there to be used: every page of them is touched, so that nothing is left for the first token to fetch. Prints one JSON
line: seconds of both ways, a value a round, and `ratio`, the median over the rounds of first by converted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.children import ROOT
from benchmarks.host import host_fields
from mimo_jax.convert import convert_model
from mimo_jax.models import resolve_model

LOAD = """
import json, sys, time
from pathlib import Path
import jax
import numpy as np
from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.checkpoint.load import load_params
from mimo_jax.engine.setup import auto_dtype
from sharding import Rules, make_mesh

device = jax.devices()[0]
mesh = make_mesh(device)
start = time.perf_counter()
checkpoint = open_checkpoint(Path(sys.argv[1]))
params = load_params(checkpoint, auto_dtype(device), mesh, Rules(), quantization=sys.argv[2] or None)
for leaf in jax.tree.leaves(params):
    np.asarray(leaf).reshape(-1).view(np.uint8)[::4096].max(initial=0)  # a byte of every page
print(json.dumps([time.perf_counter() - start, sum(leaf.nbytes for leaf in jax.tree.leaves(params))]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantization")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    host = host_fields(ROOT)
    with tempfile.TemporaryDirectory() as scratch:
        converted = Path(scratch) / "converted"
        convert_model(options.model, converted, quantization=options.quantization)
        result = compare(resolve_model(options.model), converted, options.quantization or "", options.rounds)
    print(json.dumps(host | {"model": options.model, "quantization": options.quantization} | result))


def compare(original: Path, converted: Path, quantization: str, rounds: int) -> dict[str, Any]:
    """Both ways in turns, after a round that is not counted."""
    first: list[float] = []
    again: list[float] = []
    size_bytes = 0
    for turn in range(rounds + 1):
        for path, seconds, asked in ((original, first, quantization), (converted, again, "")):
            used, size_bytes = load(path, asked)
            if turn:
                seconds.append(round(used, 3))
    ratio = statistics.median(one / other for one, other in zip(first, again, strict=True))
    return {"bytes": size_bytes, "first_s": first, "converted_s": again, "ratio": round(ratio, 2)}


def load(path: Path, quantization: str) -> tuple[float, int]:
    """Seconds to load and bytes of the weights, of a fresh process."""
    command = [sys.executable, "-c", LOAD, str(path), quantization]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    used, size_bytes = json.loads(run.stdout)
    return used, size_bytes


if __name__ == "__main__":
    main()
