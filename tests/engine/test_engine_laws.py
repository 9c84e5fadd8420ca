"""What the engine computes depends on the request alone: not on chunks, neighbours, pages, or what was there before."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.engine.batch import fold_seed
from mimo_jax.engine.engine import Engine
from mimo_jax.engine.setup import EngineOptions, load_engine
from mimo_jax.generation import generate
from mimo_jax.llm import LLM
from mimo_jax.sampling_params import SamplingParams
from tests.engine.helpers import (
    GREEDY,
    SEEDED,
    WINDOW,
    alike,
    ids,
    poison_before_every_step,
    prompts,
    start,
    tokens,
)

# Around the page of 4, the window, their sum, two windows, and the chunk of 32.
LENGTHS = (1, 3, 4, 5, 10, 11, 12, 14, 15, 16, 22, 23, 31, 32, 33, 50)
CLOSE = 2e-5  # of log-probabilities, float32


def chosen_logprobs(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[float]]:
    choice = llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0]
    assert choice.logprobs is not None
    pairs = zip(choice.token_ids, choice.logprobs, strict=True)
    return choice.token_ids, [entry[token].logprob for token, entry in pairs]


@pytest.mark.parametrize("chunk", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1])
def test_prompt_chunks_change_no_log_probability(engine: Engine, llm: LLM, chunk: int) -> None:
    chunked = alike(engine, prefill_tokens=chunk, prefill_rows=1)
    for length in (1, WINDOW, 50):
        np.testing.assert_allclose(chunked.score(ids(length)), llm.score(ids(length)), rtol=0, atol=CLOSE)
    expected_ids, expected = chosen_logprobs(llm, ids(50), GREEDY)
    got_ids, got = chosen_logprobs(chunked, ids(50), GREEDY)
    assert got_ids == expected_ids
    np.testing.assert_allclose(got, expected, rtol=0, atol=CLOSE)


def test_decoding_gives_what_a_prefill_of_the_whole_text_gives(llm: LLM) -> None:
    for prompt in (ids(1), ids(WINDOW - 1), ids(WINDOW), ids(25)):
        out, decoded = chosen_logprobs(llm, prompt, replace(GREEDY, max_tokens=30))
        scored = llm.score(prompt + out)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(decoded, scored[np.arange(len(out)), out], rtol=0, atol=CLOSE)
        assert out == scored.argmax(axis=-1).tolist()


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_batch_gives_what_each_request_gives_alone(llm: LLM, params: SamplingParams) -> None:
    batch = prompts(LENGTHS)
    together = tokens(llm.generate(batch, params))
    assert together == [tokens(llm.generate(prompt, params))[0] for prompt in batch]
    assert tokens(llm.generate(batch[::-1], params)) == together[::-1]


def test_short_prompts_beside_long_ones_get_no_token_early(llm: LLM) -> None:
    batch = prompts([110, 5, 5, 5, 108, 5, 5, 5, 5, 5])
    assert tokens(llm.generate(batch, GREEDY)) == [tokens(llm.generate(prompt, GREEDY))[0] for prompt in batch]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_what_no_request_owns_can_be_nan_and_nothing_else_is_written(
    engine: Engine, llm: LLM, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = prompts((1, 4, 11, 12, 23, 40))
    params = replace(params, logprobs=3, prompt_logprobs=0)
    expected = llm.generate(batch, params)
    poisoned = alike(engine)
    poison_before_every_step(poisoned.engine, monkeypatch)
    got = poisoned.generate(batch, params)
    assert tokens(got) == tokens(expected)
    for one, other in zip(got, expected, strict=True):
        values = [
            entry[token].logprob for token, entry in zip(one.prompt_token_ids[1:], one.prompt_logprobs[1:], strict=True)
        ]
        assert np.isfinite(values).all()
        assert one == replace(other, request_id=one.request_id)


def test_which_pages_a_request_gets_changes_nothing(engine: Engine, llm: LLM) -> None:
    batch = prompts((11, 30, 45))
    expected = llm.generate(batch, GREEDY)
    for seed in range(3):
        shuffled = alike(engine)
        for pool in (shuffled.engine.scheduler.full, shuffled.engine.scheduler.window):
            random.Random(seed).shuffle(pool._free)
        got = shuffled.generate(batch, GREEDY)
        assert [output.outputs for output in got] == [output.outputs for output in expected]


@pytest.mark.parametrize(("page", "chunk"), [(11, 1), (32, 1)])
def test_page_and_chunk_sizes_of_any_ratio_to_the_window_give_the_same(
    model_folder: Path, llm: LLM, page: int, chunk: int
) -> None:
    options = EngineOptions(
        model_folder,
        dtype="float32",
        max_model_len=96,
        max_num_seqs=1,
        max_num_batched_tokens=chunk,
        block_size=page,
    )
    other = LLM.from_engine(load_engine(options), progress=False)
    for prompt in (ids(1), ids(WINDOW), ids(34)):
        expected_ids, expected = chosen_logprobs(llm, prompt, replace(GREEDY, max_tokens=40))
        got_ids, got = chosen_logprobs(other, prompt, replace(GREEDY, max_tokens=40))
        assert got_ids == expected_ids
        np.testing.assert_allclose(got, expected, rtol=0, atol=CLOSE)


def test_a_seeded_request_is_the_same_beside_anybody_in_any_slot(llm: LLM) -> None:
    prompt = prompts([13])
    alone = tokens(llm.generate(prompt, SEEDED))[0]
    unseeded = replace(SEEDED, seed=None, temperature=1.0)
    neighbours = [
        [(9, unseeded)],
        [(9, replace(SEEDED, seed=6))],
        [(13, GREEDY)],
        [(length, unseeded) for length in range(3, 10)],
        [(20, replace(unseeded, top_k=3)), (30, replace(unseeded, top_p=0.5)), (2, GREEDY)],
    ]
    for others in neighbours:
        rest = prompts([length for length, _ in others], seed=1)
        params = [one for _, one in others]
        assert tokens(llm.generate(prompt + rest, [SEEDED, *params]))[0] == alone
        assert tokens(llm.generate(rest + prompt, [*params, SEEDED]))[-1] == alone


def test_seeded_unseeded_and_greedy_rows_do_not_mix_in_any_order(llm: LLM) -> None:
    unseeded = replace(SEEDED, seed=None)
    rows = {"seeded": SEEDED, "unseeded": unseeded, "again": SEEDED, "greedy": GREEDY}
    prompt = prompts([17])
    expected = {name: tokens(llm.generate(prompt, params))[0] for name, params in rows.items() if name != "unseeded"}
    assert expected["seeded"] == expected["again"] != expected["greedy"]
    drawn = set()
    for order in itertools.islice(itertools.permutations(rows), 0, 24, 5):
        got = dict(zip(order, tokens(llm.generate(prompt * 4, [rows[name] for name in order])), strict=True))
        drawn.add(tuple(got.pop("unseeded")))
        assert got == expected
    assert len(drawn) > 1


def test_one_seed_for_many_prompts_means_the_same_numbers_at_the_same_positions(llm: LLM) -> None:
    """As SamplingParams says: two equal prompts with one seed give one text."""
    same = tokens(llm.generate(prompts([13, 13]), SEEDED))
    assert same[0] == same[1]


def test_any_whole_number_is_a_seed_and_different_ones_differ(llm: LLM) -> None:
    assert [fold_seed(seed) for seed in (0, 7, 2**32 - 1)] == [0, 7, 2**32 - 1]
    seeds = [0, 1, 2, -1, -2, 2**64 - 2**33, -(2**62)]
    drawn = tokens(llm.generate(prompts([13] * len(seeds)), [replace(SEEDED, seed=seed) for seed in seeds]))
    assert len({fold_seed(seed) for seed in seeds}) == len({tuple(one) for one in drawn}) == len(seeds)


def test_off_values_sample_and_do_not_turn_greedy(llm: LLM) -> None:
    greedy = tokens(llm.generate(prompts([13]), GREEDY))[0]
    plain = tokens(llm.generate(prompts([13]), SEEDED))[0]
    for top_k in (-1, 0, 300, 10_000):
        assert tokens(llm.generate(prompts([13]), replace(SEEDED, top_k=top_k))) == [plain] != [greedy]
    for params in (replace(SEEDED, top_k=1), replace(SEEDED, top_p=1e-6), replace(SEEDED, temperature=1e-12)):
        assert tokens(llm.generate(prompts([13]), params)) == [greedy]


def test_rows_that_pad_the_head_are_no_tokens(engine: Engine, llm: LLM) -> None:
    vocab = engine.steps.vocab
    head = np.asarray(engine.params.head).copy()
    assert vocab < len(head)
    head[vocab:] *= 40  # would win nearly always
    loud = alike(engine, params=engine.params.replace(head=jax.device_put(head, engine.params.head.sharding)))
    params = replace(GREEDY, logprobs=20, prompt_logprobs=20)
    expected, got = (one.generate(prompts([20]), params)[0] for one in (llm, loud))
    assert got.outputs == expected.outputs
    assert got.prompt_logprobs == expected.prompt_logprobs
    listed = [*got.outputs[0].logprobs, *got.prompt_logprobs[1:]]
    assert all(token < vocab for entry in listed for token in entry)
    scored = loud.score(ids(20))
    assert scored.shape == (20, vocab)
    np.testing.assert_allclose(np.exp(scored.astype(np.float64)).sum(axis=-1), 1, atol=1e-5)
    hot = SamplingParams(temperature=5.0, max_tokens=100, n=8, ignore_eos=True)
    assert all(token < vocab for choice in tokens(loud.generate(prompts([5]), hot)) for token in choice)


def test_the_pure_function_generates_the_same_tokens(engine: Engine, llm: LLM) -> None:
    prompt = ids(25)
    expected = tokens(llm.generate({"prompt_token_ids": prompt}, replace(GREEDY, max_tokens=20)))[0]
    params = engine.params.replace(head=engine.params.head[: engine.steps.vocab])
    pure = jax.jit(generate, static_argnames=("config", "max_tokens"))
    got = pure(params, jnp.asarray([prompt], jnp.int32), config=engine.steps.config, max_tokens=20)
    assert got.tolist() == [expected]


def test_every_index_that_reaches_the_device_lies_inside_its_array(
    engine: Engine, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, run, seen = engine.steps.sizes, engine.steps.run, []

    def checked(bucket, params, cache, inputs, sampling):  # type: ignore[no-untyped-def]
        seen.append(bucket)
        assert (inputs.tokens < engine.steps.vocab).all()
        assert (inputs.full_table < sizes.full_pages).all()
        assert (inputs.window_table < sizes.window_pages).all()
        assert (inputs.counts <= bucket.step).all()
        padding = inputs.counts == 0
        assert not inputs.full_table[padding].any()
        assert not inputs.window_table[padding].any()
        assert ((sampling.banned >= 0) & (sampling.banned <= engine.steps.vocab)).all()
        return run(bucket, params, cache, inputs, sampling)

    monkeypatch.setattr(engine.steps, "run", checked)
    llm.generate(prompts([1, 30, 50]), replace(GREEDY, min_tokens=5, stop_token_ids=[3], ignore_eos=False))
    assert len({bucket.step for bucket in seen}) > 1


def test_a_request_that_joins_later_changes_nobody(engine: Engine, llm: LLM) -> None:
    expected = tokens(llm.generate(prompts([9, 21]), GREEDY))
    first = start(engine, "first", ids(9), GREEDY)
    for _ in range(4):
        engine.step()
    second = start(engine, "second", ids(21), GREEDY)
    while engine.unfinished:
        engine.step()
    assert [first.output, second.output] == expected
