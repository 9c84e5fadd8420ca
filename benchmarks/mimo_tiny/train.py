"""Trains mimo-tiny from scratch and writes it as a model folder.

    python -m benchmarks.mimo_tiny.train

The same seed gives the same text, tokenizer, order and start; the weights are the same on the same machine and JAX.
"""

import argparse
import json
import platform
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.mimo_tiny.acceptance import mean_accepted_length
from benchmarks.mimo_tiny.architecture import model_config
from benchmarks.mimo_tiny.batches import ROW_TOKENS, batches
from benchmarks.mimo_tiny.corpus import Part
from benchmarks.mimo_tiny.evaluate import FOLDER, held_out_batches
from benchmarks.mimo_tiny.hub_format import write_checkpoint
from benchmarks.mimo_tiny.learning import BALANCE_STEP, State, initial_params, learning_rate, make_optimizer, train_step
from benchmarks.mimo_tiny.tokenizer import train_tokenizer, write_tokenizer
from mimo_jax.text import Tokenizer, load_tokenizer

SEED = 20260401
LOG_STEPS = 20
COMPILER_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}  # see `mimo_jax/steps.py`
COLUMNS = ("step", "tokens", "trunk", "draft_1", "draft_2", "draft_3", "busiest_expert")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the model goes (default: the package)")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rows", type=int, default=8, help=f"of a batch, {ROW_TOKENS} tokens each")
    parser.add_argument("--rate", type=float, default=8e-3, help="highest learning rate")
    options = parser.parse_args()
    begin, cpu = time.perf_counter(), time.process_time()
    backend = train_tokenizer()
    write_tokenizer(options.folder, backend)
    tokenizer = load_tokenizer(options.folder)
    assert tokenizer is not None
    state, record = train(tokenizer, options.steps, options.rows, options.rate)
    write_checkpoint(options.folder, state.params, backend)
    record |= {"wall_s": round(time.perf_counter() - begin), "cpu_s": round(time.process_time() - cpu)}
    length = mean_accepted_length(state.params, held_out_batches(32, tokenizer), model_config())
    record["held_out"] = {"tokens_a_step": round(length, 3)}
    (options.folder / "loss.json").write_text(_table(record), encoding="utf-8")
    print(f"{options.folder}: {record['wall_s']} s, {record['cpu_s']} s of CPU time, {length:.2f} tokens a step")


def train(tokenizer: Tokenizer, steps: int, rows: int, rate: float) -> tuple[State, dict[str, Any]]:
    """(the final state, what loss.json says)."""
    config = model_config()
    optimizer, schedule = make_optimizer(rate, steps), learning_rate(rate, steps)
    params = initial_params(jax.random.key(SEED), config)
    state = State(params, optimizer.init(params))
    run = jax.jit(
        partial(train_step, config=config, optimizer=optimizer), donate_argnums=0, compiler_options=COMPILER_OPTIONS
    )
    stream = batches(Part.TRAIN, tokenizer, rows)
    curve, recent, tokens = [], [], 0
    begin, cpu = time.perf_counter(), time.process_time()
    for step in range(1, steps + 1):
        batch = next(stream)
        balance = jnp.float32(BALANCE_STEP * schedule(step) / rate)
        state, losses, busiest = run(state, batch.tokens, batch.counts, batch.weights, balance)
        recent.append(np.append(losses, busiest))
        tokens += int(batch.counts.sum())
        if step % LOG_STEPS == 0 or step == steps:
            curve.append([step, tokens, *(round(float(value), 4) for value in np.mean(recent, axis=0))])
            spent = f"{time.perf_counter() - begin:.0f} s, {time.process_time() - cpu:.0f} s of CPU time"
            print(*(f"{name} {value}" for name, value in zip(COLUMNS, curve[-1], strict=True)), spent, flush=True)
            recent = []
    return state, _record(steps, rows, rate, curve)


def _record(steps: int, rows: int, rate: float, curve: list[list[float]]) -> dict[str, Any]:
    versions = {name: version(name) for name in ("jax", "optax", "numpy", "tokenizers")}
    return {
        "seed": SEED,
        "corpus_seed": Part.TRAIN.value,
        "steps": steps,
        "rows_a_batch": rows,
        "tokens_a_row": ROW_TOKENS,
        "highest_learning_rate": rate,
        "versions": {"python": platform.python_version(), **versions},
        "columns": list(COLUMNS),
        "curve": curve,
    }


def _table(record: dict[str, Any]) -> str:
    """JSON with one line a point of the curve."""
    curve = ",\n    ".join(json.dumps(row) for row in record["curve"])
    rest = json.dumps({**record, "curve": "CURVE"}, indent=2)
    return rest.replace('"CURVE"', f"[\n    {curve}\n  ]") + "\n"


if __name__ == "__main__":
    main()
