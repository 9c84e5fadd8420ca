"""Measures llama.cpp. Started by `benchmarks.decode` with a peer's interpreter and a workload.

Imports nothing of the product.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp  # type: ignore[import-not-found, unused-ignore]
import numpy as np

from benchmarks.workload import Workload, read_workload, report, versions


class LlamaCpp:
    """One `llama_decode` a step for all sequences, with llama.cpp's defaults but for threads and context."""

    def __init__(self, model: Any, workload: Workload, sequences: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * workload.context_tokens
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = workload.threads
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError("llama.cpp made no context")
        self.batch = llama_cpp.llama_batch_init(llama_cpp.llama_n_batch(self.context), 0, 1)
        self.tokens: list[int] = []
        self.position = 0

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        self.position = 0
        self._decode(prompts)

    def step(self) -> None:
        self._decode([[token] for token in self.tokens])

    def _decode(self, rows: Sequence[Sequence[int]]) -> None:
        """The next tokens of every sequence, equally many of each."""
        batch, count = self.batch, len(rows[0])
        batch.n_tokens = 0
        for sequence, row in enumerate(rows):
            for offset, token in enumerate(row):
                place = batch.n_tokens
                batch.token[place] = token
                batch.pos[place] = self.position + offset
                batch.n_seq_id[place] = 1
                batch.seq_id[place][0] = sequence
                batch.logits[place] = offset == count - 1
                batch.n_tokens += 1
        code = llama_cpp.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        self.position += count
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), (len(rows), self.vocab))
        self.tokens = logits.argmax(-1).tolist()


def quantize(source: Path, target: Path, threads: int) -> None:
    """The same GGUF with its matrices as Q8_0, written by llama.cpp itself. A file that is there is taken as it is."""
    if target.exists():
        return
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = threads
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    params.allow_requantize = True
    unfinished = target.with_suffix(".unfinished")
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(unfinished).encode(), ctypes.byref(params))
    if code:
        raise RuntimeError(f"llama_model_quantize returned {code}")
    unfinished.rename(target)


def main() -> None:
    workload = read_workload()
    if workload.weights != "Q8_0":
        raise ValueError(f"weights {workload.weights!r}; Q8_0 is what this script makes")
    path = Path(workload.scratch) / "q8_0.gguf"
    quantize(Path(workload.model), path, workload.threads)
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp could not load {path}")
    report(
        workload,
        lambda sequences: LlamaCpp(model, workload, sequences),
        weights=workload.weights,
        versions=versions("llama-cpp-python"),
    )


if __name__ == "__main__":
    main()
