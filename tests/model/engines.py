"""Engines for the parity tests: few shapes, because each takes seconds to compile."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mimo_jax import LLM, Params, SamplingParams
from mimo_jax.engine.engine import Engine


def make_llm(model: Path | str, tokens: int, *, chunk: int, **options: Any) -> LLM:
    """One sequence of up to `tokens`, prefilled in chunks: a prefill and a decode program of one table width."""
    return LLM(model, max_model_len=tokens, max_num_seqs=1, max_num_batched_tokens=chunk, progress=False, **options)


def with_chunks(llm: LLM, chunk: int) -> LLM:
    """The same weights and programs, prefilled in chunks of other (smaller) sizes."""
    engine = llm.engine
    limits = replace(engine.limits, prefill_tokens=chunk)
    return LLM.from_engine(Engine(engine.params, engine.steps, limits, engine.ladder), progress=False)


def with_params(llm: LLM, params: Params) -> LLM:
    """The same programs with other weights."""
    engine = llm.engine
    return LLM.from_engine(Engine(params, engine.steps, engine.limits, engine.ladder), progress=False)


def last_log_probs(llm: LLM, token_ids: Sequence[int], rows: int) -> np.ndarray:
    """The last rows of `llm.score(token_ids)`, without the others: 262,144 columns a row are a lot."""
    engine = llm.engine
    engine.warm_up(1, len(token_ids), len(token_ids) + 1, scoring=True, progress=False)
    hidden: list[np.ndarray] = []
    request = engine.make_request("score", token_ids, SamplingParams(max_tokens=1, temperature=0))
    engine.add(replace(request, on_hidden=hidden.append))
    while engine.unfinished:
        engine.step()
    return engine.steps.log_probs(engine.params, np.concatenate(hidden)[-rows:])


def greedy(llm: LLM, prompt_ids: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
    """The continuation and the log-probability of each of its tokens. No token ends it."""
    params = SamplingParams(max_tokens=tokens, temperature=0, logprobs=1, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": list(prompt_ids)}, params, use_tqdm=False)[0].outputs
    assert output.logprobs is not None
    chosen = zip(output.logprobs, output.token_ids, strict=True)
    return output.token_ids, [entries[token].logprob for entries, token in chosen]
