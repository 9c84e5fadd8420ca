"""Offline batches: as many outputs as inputs, in order; whatever ends a call, nothing stays queued."""

from dataclasses import replace
from typing import Any

import pytest

from mimo_jax.engine.engine import Engine
from mimo_jax.engine.request import FinishReason
from mimo_jax.errors import RequestError
from mimo_jax.llm import LLM
from mimo_jax.sampling_params import SamplingParams
from tests.engine.helpers import GREEDY, SEEDED, alike, assert_idle, ids, prompts, run_to_end, start, tokens

BAD: dict[str, Any] = {
    "too long": {"prompt_token_ids": ids(128)},
    "empty": {"prompt_token_ids": []},
    "id past the vocabulary": {"prompt_token_ids": [1, 262]},
    "negative id": {"prompt_token_ids": [1, -1]},
    "id that is no number": {"prompt_token_ids": [1, "2"]},
    "two kinds": {"prompt_token_ids": [1], "prompt": "a"},
    "no prompt": 5,
    "max_tokens over the rest": {"prompt_token_ids": ids(120)},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_bad_prompt_is_found_before_anything_runs(
    engine: Engine, llm: LLM, bad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = prompts([5, 9])
    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", lambda: pytest.fail("a step ran"))
        with pytest.raises(RequestError):
            llm.generate([*good, bad, good[0]], GREEDY)
    assert_idle(engine)
    assert [output.prompt_token_ids for output in llm.generate(good, GREEDY)] == [ids(5), ids(9)]


def test_the_error_names_the_prompt_that_cannot_be_served(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 2: the prompt has 128 tokens") as caught:
        llm.generate([*prompts([5, 9, 128]), *prompts([5])], GREEDY)
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="3 sampling_params for 2 prompts"):
        llm.generate(prompts([5, 9]), [GREEDY] * 3)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    lengths = [1 + (7 * place) % 37 for place in range(40)]
    most = [1 + (11 * place) % 20 for place in range(40)]
    params = [replace(GREEDY, max_tokens=count) for count in most]
    outputs = llm.generate(prompts(lengths), params)
    assert [output.prompt_token_ids for output in outputs] == [ids(length) for length in lengths]
    assert [len(output.outputs[0].token_ids) for output in outputs] == most
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert len({output.request_id for output in outputs}) == 40


def test_equal_prompts_are_answered_each(llm: LLM) -> None:
    answers = tokens(llm.generate(prompts([9] * 5), GREEDY))
    assert len(answers) == 5
    assert all(answer == answers[0] for answer in answers)
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize("place", ["between steps", "in a step"])
def test_an_interrupt_leaves_nothing_queued_and_the_next_call_unaffected(
    engine: Engine, llm: LLM, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(llm.generate(prompts([30, 9, 40]), GREEDY))
    owner, name = (engine, "step") if place == "between steps" else (engine.steps, "run")
    original, calls = getattr(owner, name), []

    def interrupted(*arguments: Any) -> Any:
        result = original(*arguments)  # a step has used up the cache it was given
        calls.append(result)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts([30, 9, 40]), GREEDY)
    assert_idle(engine)
    assert tokens(llm.generate(prompts([30, 9, 40]), GREEDY)) == expected


@pytest.mark.parametrize("failing", [1, 2, 5])
def test_a_step_that_fails_ends_all_requests_and_the_engine_lives_on(
    engine: Engine, llm: LLM, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(llm.generate(prompts([30, 9]), GREEDY))
    run, calls = engine.steps.run, []

    def fails(*arguments: Any) -> Any:
        calls.append(run(*arguments))
        if len(calls) == failing:
            raise RuntimeError("the device is gone")
        return calls[-1]

    requests = [start(engine, name, ids(length), GREEDY) for name, length in (("a", 30), ("b", 9))]
    with monkeypatch.context() as patch:
        patch.setattr(engine.steps, "run", fails)
        with pytest.raises(RuntimeError, match="gone"):
            run_to_end(engine)
    assert [request.finish_reason for request in requests] == [FinishReason.ERROR] * 2
    assert_idle(engine)
    engine.abort("a")
    assert tokens(llm.generate(prompts([30, 9]), GREEDY)) == expected


@pytest.mark.parametrize("steps", range(6))
def test_an_abort_at_any_time_frees_everything_and_disturbs_nobody(engine: Engine, llm: LLM, steps: int) -> None:
    """Before the first step, in the middle of a prompt, while decoding."""
    expected = tokens(llm.generate(prompts([9]), GREEDY))[0]
    gone = start(engine, "gone", ids(50), GREEDY)
    stays = start(engine, "stays", ids(9), GREEDY)
    for _ in range(steps):
        engine.step()
    engine.abort("gone")
    engine.abort("gone")
    engine.abort("never heard of")
    engine.scheduler.check()
    assert gone.finish_reason is FinishReason.ABORT
    assert not gone.full_pages
    assert not gone.window_pages
    updates = run_to_end(engine)
    assert all(update.request is stays for update in updates)
    assert stays.output == expected
    assert [update.finished for update in updates].count(True) == 1


def test_a_closed_stream_ends_its_request(engine: Engine, llm: LLM) -> None:
    stream = llm.stream(prompts([9])[0], GREEDY)
    next(stream)
    assert engine.unfinished == 1
    stream.close()
    assert_idle(engine)
    assert "".join(update.text for update in llm.stream(prompts([9])[0], GREEDY)) == (
        llm.generate(prompts([9])[0], GREEDY)[0].outputs[0].text
    )


def test_an_id_can_run_only_once_at_a_time(engine: Engine) -> None:
    start(engine, "same", ids(5), GREEDY)
    with pytest.raises(RequestError, match="running already"):
        start(engine, "same", ids(6), GREEDY)
    assert engine.unfinished == 1
    run_to_end(engine)


def test_choices_have_lives_of_their_own(llm: LLM) -> None:
    params = replace(SEEDED, n=4, logprobs=3)
    output = llm.generate(prompts([13]), params)[0]
    assert [choice.index for choice in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 4
    assert [len(choice.logprobs) for choice in output.outputs] == [12] * 4
    assert llm.generate(prompts([13]), params)[0].outputs == output.outputs
    assert tokens(llm.generate(prompts([13]), SEEDED)) == [output.outputs[0].token_ids]


def test_one_choice_that_stops_early_leaves_the_others_alone(llm: LLM) -> None:
    params = replace(SEEDED, n=4)
    free = [choice.token_ids for choice in llm.generate(prompts([13]), params)[0].outputs]
    stop = next(token for token in free[2][2:] if all(token not in free[other] for other in (0, 1, 3)))
    stopped = llm.generate(prompts([13]), replace(params, stop_token_ids=[stop]))[0].outputs
    assert [choice.finish_reason for choice in stopped] == ["length", "length", "stop", "length"]
    assert [choice.token_ids for choice in stopped] == [
        free[0],
        free[1],
        free[2][: free[2].index(stop) + 1],
        free[3],
    ]


def test_greedy_choices_are_equal_and_a_pool_too_small_for_all_changes_nothing(engine: Engine, llm: LLM) -> None:
    greedy = tokens(llm.generate(prompts([13]), replace(GREEDY, n=4)))
    assert greedy == tokens(llm.generate(prompts([13]), GREEDY)) * 4
    params = replace(SEEDED, n=4)
    narrow = alike(engine, max_seqs=2, prefill_rows=1)
    assert tokens(narrow.generate(prompts([13]), params)) == tokens(llm.generate(prompts([13]), params))
    assert_idle(narrow.engine)


def test_an_unlimited_request_fills_the_context_and_ends(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    output = llm.generate(prompts([100]), params)[0].outputs[0]
    assert len(output.token_ids) == 28
    assert output.finish_reason == "length"
