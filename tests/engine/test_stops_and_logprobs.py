"""Where a text ends, in which order the reasons count, and what is reported about its tokens."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from mimo_jax.engine.engine import Engine
from mimo_jax.llm import LLM
from mimo_jax.outputs import CompletionOutput
from mimo_jax.sampling_params import SamplingParams
from tests.engine.helpers import alike, ids, prompts

LONG = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)


def complete(llm: LLM, params: SamplingParams) -> CompletionOutput:
    return llm.generate(prompts([9]), params)[0].outputs[0]


@pytest.fixture
def free(llm: LLM) -> CompletionOutput:
    """The text that nothing ends before max_tokens."""
    return complete(llm, LONG)


def test_the_limit_ends_a_text_at_its_last_token(llm: LLM, free: CompletionOutput) -> None:
    for most in (1, 2, 17):
        output = complete(llm, replace(LONG, max_tokens=most))
        assert output.token_ids == free.token_ids[:most]
        assert (output.finish_reason, output.stop_reason) == ("length", None)


def test_a_stop_id_ends_the_text_where_it_first_comes(llm: LLM, free: CompletionOutput) -> None:
    for place in (0, 5, 20):
        token = free.token_ids[place]
        first = free.token_ids.index(token)
        output = complete(llm, replace(LONG, stop_token_ids=[token]))
        assert output.token_ids == free.token_ids[: first + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", token)


def test_an_end_of_text_token_ends_the_text_unless_ignored_or_too_early(engine: Engine, llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=10)
    first = complete(llm, greedy).token_ids[0]
    end = engine.tokenizer.stop_token_ids[0]
    head = np.asarray(engine.params.head).copy()
    head[end] = 2 * head[first]  # now the end is likelier wherever `first` was the most likely
    ending = alike(engine, params=engine.params.replace(head=jax.device_put(head, engine.params.head.sharding)))
    output = complete(ending, greedy)
    assert (output.token_ids, output.text, output.finish_reason, output.stop_reason) == ([end], "", "stop", None)
    ignoring = complete(ending, replace(greedy, ignore_eos=True))
    assert ignoring.token_ids[0] == end
    assert (len(ignoring.token_ids), ignoring.finish_reason) == (10, "length")
    late = complete(ending, replace(greedy, min_tokens=4))
    assert late.token_ids[0] == first
    assert end not in late.token_ids[:4]


def test_a_stop_wins_over_the_limit_on_the_same_token(llm: LLM, free: CompletionOutput) -> None:
    token = free.token_ids[6]
    most = free.token_ids.index(token) + 1
    output = complete(llm, replace(LONG, stop_token_ids=[token], max_tokens=most))
    assert (output.finish_reason, output.stop_reason) == ("stop", token)
    assert output.token_ids == free.token_ids[:most]


def test_a_stop_string_is_cut_from_the_text_and_is_the_first_that_comes(llm: LLM, free: CompletionOutput) -> None:
    for begin, length in ((3, 1), (5, 3), (11, 2)):
        stop = free.text[begin : begin + length]
        assert len(stop) == length
        output = complete(llm, replace(LONG, stop=[stop, "never in a text of random bytes"]))
        assert output.text == free.text[: free.text.index(stop)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.token_ids == free.token_ids[: len(output.token_ids)]


def test_text_held_back_for_a_stop_that_does_not_come_is_given_out(llm: LLM, free: CompletionOutput) -> None:
    output = complete(llm, replace(LONG, stop=[free.text[-3:] + "x", free.text[4:6] + "never"]))
    assert output.text == free.text
    assert output.finish_reason == "length"


def test_streamed_pieces_join_to_the_whole_text(llm: LLM, free: CompletionOutput) -> None:
    updates = list(llm.stream(prompts([9])[0], LONG))
    assert "".join(update.text for update in updates) == free.text
    assert [token for update in updates for token in update.token_ids] == free.token_ids
    stop = free.text[8:11]
    stopped = [update.text for update in llm.stream(prompts([9])[0], replace(LONG, stop=stop))]
    assert "".join(stopped) == free.text[: free.text.index(stop)]


def test_before_min_tokens_neither_stop_ids_nor_stop_strings_end_the_text(llm: LLM, free: CompletionOutput) -> None:
    token = free.token_ids[2]
    output = complete(llm, replace(LONG, stop_token_ids=[token], min_tokens=15))
    assert token not in output.token_ids[:15]
    assert len(output.token_ids) >= 15
    everything = [chr(code) for code in range(ord("a"), ord("p"))]
    output = complete(llm, replace(LONG, stop=everything, min_tokens=20))
    assert output.token_ids[:20] == free.token_ids[:20]
    assert complete(llm, replace(LONG, stop_token_ids=[token], min_tokens=40)).finish_reason == "length"


def test_log_probabilities_are_the_log_softmax_with_right_ranks(llm: LLM) -> None:
    prompt = ids(21)
    params = replace(LONG, logprobs=5, prompt_logprobs=2, top_k=7, temperature=2.0)
    output = llm.generate({"prompt_token_ids": prompt}, params)[0]
    choice = output.outputs[0]
    scored = llm.score(prompt + choice.token_ids)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    text = prompt + choice.token_ids
    for place, entry in enumerate([*output.prompt_logprobs[1:], *choice.logprobs]):
        row, token = scored[place], text[place + 1]
        best = np.argsort(-row, kind="stable")[: 2 if place < len(prompt) - 1 else 5].tolist()
        assert list(entry)[: len(best)] == best
        assert set(entry) == {*best, token}
        assert entry[token].rank == 1 + int((row > row[token]).sum())
        for token_id, value in entry.items():
            assert value.logprob == pytest.approx(row[token_id], abs=2e-5)
            assert value.decoded_token == llm.tokenizer.token_text(token_id)
    assert choice.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(choice.logprobs, choice.token_ids, strict=True))
    )


@pytest.mark.parametrize("count", [0, 1, 20])
def test_as_many_alternatives_are_listed_as_were_asked_for(llm: LLM, count: int) -> None:
    choice = complete(llm, replace(LONG, logprobs=count))
    for entry, token in zip(choice.logprobs, choice.token_ids, strict=True):
        assert token in entry
        assert count <= len(entry) <= count + 1
        listed = [value.logprob for value in list(entry.values())[:count]]
        assert listed == sorted(listed, reverse=True)
    assert complete(llm, LONG).logprobs is None
