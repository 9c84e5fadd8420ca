"""Speculation changes when tokens come, never which: drafts right, wrong and in between, at every place of a run."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax import LLM, SamplingParams
from mimo_jax.config import MtpDims, tiny_config
from mimo_jax.engine.buckets import make_ladder
from mimo_jax.engine.engine import Engine
from mimo_jax.engine.scheduler import Limits
from mimo_jax.engine.setup import EngineOptions, make_limits, pool_sizes
from mimo_jax.engine.speculation import Speculation
from mimo_jax.params import Params, init_params, param_specs
from mimo_jax.steps import Steps
from sharding import Rules, make_mesh
from tests.engine.helpers import assert_idle, run_to_end, start

DRAFTS = 3
_TINY = tiny_config()
PLAIN = replace(_TINY, layer_kinds=_TINY.layer_kinds[:3], ffn_kinds=_TINY.ffn_kinds[:3])  # compiles in half the time
WITH_HEADS = replace(PLAIN, mtp=MtpDims(heads=DRAFTS))
OPTIONS = EngineOptions("tiny", max_model_len=96, max_num_seqs=4, max_num_batched_tokens=32, block_size=4)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)


def make_engine(params: Params, config: Any) -> Engine:
    device = jax.devices()[0]
    limits = make_limits(OPTIONS, config, device)
    sizes = pool_sizes(config, limits, 64 << 20, jnp.float32)
    specs = param_specs(config, jnp.float32)
    steps = Steps(config, specs, sizes, make_mesh(device), Rules(), config.vocab, jnp.float32, jnp.float32)
    engine = Engine(params, steps, limits, make_ladder(limits))
    engine.warm_up(4, 70, 96, scoring=True, progress=False)
    return engine


@pytest.fixture(scope="module")
def weights() -> Params:
    return init_params(jax.random.key(11), WITH_HEADS)


@pytest.fixture(scope="module")
def plain(weights: Params) -> LLM:
    return LLM.from_engine(make_engine(replace(weights, mtp=()), PLAIN), progress=False)


@pytest.fixture(scope="module")
def shared(weights: Params) -> Engine:
    return make_engine(weights, WITH_HEADS)


@pytest.fixture
def engine(shared: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Verifies in every step, whatever pays."""
    shared.speculation = Speculation(DRAFTS)
    monkeypatch.setattr(shared.speculation, "drafts_for", lambda rung: DRAFTS)
    yield shared
    assert_idle(shared)
    assert shared.steps.late_compiles == 0


def ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, PLAIN.vocab, length).tolist()


def prompts(*lengths: int) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": ids(length)} for length in lengths]


def results(llm: LLM, asked: list[dict[str, Any]], params: Any) -> list[Any]:
    return [choice for output in llm.generate(asked, params, use_tqdm=False) for choice in output.outputs]


def guess(monkeypatch: pytest.MonkeyPatch, engine: Engine, truth: dict[tuple[int, ...], list[int]], right: Any) -> None:
    """Replaces every request's drafts: `right(request)` true tokens, then wrong ones. truth: output by prompt."""
    take = engine._commit

    def commit(request: Any, *rest: Any) -> Any:
        update = take(request, *rest)
        ahead = truth[request.prompt][len(request.output) :]
        count = right(request)
        wrong = [(token + 1) % PLAIN.vocab for token in ahead[count:]]
        request.drafts = tuple((ahead[:count] + wrong + [0] * DRAFTS)[:DRAFTS])
        engine.scheduler.check()
        return update

    monkeypatch.setattr(engine, "_commit", commit)


def same(got: list[Any], wanted: list[Any]) -> None:
    assert [choice.token_ids for choice in got] == [choice.token_ids for choice in wanted]
    assert [choice.finish_reason for choice in got] == [choice.finish_reason for choice in wanted]
    assert [choice.stop_reason for choice in got] == [choice.stop_reason for choice in wanted]
    for one, other in zip(got, wanted, strict=True):
        if other.logprobs is None:
            assert one.logprobs is None
            continue
        assert len(one.logprobs) == len(other.logprobs) == len(other.token_ids)
        for entry, reference in zip(one.logprobs, other.logprobs, strict=True):
            assert list(entry) == list(reference)
            assert max(abs(entry[token].logprob - reference[token].logprob) for token in entry) < 1e-4


SAMPLING = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True, logprobs=1),
    "cut": SamplingParams(temperature=1.2, top_k=20, top_p=0.9, min_p=0.02, seed=6, max_tokens=24, ignore_eos=True),
}


@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("lengths", [(1,), (2, 3), (11, 40, 5, 70), (33, 1, 12, 32, 64, 4, 17)], ids=str)
def test_the_models_own_drafts_change_nothing(
    engine: Engine, plain: LLM, lengths: tuple[int, ...], params: SamplingParams
) -> None:
    asked = prompts(*lengths)
    same(results(LLM.from_engine(engine, progress=False), asked, params), results(plain, asked, params))
    assert engine.speculation.metrics.drafts > 0


@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("right", [0, 1, 2, 3, "mixed"])
def test_accepted_and_rejected_drafts_change_nothing(
    engine: Engine, plain: LLM, right: Any, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours accept 0 to 3 drafts in one step."""
    asked = prompts(11, 40, 5, 70, 33)
    wanted = results(plain, asked, params)
    truth = {tuple(prompt["prompt_token_ids"]): one.token_ids for prompt, one in zip(asked, wanted, strict=True)}
    picks = np.random.default_rng(1)
    guess(monkeypatch, engine, truth, (lambda _: int(picks.integers(0, 4))) if right == "mixed" else (lambda _: right))
    same(results(LLM.from_engine(engine, progress=False), asked, params), wanted)
    length = engine.speculation.metrics.mean_accepted_length
    if right == "mixed":
        assert 2 < length < 3
        at = engine.speculation.metrics.accepted_at
        assert at[0] > at[1] > at[2] > 0
        assert sum(at) == engine.speculation.metrics.accepted
    else:
        assert right + 0.6 < length <= right + 1


@pytest.mark.parametrize("max_tokens", range(1, 11))
def test_the_length_ends_a_run_at_every_place(
    engine: Engine, plain: LLM, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, params = prompts(13, 8), replace(GREEDY, max_tokens=max_tokens)
    truth = truths(plain, asked)
    guess(monkeypatch, engine, truth, lambda _: 3)
    same(results(LLM.from_engine(engine, progress=False), asked, params), results(plain, asked, params))


def truths(plain: LLM, asked: list[dict[str, Any]]) -> dict[tuple[int, ...], list[int]]:
    made = results(plain, asked, replace(GREEDY, max_tokens=26))
    return {tuple(prompt["prompt_token_ids"]): one.token_ids for prompt, one in zip(asked, made, strict=True)}


@pytest.mark.parametrize("place", range(10))
@pytest.mark.parametrize("min_tokens", [0, 6])
def test_a_stop_id_ends_a_run_at_every_place(
    engine: Engine, plain: LLM, place: int, min_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With min_tokens the id may not come earlier, which changes what follows: drafts are then wrong at that place."""
    asked = prompts(13)
    truth = truths(plain, asked)
    stop = next(iter(truth.values()))[place]
    params = replace(GREEDY, stop_token_ids=[stop], min_tokens=min_tokens)
    guess(monkeypatch, engine, truth, lambda _: 3)
    wanted = results(plain, asked, params)
    got = results(LLM.from_engine(engine, progress=False), asked, params)
    same(got, wanted)
    if min_tokens:
        assert stop not in got[0].token_ids[:min_tokens]
    else:
        assert got[0].finish_reason == "stop"


def test_the_context_may_end_inside_a_run(engine: Engine, plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, params = prompts(70), replace(GREEDY, max_tokens=26)  # 96 is all there is
    truth = truths(plain, asked)
    guess(monkeypatch, engine, truth, lambda _: 3)
    same(results(LLM.from_engine(engine, progress=False), asked, params), results(plain, asked, params))


def test_switching_between_plain_and_verifying_steps_changes_nothing(
    engine: Engine, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(13, 40)
    truth = truths(plain, asked)
    guess(monkeypatch, engine, truth, lambda _: 3)
    turns = iter([DRAFTS, 0, 0, DRAFTS, 0, DRAFTS, DRAFTS] * 20)
    monkeypatch.setattr(engine.speculation, "drafts_for", lambda rung: next(turns))
    same(results(LLM.from_engine(engine, progress=False), asked, GREEDY), results(plain, asked, GREEDY))
    assert engine.speculation.metrics.mean_accepted_length > 3


def test_what_nobody_owns_may_be_nan_with_draft_heads_too(engine: Engine, plain: LLM) -> None:
    """Every page that no request holds, hidden states included, before every step."""
    asked = prompts(11, 40, 5)
    wanted = [one.token_ids for one in results(plain, asked, GREEDY)]
    requests = [start(engine, str(n), one["prompt_token_ids"], GREEDY) for n, one in enumerate(asked)]
    while engine.unfinished:
        full = {page for request in engine.scheduler.running for page in request.full_pages}
        window = {page for request in engine.scheduler.running for page in request.window_pages}
        engine._cache = poisoned(engine, full, window)
        engine.step()
    assert [request.output for request in requests] == wanted


def poisoned(engine: Engine, full: set[int], window: set[int]) -> Any:
    def fill(owned: set[int]) -> Any:
        def one(pages: jax.Array) -> jax.Array:
            free = np.array([page not in owned for page in range(pages.shape[0])])
            mask = free.reshape(-1, *(1,) * (pages.ndim - 1))
            return jax.device_put(np.where(mask, np.nan, np.asarray(pages)), pages.sharding)

        return one

    cache, kinds = engine._cache, PLAIN.layer_kinds
    layers = [
        jax.tree.map(fill(full if kind.value == "F" else window), layer)
        for layer, kind in zip(cache.layers, kinds, strict=True)
    ]
    mtp, hidden = jax.tree.map(fill(window), (cache.mtp, cache.hidden))
    return replace(cache, layers=tuple(layers), mtp=mtp, hidden=hidden)


def test_a_request_that_is_cut_off_leaves_its_neighbours_alone(engine: Engine, plain: LLM) -> None:
    asked = prompts(11, 40, 5)
    wanted = [one.token_ids for one in results(plain, asked, GREEDY)]
    requests = [start(engine, str(n), one["prompt_token_ids"], GREEDY) for n, one in enumerate(asked)]
    for _ in range(4):
        engine.step()
    engine.abort("1")
    run_to_end(engine)
    assert [requests[0].output, requests[2].output] == [wanted[0], wanted[2]]


def test_the_cache_of_the_heads_is_updated_in_place(engine: Engine) -> None:
    size = sum(pages.nbytes for pages in jax.tree.leaves(engine._cache))
    for key, job in engine.steps._jobs.items():
        if not isinstance(key, str):
            assert job.result().memory_analysis().alias_size_in_bytes == size


def run_rule(rule: Speculation, seconds: dict[bool, float], accepted: int, steps: int) -> list[int]:
    chosen = []
    for _ in range(steps):
        drafts = rule.drafts_for(1)
        chosen.append(drafts)
        rule.record(1, seconds[drafts > 0], [(drafts, accepted if drafts else 0)])
    return chosen


def test_drafts_are_used_while_they_pay() -> None:
    rule = Speculation(DRAFTS)
    assert run_rule(rule, {True: 2.0, False: 1.0}, accepted=2, steps=400).count(0) < 24  # 3 tokens in the time of 2
    assert run_rule(rule, {True: 2.0, False: 1.0}, accepted=0, steps=400)[40:].count(DRAFTS) < 24
    assert run_rule(rule, {True: 2.0, False: 1.0}, accepted=2, steps=800)[-200:].count(0) < 24  # comes back by itself
    assert Speculation(0).drafts_for(1) == 0


def test_a_rung_decides_for_itself() -> None:
    rule = Speculation(DRAFTS)
    for rung, slow in ((1, 1.5), (8, 9.0)):
        for _ in range(100):
            drafts = rule.drafts_for(rung)
            rule.record(rung, slow if drafts else 1.0, [(drafts, 2 if drafts else 0)] * rung)
    assert (rule.drafts_for(1), rule.drafts_for(8)) == (DRAFTS, 0)


def test_hidden_states_are_those_of_tokens_that_stand(
    engine: Engine, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(13)
    truth = truths(plain, asked)
    picks = iter([3, 0, 2, 1] * 8)
    guess(monkeypatch, engine, truth, lambda _: next(picks))
    got = {}
    for name, one in (("with", engine), ("without", plain.engine)):
        rows: list[np.ndarray] = []
        request = replace(one.make_request(name, asked[0]["prompt_token_ids"], GREEDY), on_hidden=rows.append)
        one.add(request)
        run_to_end(one)
        got[name] = np.concatenate(rows)
    known = 13 + GREEDY.max_tokens - 1  # the last token is never fed back; accepted ones behind it may be
    assert len(got["with"]) >= known == len(got["without"])
    assert np.abs(got["with"][:known] - got["without"]).max() < 1e-4


def test_limits_know_the_draft_heads(engine: Engine) -> None:
    limits: Limits = engine.limits
    assert (limits.drafts, limits.full_lookahead, limits.window_lookahead) == (3, 0, 3)
