"""The scheduler alone, over ints: no page is lost, nobody starves, and a window holds what queries can see."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_jax.engine.pages import PagePool
from mimo_jax.engine.request import FinishReason, Request
from mimo_jax.engine.scheduler import Limits, Row, Scheduler, StepPlan
from mimo_jax.errors import RequestError
from mimo_jax.sampling_params import SamplingParams

LIMITS = Limits(
    max_seqs=4,
    max_model_tokens=200,
    prefill_tokens=12,
    prefill_rows=3,
    full_page_tokens=4,
    window_page_tokens=4,
    window_tokens=8,
    has_full=True,
)


def make_request(name: str, prompt: int, max_tokens: int) -> Request:
    return Request(name, tuple(range(prompt)), SamplingParams(max_tokens=max_tokens), 0, max_tokens, frozenset())


def make_scheduler(limits: Limits = LIMITS, full: int = 1000, window: int = 1000) -> Scheduler:
    return Scheduler(limits, PagePool(full + 1), PagePool(window + 1))


def commit(scheduler: Scheduler, plan: StepPlan) -> list[str]:
    """What the engine does behind a device call; returns who got a token."""
    sampled = []
    for row in plan.rows:
        request = row.request
        scheduler.advance(row)
        assert_window_is_what_queries_see(scheduler.limits, request)
        if row.samples and not request.finished:
            request.output.append(0)
            sampled.append(request.request_id)
            if len(request.output) >= request.max_tokens:
                scheduler.finish(request, FinishReason.LENGTH)
        scheduler.check()
    return sampled


def iterate(scheduler: Scheduler) -> list[str]:
    plans = scheduler.plan()
    scheduler.check()
    assert len(plans) <= 2
    for plan in plans:
        assert_plan_keeps_its_limits(scheduler.limits, plan)
    return [name for plan in plans for name in commit(scheduler, plan)]


def run_to_end(scheduler: Scheduler, most: int = 3000) -> list[str]:
    order = []
    for _ in range(most):
        if not scheduler.unfinished:
            return order
        order += iterate(scheduler)
    raise AssertionError(f"{scheduler.unfinished} requests never ended")


def assert_empty(scheduler: Scheduler) -> None:
    for pool in (scheduler.full, scheduler.window):
        assert (pool.in_use, pool.reserved, pool.free) == (0, 0, pool.total)
    assert scheduler.unfinished == 0


def assert_plan_keeps_its_limits(limits: Limits, plan: StepPlan) -> None:
    assert 0 < len(plan.rows) <= (limits.max_seqs if plan.decode else limits.prefill_rows)
    assert sum(row.count for row in plan.rows) <= (limits.max_seqs if plan.decode else limits.prefill_tokens)
    for row in plan.rows:
        assert_row_is_covered(limits, row)


def assert_row_is_covered(limits: Limits, row: Row) -> None:
    """Every key that the row's queries see, and every place it writes to, has a page; B33 holds for `samples`."""
    request, end = row.request, row.start + row.count
    assert row.count > 0
    assert row.start == request.computed
    assert row.samples == (end == request.known)
    assert len(request.full_pages) == limits.full_pages(end) <= request.reserved_full
    if limits.window_tokens:
        held = range(request.window_first, request.window_first + len(request.window_pages))
        first_key = max(0, row.start - limits.window_tokens + 1)
        assert all(position // limits.window_page_tokens in held for position in range(first_key, end))
        assert len(held) <= min(request.reserved_window, limits.window_pages(row.count))


def assert_window_is_what_queries_see(limits: Limits, request: Request) -> None:
    """The pages held are exactly those with a key that the next query sees, and the one it writes to."""
    if request.finished or not limits.window_tokens:
        return
    page = limits.window_page_tokens
    first_key = max(0, request.computed - limits.window_tokens + 1)
    held = range(request.window_first, request.window_first + len(request.window_pages))
    assert held == range(first_key // page, -(-request.computed // page)) or not held
    assert len(request.window_pages) == len(range(first_key // page, -(-request.computed // page)))


@st.composite
def all_limits(draw: st.DrawFn) -> Limits:
    """Any ratio of page and window; models with one kind of layer too."""
    rows = draw(st.integers(1, 3))
    window_tokens = draw(st.sampled_from([0, 1, 2, 5, 8]))
    return replace(
        LIMITS,
        max_seqs=draw(st.integers(rows, 5)),
        prefill_rows=rows,
        prefill_tokens=draw(st.integers(rows, 20)),
        full_page_tokens=draw(st.sampled_from([1, 3, 4, 16])),
        window_page_tokens=draw(st.sampled_from([1, 3, 5, 8, 16])),
        window_tokens=window_tokens,
        has_full=window_tokens == 0 or draw(st.booleans()),
    )


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40), st.integers(1, 12)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("abort while a step runs"), st.integers(0, 9), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(all_limits(), ACTIONS, st.integers(0, 12), st.integers(0, 12))
def test_any_history_keeps_the_books_and_ends_empty(
    limits: Limits, actions: list[tuple[str, int, int]], full: int, window: int
) -> None:
    # Just room for the largest request alone, and a little more or less of either.
    largest = limits.needed(make_request("largest", 40, 12))
    scheduler = make_scheduler(limits, max(1, largest[0] - 2 + full), max(1, largest[1] - 2 + window))
    requests: list[Request] = []
    for name, first, second in actions:
        if name == "add":
            request = make_request(str(len(requests)), first, second)
            try:
                scheduler.add(request)
            except RequestError:
                continue
            requests.append(request)
        elif name == "step":
            for _ in range(first):
                iterate(scheduler)
        elif requests:
            plans = scheduler.plan() if name != "abort" else []
            scheduler.finish(requests[first % len(requests)], FinishReason.ABORT)
            scheduler.check()
            for plan in plans:
                commit(scheduler, plan)
        scheduler.check()
    run_to_end(scheduler)
    assert_empty(scheduler)
    for request in requests:
        assert request.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
        assert not request.full_pages
        assert not request.window_pages
        if request.finish_reason is FinishReason.LENGTH:
            assert len(request.output) == request.max_tokens


@pytest.mark.parametrize("page", [1, 2, 4])
@pytest.mark.parametrize("pool", ["full", "window"])
def test_what_fits_an_empty_pool_runs_and_what_never_can_is_refused_at_once(page: int, pool: str) -> None:
    limits = replace(
        LIMITS,
        full_page_tokens=page,
        window_page_tokens=page,
        has_full=pool == "full",
        window_tokens=0 if pool == "full" else 100,
        prefill_tokens=100,
    )
    capacity = 64
    for stored in (capacity - 1, capacity, capacity + 1):
        for prompt in (1, stored // 2, stored):
            pages = capacity // page
            scheduler = make_scheduler(limits, pages if pool == "full" else 0, pages if pool == "window" else 0)
            large, small = make_request("large", prompt, stored - prompt + 1), make_request("small", 1, 2)
            if stored <= capacity:
                scheduler.add(large)
                scheduler.add(small)
                run_to_end(scheduler)
                assert len(large.output) == large.max_tokens
            else:
                with pytest.raises(RequestError, match="cache"):
                    scheduler.add(large)
                scheduler.add(small)
                assert scheduler.unfinished == 1
                run_to_end(scheduler)
            assert len(small.output) == 2
            assert_empty(scheduler)


def test_requests_start_in_order_of_arrival_and_nobody_overtakes() -> None:
    scheduler = make_scheduler(full=20)
    requests = [make_request(str(place), prompt, 4) for place, prompt in enumerate([40, 70, 2, 2, 60, 2])]
    for request in requests:
        scheduler.add(request)
    while scheduler.unfinished:
        iterate(scheduler)
        begun = [request for request in requests if request.computed]
        assert begun == requests[: len(begun)]
    assert all(len(request.output) == 4 for request in requests)
    assert_empty(scheduler)


def test_a_large_request_is_not_passed_for_ever_by_small_ones_that_fit_beside_it() -> None:
    scheduler = make_scheduler(full=20)
    large = make_request("large", 70, 8)
    scheduler.add(make_request("first", 8, 30))
    scheduler.add(large)
    for step in range(60):
        scheduler.add(make_request(f"small {step}", 1, 2))
        iterate(scheduler)
    assert large.output


def test_a_running_sequence_gets_a_token_in_every_iteration_whatever_arrives() -> None:
    """The documented bound: between two of its tokens there is at most one prefill batch."""
    limits = replace(LIMITS, max_seqs=8)
    scheduler = make_scheduler(limits)
    running = [make_request(f"running {place}", 1, 150) for place in range(4)]
    for request in running:
        scheduler.add(request)
    while not all(request.output for request in running):
        iterate(scheduler)
    for step in range(140):
        if step % 2 == 0:
            scheduler.add(make_request(f"new {step}", 120, 1))
        got = iterate(scheduler)
        assert {request.request_id for request in running} <= set(got)


def test_a_long_prompt_advances_in_every_iteration_while_short_ones_keep_coming() -> None:
    """The reverse: the head gets its even share of each prefill batch."""
    scheduler = make_scheduler()
    long = make_request("long", 180, 1)
    scheduler.add(long)
    share = LIMITS.prefill_tokens // LIMITS.prefill_rows
    for step in range(180 // share + 1):
        scheduler.add(make_request(f"short {step}", 4, 2))
        before = long.computed
        iterate(scheduler)
        if long.finished:
            break
        assert long.computed - before >= share
    assert long.finished


def test_a_short_prompt_behind_a_long_one_does_not_wait_for_all_of_it() -> None:
    scheduler = make_scheduler()
    long, short = make_request("long", 180, 1), make_request("short", 4, 1)
    scheduler.add(long)
    scheduler.add(short)
    iterate(scheduler)
    assert short.finished
    assert not long.finished


def test_only_rows_that_reach_their_last_known_token_sample() -> None:
    """Short prompts beside long ones that are still prefilling (a row without work must not yield token 0)."""
    scheduler = make_scheduler(replace(LIMITS, max_seqs=16))
    requests = [make_request(f"long {place}", 150, 2) for place in range(2)]
    requests += [make_request(f"short {place}", 5, 3) for place in range(14)]
    for request in requests:
        scheduler.add(request)
    tokens = dict.fromkeys((request.request_id for request in requests), 0)
    while scheduler.unfinished:
        for plan in scheduler.plan():
            for row in plan.rows:
                assert row.samples == (row.start + row.count == row.request.known)
                assert row.count == 1 or not plan.decode
            for name in commit(scheduler, plan):
                tokens[name] += 1
    assert tokens == {request.request_id: request.max_tokens for request in requests}


def test_finishing_twice_frees_once() -> None:
    scheduler = make_scheduler()
    running, waiting = make_request("running", 20, 3), make_request("waiting", 5, 3)
    scheduler.add(running)
    iterate(scheduler)
    scheduler.add(waiting)
    for _ in range(2):
        scheduler.finish(running, FinishReason.STOP)
        scheduler.finish(waiting, FinishReason.ABORT)
    assert running.finish_reason is FinishReason.STOP
    assert_empty(scheduler)
    scheduler.check()
