"""Steps that verify and steps that do not, in any order: each one's tables hold every page that it touches."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.cache import PoolSizes
from mimo_jax.engine.batch import build
from mimo_jax.engine.buckets import Ladder, make_ladder
from mimo_jax.engine.pages import PagePool
from mimo_jax.engine.request import FinishReason, Request
from mimo_jax.engine.scheduler import Limits, Row, Scheduler, StepPlan
from mimo_jax.inputs import StepInputs
from mimo_jax.llm import LLM
from mimo_jax.sampling_params import SamplingParams
from mimo_jax.steps import Bucket, Steps

WINDOW = 8


def make_limits(page: int, drafts: int, *, has_full: bool) -> Limits:
    return Limits(
        max_seqs=3,
        max_model_tokens=90,
        prefill_tokens=12,
        prefill_rows=2,
        full_page_tokens=page,
        window_page_tokens=page,
        window_tokens=WINDOW,
        has_full=has_full,
        drafts=drafts,
        full_lookahead=0,
        window_lookahead=drafts,
    )


def shapes_of(limits: Limits) -> Any:
    """The steps of a model with these limits, of which only the shapes of their inputs are asked."""
    config = SimpleNamespace(
        window=SimpleNamespace(window_tokens=limits.window_tokens), lookahead=lambda _: limits.window_lookahead
    )
    sizes = PoolSizes(1, limits.full_page_tokens, 1, limits.window_page_tokens)
    return Steps(config, None, sizes, None, None, 100, jnp.float32, jnp.float32)  # type: ignore[arg-type]


def bucket_of(ladder: Ladder, plan: StepPlan) -> Bucket:
    pages = max(len(row.request.full_pages) for row in plan.rows)
    if plan.decode:
        return Bucket(*ladder.decode(len(plan.rows), pages, drafts=any(row.drafts for row in plan.rows)))
    return Bucket(*ladder.chunk(len(plan.rows), max(row.count for row in plan.rows), pages))


def assert_tables_hold(row: Row, inputs: StepInputs, index: int, limits: Limits) -> None:
    """Every position that the row's queries see and every one it writes, draft heads included, in both tables."""
    end = row.start + row.count
    for position in range(max(0, row.start - limits.window_tokens + 1), end + limits.window_lookahead):
        entry = position // limits.window_page_tokens - int(inputs.window_first[index])
        assert inputs.window_table[index, entry] == row.request.window_pages[entry]
    for position in range(end if limits.has_full else 0):
        entry = position // limits.full_page_tokens
        assert inputs.full_table[index, entry] == row.request.full_pages[entry]


@pytest.mark.parametrize("has_full", [True, False])
@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("page", [1, 2, 3, 4, 16])
def test_tables_hold_what_a_step_touches_however_steps_alternate(page: int, drafts: int, has_full: bool) -> None:
    random = np.random.default_rng([page, drafts, has_full])
    limits = make_limits(page, drafts, has_full=has_full)
    steps, ladder = shapes_of(limits), make_ladder(limits)
    scheduler = Scheduler(limits, PagePool(300), PagePool(300))
    shorter = 0
    for name in range(12):
        prompt, most = int(random.integers(1, 40)), int(random.integers(1, 50))
        params = SamplingParams(max_tokens=most)
        scheduler.add(Request(str(name), tuple(range(prompt)), params, 0, most, frozenset()))
    while scheduler.unfinished:
        verify = int(random.integers(0, 2)) * drafts
        for plan in scheduler.plan(lambda _, verify=verify: verify):
            inputs, _ = build(plan.rows, steps.input_shapes(bucket_of(ladder, plan)), steps.vocab)
            for index, row in enumerate(plan.rows):
                assert_tables_hold(row, inputs, index, limits)
                shorter += len(row.request.window_pages) > inputs.window_table.shape[1]
                accepted = int(random.integers(0, row.drafts + 1))
                scheduler.advance(row, accepted)
                scheduler.check()
                if row.samples:
                    take(scheduler, row.request, 1 + accepted, drafts)
    assert scheduler.full.in_use == scheduler.window.in_use == 0
    if page == 1 < drafts:  # where the table of a plain step is too short for what rejected drafts have left
        assert shorter > 0


def take(scheduler: Scheduler, request: Request, tokens: int, drafts: int) -> None:
    request.output += [0] * tokens
    request.drafts = (0,) * drafts
    if len(request.output) >= request.max_tokens:
        scheduler.finish(request, FinishReason.LENGTH)


def test_mimo_tiny_alternates_with_pages_of_one_token() -> None:
    asked = [{"prompt_token_ids": list(range(40, 40 + count))} for count in (3, 17, 30)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = []
    for drafts in (0, 2):
        llm = LLM(
            "mimo-tiny",
            dtype="float32",
            max_model_len=64,
            max_num_seqs=3,
            max_num_batched_tokens=32,
            block_size=1,
            num_speculative_tokens=drafts,
        )
        steps = iter([drafts, 0, 0, drafts, drafts, 0] * 20)
        llm.engine.speculation.drafts_for = lambda rung, steps=steps: next(steps)  # type: ignore[method-assign]
        outputs.append([one.outputs[0].token_ids for one in llm.generate(asked, params, use_tqdm=False)])
    assert outputs[0] == outputs[1]
