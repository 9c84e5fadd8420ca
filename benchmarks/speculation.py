"""Tokens per second with and without draft heads, on the CPU.

    python -m benchmarks.speculation [--model mimo-tiny] [--sequences 1,8] [--tokens 200] [--rounds 5]

Decoding alone, from the first token on: greedy answers, of up to `--tokens` each, to held-out questions of mimo-tiny's
kinds. Both ways run in one process in turns, on programs that are compiled and warm. Prints one JSON line for each
number of sequences: tokens/s of both ways, a value a round, and `ratio`, the median over the rounds of with by without.
Speculation decides by its own rule (see mimo_jax/engine/speculation.py) whether to verify. Every round has the same
prompts.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.children import ROOT
from benchmarks.host import host_fields
from benchmarks.mimo_tiny.evaluate import held_out
from mimo_jax import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mimo-tiny")
    parser.add_argument("--sequences", default="1,8")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    counts = [int(count) for count in options.sequences.split(",")]
    host = host_fields(ROOT)
    ways = {"with": None, "without": 0}
    llms = {
        name: LLM(
            options.model,
            num_speculative_tokens=heads,
            max_model_len=1024,
            max_num_seqs=max(counts),
            progress=False,
        )
        for name, heads in ways.items()
    }
    for count in counts:
        print(json.dumps(host | {"model": options.model} | compare(llms, count, options.tokens, options.rounds)))


def compare(llms: dict[str, LLM], sequences: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Both ways in turns over the same questions, after a round that is not counted."""
    asked = [document.prompt() for document in held_out(max(4, sequences))]
    groups = [asked[first : first + sequences] for first in range(0, len(asked), sequences)]
    speeds: dict[str, list[float]] = {name: [] for name in llms}
    for llm in llms.values():
        llm.generate(asked, SamplingParams(temperature=0, max_tokens=tokens), use_tqdm=False)  # compiles what it meets
    for turn in range(rounds + 1):
        for name, llm in llms.items():
            speed = measure(llm, groups, tokens)
            if turn:
                speeds[name].append(round(speed, 1))
    ratios = [one / other for one, other in zip(speeds["with"], speeds["without"], strict=True)]
    metrics = llms["with"].draft_metrics
    return {
        "measurement": f"decode_{sequences}",
        "unit": "tokens/s",
        "most_tokens": tokens,
        **speeds,
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "mean_accepted_length": round(metrics.mean_accepted_length, 3),
        "accepted_at": metrics.accepted_at,
    }


def measure(llm: LLM, groups: Sequence[Sequence[str]], tokens: int) -> float:
    """Tokens a second over all groups, one after the other, from when every prompt of a group has its first token."""
    params, engine = SamplingParams(temperature=0, max_tokens=tokens), llm.engine
    seconds, made = 0.0, 0
    for group in groups:
        requests = [
            engine.make_request(str(place), llm.tokenizer.encode(prompt), params) for place, prompt in enumerate(group)
        ]
        for request in requests:
            engine.add(request)
        while not all(request.output for request in requests):
            engine.step()
        begin, before = time.perf_counter(), sum(len(request.output) for request in requests)
        while engine.unfinished:
            engine.step()
        seconds += time.perf_counter() - begin
        made += sum(len(request.output) for request in requests) - before
    return made / seconds


if __name__ == "__main__":
    main()
