"""The engine on quantised weights, draft heads included: the tokens of the floats that they stand for."""

from pathlib import Path

import numpy as np
import pytest

from mimo_jax import LLM, SamplingParams
from tests import tiny
from tests.checkpoint.published import publish, write_truth


def answer(folder: Path, **options: object) -> tuple[list[int], float, int]:
    """Greedy tokens, the sum of their log-probabilities, and how many draft heads took part."""
    sizes = {"max_model_len": 32, "max_num_seqs": 1, "max_num_batched_tokens": 16, "block_size": 8}
    llm = LLM(folder, progress=False, **sizes, **options)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
    (output,) = llm.generate({"prompt_token_ids": tiny.prompt(20)}, params, use_tqdm=False)[0].outputs
    assert output.logprobs is not None
    chosen = zip(output.logprobs, output.token_ids, strict=True)
    total = sum(entries[token].logprob for entries, token in chosen)
    return output.token_ids, total, llm.engine.steps.config.draft_heads


pytestmark = pytest.mark.slow

# A layer of each kind, so that little is compiled.
PATTERN = {"hybrid_layer_pattern": [0, 1]}


def test_the_engine_gives_the_tokens_of_the_widened_weights(tmp_path: Path) -> None:
    """fp8 attention and dense layers, mxfp4 experts, three draft heads."""
    model = publish(tmp_path / "model", "v2.6", **PATTERN)
    wanted, total, _ = answer(write_truth(tmp_path / "truth", model), num_speculative_tokens=0)
    got, sum_, used = answer(model.folder)
    assert got == wanted
    assert sum_ == pytest.approx(total, abs=1e-3)
    assert used == 3


def test_the_engine_runs_on_int8(tmp_path: Path) -> None:
    """Near the floats: each weight is off by at most 1/254 of its row's largest."""
    model = publish(tmp_path / "model", "bf16", **PATTERN)
    _, total, _ = answer(model.folder, num_speculative_tokens=0)
    _, near, heads = answer(model.folder, quantization="int8", num_speculative_tokens=1)
    assert 0 < np.abs(near - total) < 1.0
    assert heads == 1
