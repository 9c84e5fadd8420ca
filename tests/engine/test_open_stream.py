"""An LLM serves one call at a time: a stream that is still open is said, not mixed up."""

from pathlib import Path

import numpy as np
import pytest

from mimo_jax.engine.setup import EngineOptions, compile_cache_folder
from mimo_jax.errors import RequestError
from mimo_jax.llm import LLM
from mimo_jax.sampling_params import SamplingParams
from tests.tiny import write_llama, write_mimo_v2_flash

_GREEDY = SamplingParams(temperature=0, max_tokens=4)


def test_a_second_call_while_a_stream_is_open_is_refused_and_closing_it_helps(tmp_path: Path) -> None:
    folder = write_llama(tmp_path, 1, num_hidden_layers=1)
    llm = LLM(folder, max_model_len=32, max_num_seqs=1, max_num_batched_tokens=16, progress=False)
    prompt = {"prompt_token_ids": np.arange(5)}
    alone = llm.generate(prompt, _GREEDY)[0].outputs[0].token_ids
    stream = llm.stream(prompt, _GREEDY)
    assert next(stream).token_ids == (alone[0],)
    for second in (lambda: llm.generate(prompt, _GREEDY), lambda: llm.score([1]), lambda: next(llm.stream(prompt))):
        with pytest.raises(RequestError, match="still open"):
            second()
    assert [update.token_ids[0] for update in stream] == alone[1:]
    assert llm.generate(prompt, _GREEDY)[0].outputs[0].token_ids == alone
    for wrong in (None, 5, {"prompt_token_ids": None}, {"prompt_token_ids": "12"}):
        with pytest.raises(RequestError):
            llm.generate(wrong, _GREEDY)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate(prompt, [{"max_tokens": 3}])  # type: ignore[list-item]


def test_a_cache_too_small_for_the_windows_is_refused(tmp_path: Path) -> None:
    folder = write_mimo_v2_flash(tmp_path, 1, hybrid_layer_pattern=[1], moe_layer_freq=[0])
    with pytest.raises(ValueError, match="kv_cache_memory_bytes"):
        LLM(folder, max_model_len=64, kv_cache_memory_bytes=1, progress=False)


@pytest.mark.parametrize(
    ("option", "value"),
    [("hf_overrides", [1]), ("seed", "x"), ("model", None), ("seed", np.int64(3)), ("dtype", "int4")],
)
def test_options_of_a_wrong_kind_are_named(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=option):
        EngineOptions(**{"model": "demo", option: value})  # type: ignore[arg-type]


def test_numpy_numbers_are_numbers() -> None:
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), seed=np.uint32(7))  # type: ignore[arg-type]
    assert (params.max_tokens, params.temperature, params.seed) == (3, 0.5, 7)
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams(temperature=10**400)


def test_an_empty_cache_variable_means_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMO_JAX_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert compile_cache_folder() == Path.home() / ".cache" / "mimo_jax"
