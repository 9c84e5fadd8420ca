"""Measures mimo_jax. Started by `benchmarks.decode`, in a process of its own, with a workload as its argument."""

from collections.abc import Sequence

import jax

from benchmarks.workload import Workload, read_workload, report, versions
from mimo_jax import LLM, SamplingParams
from mimo_jax.engine.request import Request


class MimoJax:
    """The engine's own loop: scheduling, building the batch, sampling and detokenising are in the time."""

    def __init__(self, llm: LLM, workload: Workload) -> None:
        self.engine = llm.engine
        self.requests: list[Request] = []
        # Prompts may take several steps, in which the first ones decode already: none may end before the clock does.
        self.params = SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=workload.new_tokens + max(workload.sequences)
        )

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        for request in self.requests:
            self.engine.abort(request.request_id)
        self.requests = [
            self.engine.make_request(str(place), prompt, self.params) for place, prompt in enumerate(prompts)
        ]
        for request in self.requests:
            self.engine.add(request)
        while not all(request.output for request in self.requests):
            self.engine.step()

    def step(self) -> None:
        updates = self.engine.step()
        if len(updates) != len(self.requests):
            raise RuntimeError(f"{len(updates)} of {len(self.requests)} sequences got a token")


def main() -> None:
    """Measures with the defaults of `LLM`, but for the context's length."""
    workload = read_workload()
    llm = LLM(workload.model, dtype=workload.weights, max_model_len=workload.context_tokens, progress=False)
    runner = MimoJax(llm, workload)
    most = runner.params.max_tokens or 0
    shapes = [(sequences, workload.prompt_tokens) for sequences in workload.sequences] + [(1, workload.prefill_tokens)]
    for sequences, tokens in shapes:
        llm.engine.warm_up(sequences, tokens, tokens + most, scoring=False, progress=False)
    weights = str(jax.tree.leaves(llm.engine.params)[0].dtype)
    report(workload, lambda sequences: runner, weights=weights, versions=versions("jax", "jaxlib"))


if __name__ == "__main__":
    main()
