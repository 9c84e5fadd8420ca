"""What every engine is asked to do and how it is timed. Standard library only: each peer's interpreter imports it."""

import importlib.metadata
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

# All of them are ordinary words of the model's vocabulary of 49152.
FIRST_ID, LAST_ID = 1000, 40000

Timed = tuple[tuple[float, ...], tuple[int, ...]]  # Result's attempts and timed_tokens


@dataclass(frozen=True)
class Workload:
    """One engine's task in one round.

    model                GGUF file
    weights              format that the engine is to compute with: "float32", "bfloat16" or "Q8_0"
    scratch              folder for files that an engine makes once and finds again in the next round
    threads              cores to use
    sequences            decode is measured at each of these numbers of sequences
    prompt_tokens        of each sequence whose decode is measured
    new_tokens           of each sequence; the first comes from the prompt and is not timed
    prefill_tokens       of the one prompt whose time to first token is measured
    attempts             of each measurement; their median counts
    budget_s             a measurement that has taken this long goes no further: fewer tokens, fewer attempts
    """

    model: str
    weights: str
    scratch: str
    threads: int
    sequences: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 32
    new_tokens: int = 48
    prefill_tokens: int = 512
    attempts: int = 3
    budget_s: float = 20.0

    @property
    def context_tokens(self) -> int:
        """Of a sequence, prompt and output, with room to spare."""
        return max(self.prompt_tokens, self.prefill_tokens) + self.new_tokens + 2 * max(self.sequences)

    def prompts(self, sequences: int, tokens: int, seed: int) -> list[list[int]]:
        """[sequences][tokens] ids, the same for every engine. No two seeds share a prefix that could be reused."""
        numbers = random.Random(f"{sequences} {tokens} {seed}")
        return [[numbers.randint(FIRST_ID, LAST_ID) for _ in range(tokens)] for _ in range(sequences)]


@dataclass(frozen=True)
class Result:
    """One measurement in one round. `attempts` are in `unit`; `timed_tokens` were timed in each, of each sequence."""

    measurement: str
    unit: str
    attempts: tuple[float, ...]
    timed_tokens: tuple[int, ...]
    weights: str
    versions: dict[str, str]

    @property
    def value(self) -> float:
        """The median attempt."""
        return statistics.median(self.attempts)


class Runner(Protocol):
    """An engine in the middle of a batch. Greedy, and an end-of-text token does not end a sequence."""

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Forgets the former batch and computes these prompts, until each has its first new token in this process."""

    def step(self) -> None:
        """Computes one more token of each sequence, until all are in this process."""


def read_workload() -> Workload:
    """From the command line, as `argument` wrote it."""
    fields = json.loads(sys.argv[1])
    return Workload(**fields | {"sequences": tuple(fields["sequences"])})


def argument(workload: Workload) -> str:
    """A workload as one command line argument."""
    return json.dumps(asdict(workload))


def read_result(line: str) -> Result | None:
    """A line that `report` printed; None for any other output."""
    try:
        fields = json.loads(line)
        attempts, tokens = tuple(fields["attempts"]), tuple(fields["timed_tokens"])
        return Result(**fields | {"attempts": attempts, "timed_tokens": tokens})
    except (ValueError, TypeError, KeyError):
        return None


def versions(*packages: str) -> dict[str, str]:
    """Of this interpreter and of packages installed in it."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


def report(workload: Workload, runner_for: Callable[[int], Runner], *, weights: str, versions: dict[str, str]) -> None:
    """Measures decode and prefill and prints one line each, at once. `runner_for(sequences)` makes what is measured."""
    for sequences in workload.sequences:
        rates, tokens = measure_decode(workload, runner_for(sequences), sequences)
        print_result(Result(f"decode_{sequences}", "tokens/s", rates, tokens, weights, versions))
    rates, tokens = measure_prefill(workload, runner_for(1))
    print_result(Result(f"prefill_{workload.prefill_tokens}", "tokens/s", rates, tokens, weights, versions))


def print_result(result: Result) -> None:
    print(json.dumps(asdict(result)), flush=True)


def measure_decode(workload: Workload, runner: Runner, sequences: int) -> Timed:
    """Tokens/s of all sequences together, from the first token of each to the last. One short attempt goes before."""
    rates: list[float] = []
    tokens: list[int] = []
    begin = time.monotonic()
    while len(rates) < workload.attempts and (not rates or time.monotonic() - begin < workload.budget_s):
        if not rates:
            runner.start(workload.prompts(sequences, workload.prompt_tokens, seed=0))
            runner.step()
            runner.step()
        runner.start(workload.prompts(sequences, workload.prompt_tokens, seed=1 + len(rates)))
        steps, elapsed, first = 0, 0.0, time.perf_counter()
        while steps < workload.new_tokens - 1 and elapsed < workload.budget_s:
            runner.step()
            steps, elapsed = steps + 1, time.perf_counter() - first
        rates.append(sequences * steps / elapsed)
        tokens.append(steps)
    return tuple(rates), tuple(tokens)


def measure_prefill(workload: Workload, runner: Runner) -> Timed:
    """Prompt tokens/s of one prompt, from its ids to its first new token. One uncounted attempt goes before."""
    rates: list[float] = []
    begin = time.monotonic()
    runner.start(workload.prompts(1, workload.prefill_tokens, seed=0))
    while len(rates) < workload.attempts and (not rates or time.monotonic() - begin < workload.budget_s):
        prompts = workload.prompts(1, workload.prefill_tokens, seed=1 + len(rates))
        first = time.perf_counter()
        runner.start(prompts)
        rates.append(workload.prefill_tokens / (time.perf_counter() - first))
    return tuple(rates), (workload.prefill_tokens,) * len(rates)
