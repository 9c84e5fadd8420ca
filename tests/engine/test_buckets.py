"""The ladder: every plan fits a rung, and warm-up covers every rung that a load can meet."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_jax.engine.buckets import Ladder, make_ladder
from mimo_jax.engine.pages import PagePool
from mimo_jax.engine.request import FinishReason, Request
from mimo_jax.engine.scheduler import Limits, Scheduler
from mimo_jax.sampling_params import SamplingParams

LIMITS = Limits(
    max_seqs=20,
    max_model_tokens=5000,
    prefill_tokens=256,
    prefill_rows=4,
    full_page_tokens=16,
    window_page_tokens=16,
    window_tokens=128,
    has_full=True,
)


@st.composite
def all_limits(draw: st.DrawFn) -> Limits:
    rows = draw(st.integers(1, 4))
    return replace(
        LIMITS,
        max_seqs=draw(st.integers(rows, 70)),
        max_model_tokens=draw(st.integers(2, 10_000)),
        prefill_tokens=draw(st.integers(16 * rows, 700)),
        prefill_rows=rows,
        full_page_tokens=draw(st.sampled_from([1, 16, 100])),
        has_full=draw(st.booleans()),
    )


@given(all_limits(), st.data())
def test_every_plan_within_the_limits_has_a_rung(limits: Limits, data: st.DataObject) -> None:
    ladder = make_ladder(limits)
    pages = data.draw(st.integers(0, limits.full_pages(limits.max_model_tokens)))
    rows = data.draw(st.integers(1, limits.max_seqs))
    seqs, step, width = ladder.decode(rows, pages)
    assert seqs >= rows
    assert step == 1
    assert width >= pages
    rows = data.draw(st.integers(1, limits.prefill_rows))
    count = data.draw(st.integers(1, limits.chunk_tokens(rows)))
    seqs, step, width = ladder.chunk(rows, count, pages)
    assert seqs >= rows
    assert step >= count
    assert width >= pages


@given(all_limits())
def test_there_are_few_rungs(limits: Limits) -> None:
    ladder = make_ladder(limits)
    assert len(ladder.decode_seqs) <= 4
    assert len(ladder.prefill) <= 5
    assert len(ladder.widths) <= 8


def run(limits: Limits, ladder: Ladder, requests: list[tuple[int, int]]) -> set[tuple[int, int, int]]:
    """The shapes that these (prompt, max_tokens) meet when run together."""
    scheduler = Scheduler(limits, PagePool(10_000), PagePool(10_000))
    for place, (prompt, most) in enumerate(requests):
        params = SamplingParams(max_tokens=most)
        scheduler.add(Request(str(place), tuple(range(prompt)), params, 0, most, frozenset()))
    shapes = set()
    while scheduler.unfinished:
        for plan in scheduler.plan():
            pages = max(len(row.request.full_pages) for row in plan.rows)
            longest = max(row.count for row in plan.rows)
            shape = (
                ladder.decode(len(plan.rows), pages) if plan.decode else ladder.chunk(len(plan.rows), longest, pages)
            )
            shapes.add(shape)
            for row in plan.rows:
                scheduler.advance(row)
                if row.samples:
                    row.request.output.append(0)
                    if len(row.request.output) == row.request.max_tokens:
                        scheduler.finish(row.request, FinishReason.LENGTH)
    return shapes


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(1, 40)), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(64, 300),
)
def test_warm_up_covers_every_shape_that_the_load_meets(
    requests: list[tuple[int, int]], rows: int, prefill_tokens: int
) -> None:
    limits = replace(LIMITS, max_seqs=6, prefill_rows=rows, prefill_tokens=prefill_tokens)
    ladder = make_ladder(limits)
    prompt = max(prompt for prompt, _ in requests)
    total = max(prompt + most for prompt, most in requests)
    assert run(limits, ladder, requests) <= set(ladder.reachable(limits, len(requests), prompt, total, alone=False))


@pytest.mark.parametrize("prompt", [1, 255, 256, 257, 512, 700])
def test_one_request_alone_compiles_only_what_it_meets_and_a_rung_or_two(prompt: int) -> None:
    ladder = make_ladder(LIMITS)
    met, warmed = run(LIMITS, ladder, [(prompt, 30)]), set(ladder.reachable(LIMITS, 1, prompt, prompt + 30, alone=True))
    assert met <= warmed
    assert len(warmed) <= len(met) + 4


@pytest.mark.parametrize("max_seqs", [1, 2, 3, 8])
@pytest.mark.parametrize("prefill_tokens", [1, 7, 64, 256, 1000])
def test_warm_up_for_everything_covers_every_prompt_length(max_seqs: int, prefill_tokens: int) -> None:
    rows = max(1, min(4, max_seqs, prefill_tokens // 16))
    limits = replace(LIMITS, max_seqs=max_seqs, prefill_rows=rows, prefill_tokens=prefill_tokens)
    ladder = make_ladder(limits)
    most = limits.max_model_tokens
    warmed = set(ladder.reachable(limits, max_seqs, most - 1, most, alone=False))
    for count in range(1, min(prefill_tokens, most - 1) + 1):
        for end in {count, most - 1}:
            assert ladder.chunk(1, count, limits.full_pages(end)) in warmed
