"""One table of legal, off and illegal values; what is illegal is named."""

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from mimo_jax.errors import RequestError
from mimo_jax.sampling_params import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_STRING_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

BIG = 2**31 - 1
LEGAL: dict[str, list[Any]] = {
    "n": [1, 2, MAX_CHOICES],
    "max_tokens": [1, 16, BIG, None],
    "min_tokens": [0, 1, 16],
    "temperature": [0, 0.0, 1e-300, 1e-6, 1, 100, 100.0],
    "top_p": [1e-6, 0.5, 1, 1.0],
    "top_k": [-1, 0, 1, BIG],
    "min_p": [0, 0.5, 1],
    "seed": [None, 0, -(2**63), 2**64 - 1],
    "stop": [None, "a", ["a", "bc"], ("\n",), [], ["x" * MAX_STOP_STRING_CHARACTERS], ["x"] * MAX_STOP_STRINGS],
    "stop_token_ids": [None, [], [0], (5, 7), list(range(MAX_STOP_TOKEN_IDS))],
    "ignore_eos": [True, False],
    "logprobs": [None, 0, 1, MAX_LOGPROBS],
    "prompt_logprobs": [None, 0, 1, MAX_LOGPROBS],
}
ILLEGAL: dict[str, list[Any]] = {
    "n": [0, -1, MAX_CHOICES + 1, 1.0, "2", True, None],
    "max_tokens": [0, -1, BIG + 1, 2.5, "16", True],
    "min_tokens": [-1, 17, BIG + 1, 1.0, None],  # 17 is over the default max_tokens
    "temperature": [-1e-9, 100.1, math.nan, math.inf, -math.inf, "1", None, True],
    "top_p": [0, 0.0, -0.1, 1.0001, math.nan, math.inf, "0.5", None, True],
    "top_k": [-2, 2**31, 1.0, "5", None, True],
    "min_p": [-0.1, 1.1, math.nan, math.inf, None, False],
    "seed": [2**64, -(2**63) - 1, 1.5, "7", True],
    "stop": ["", [""], ["a", ""], [1], 5, b"a", {"a": 1}, ["x"] * (MAX_STOP_STRINGS + 1),
             ["x" * (MAX_STOP_STRING_CHARACTERS + 1)], [None]],
    "stop_token_ids": [[-1], [2**31], [1.0], ["1"], [True], "12", 5, {1}, list(range(MAX_STOP_TOKEN_IDS + 1))],
    "ignore_eos": [None, 0, 1, "true"],
    "logprobs": [-1, MAX_LOGPROBS + 1, 1.0, True, "1"],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1, 1.0, True, "1"],
}  # fmt: skip


def pairs(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}-{place}") for name in table for place, value in enumerate(table[name])
    ]


def test_the_tables_cover_every_parameter() -> None:
    names = set(SamplingParams.__dataclass_fields__)
    assert set(LEGAL) == names
    assert set(ILLEGAL) == names


@pytest.mark.parametrize(("name", "value"), pairs(LEGAL))
def test_a_legal_value_is_taken(name: str, value: Any) -> None:
    taken = getattr(SamplingParams(**{name: value}), name)
    assert (
        list(taken) == list([value] if isinstance(value, str) else value or ())
        if name.startswith("stop")
        else (taken == value)
    )


@pytest.mark.parametrize(("name", "value"), pairs(ILLEGAL))
def test_an_illegal_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_an_error_does_not_repeat_a_huge_value() -> None:
    for name in ("stop_token_ids", "temperature", "top_k"):
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: "x" * 10**6})
        assert len(str(caught.value)) < 300


def test_min_tokens_may_reach_max_tokens_and_not_pass_it() -> None:
    assert SamplingParams(max_tokens=5, min_tokens=5).min_tokens == 5
    assert SamplingParams(max_tokens=None, min_tokens=500).min_tokens == 500
    with pytest.raises(RequestError, match="min_tokens=6"):
        SamplingParams(max_tokens=5, min_tokens=6)


def test_params_are_frozen_and_keep_no_list_of_the_caller() -> None:
    stop, ids = ["a"], [3]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("b")
    ids.append(4)
    assert params.stop_strings == ("a",)
    assert params.stop_token_ids == (3,)
    with pytest.raises(FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
