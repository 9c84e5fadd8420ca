"""Engines that differ from a given one in a detail, prompts, and the poison for what nobody owns."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from mimo_jax.cache import Cache
from mimo_jax.config import LayerKind
from mimo_jax.engine.engine import Engine, Update
from mimo_jax.engine.request import Request
from mimo_jax.engine.scheduler import StepPlan
from mimo_jax.llm import LLM
from mimo_jax.outputs import RequestOutput
from mimo_jax.params import Params
from mimo_jax.sampling_params import SamplingParams

WINDOW = 11
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
SEEDED = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)


def ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, 256, length).tolist()


def prompts(lengths: Iterable[int], seed: int = 0) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": ids(length, seed)} for length in lengths]


def tokens(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


def alike(engine: Engine, *, params: Params | None = None, **limits: Any) -> LLM:
    """An LLM on the same compiled steps, with a cache of its own and other limits."""
    changed = replace(engine.limits, **limits)
    made = Engine(
        engine.params if params is None else params, engine.steps, changed, engine.ladder, tokenizer=engine.tokenizer
    )
    return LLM.from_engine(made, progress=False)


def assert_idle(engine: Engine) -> None:
    engine.scheduler.check()
    assert engine.unfinished == 0
    assert not engine._requests
    assert not engine._streams
    for pool in (engine.scheduler.full, engine.scheduler.window):
        assert (pool.in_use, pool.reserved, pool.free) == (0, 0, pool.total)


def start(engine: Engine, name: str, prompt: list[int], params: SamplingParams) -> Request:
    request = engine.make_request(name, prompt, params)
    engine.add(request)
    return request


def run_to_end(engine: Engine) -> list[Update]:
    updates = []
    while engine.unfinished:
        updates += engine.step()
    return updates


def poison_before_every_step(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Fills with NaN what no running request owns, stale places in owned pages included.

    Behind the step only the places of its tokens may have been written, and the null page.
    """
    run = engine._run

    def poisoned(plan: StepPlan) -> list[Update]:
        owned = {
            kind: _places(engine, kind, [(r, 0, r.computed) for r in engine.scheduler.running]) for kind in LayerKind
        }
        spans = [(row.request, row.start, row.start + row.count) for row in plan.rows]
        written = {kind: _places(engine, kind, spans) for kind in LayerKind}
        engine._cache = _with_poison(engine, owned)
        updates = run(plan)
        for layer, kind in zip(engine._cache.layers, engine.steps.config.layer_kinds, strict=True):
            for pages in (layer.keys, layer.values):
                finite = np.isfinite(np.asarray(pages)).all(axis=(2, 3))
                assert np.array_equal(finite[1:], (owned[kind] | written[kind])[1:])
        return updates

    patch.setattr(engine, "_run", poisoned)


def _places(engine: Engine, kind: LayerKind, spans: list[tuple[Request, int, int]]) -> np.ndarray:
    """bool [pages, page]: where these requests keep their positions from ... to ..."""
    sizes = engine.steps.sizes
    page = sizes.page_tokens(kind)
    places = np.zeros((sizes.pages(kind), page), bool)
    for request, first, end in spans:
        is_full = kind is LayerKind.FULL
        begin = 0 if is_full else request.window_first
        for entry, page_id in enumerate(request.full_pages if is_full else request.window_pages):
            positions = (begin + entry) * page + np.arange(page)
            places[page_id] |= (positions >= first) & (positions < end)
    return places


def _with_poison(engine: Engine, owned: dict[LayerKind, np.ndarray]) -> Cache:
    def fill(pages: jax.Array, mask: np.ndarray) -> jax.Array:
        return jax.device_put(np.where(mask[..., None, None], np.asarray(pages), np.nan), pages.sharding)

    kinds = engine.steps.config.layer_kinds
    return Cache(
        tuple(
            layer.replace(keys=fill(layer.keys, owned[kind]), values=fill(layer.values, owned[kind]))
            for layer, kind in zip(engine._cache.layers, kinds, strict=True)
        )
    )
