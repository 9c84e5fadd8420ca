"""Page pools: every page is free or in use, once, and the null page is neither."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_jax.engine.pages import PagePool

ROOT = Path(__file__).resolve().parents[2]


def test_the_host_side_decides_without_jax() -> None:
    program = """
import sys
import mimo_jax.engine.buckets, mimo_jax.engine.pages, mimo_jax.engine.request, mimo_jax.engine.scheduler
loaded = {"jax", "jaxlib", "numpy", "flax"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=ROOT)


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_pages_balance_after_every_call(pages: int, calls: list[tuple[bool, int]]) -> None:
    pool = PagePool(pages)
    held: list[list[int]] = []
    for takes, count in calls:
        if takes and pool.can_reserve(count):
            pool.reserve(count)
            held.append(pool.take(count))
        elif not takes and held:
            given_back = held.pop(count % len(held))
            pool.give_back(given_back)
            pool.unreserve(len(given_back))
        pool.check()
        taken = [page for group in held for page in group]
        assert len(taken) == len(set(taken)) == pool.in_use == pool.reserved
        assert all(1 <= page < pages for page in taken)
        assert pool.free + pool.in_use == pool.total == pages - 1


def test_a_pool_lends_what_it_has_and_not_one_page_more() -> None:
    pool = PagePool(4)
    assert not pool.can_reserve(4)
    pool.reserve(3)
    with pytest.raises(RuntimeError):
        pool.reserve(1)
    assert sorted(pool.take(3)) == [1, 2, 3]
    with pytest.raises(RuntimeError):
        pool.take(1)


def test_a_page_given_back_twice_is_noticed() -> None:
    pool = PagePool(4)
    pool.reserve(2)
    pages = pool.take(2)
    pool.give_back(pages)
    with pytest.raises(KeyError):
        pool.give_back(pages[:1])


def test_the_check_notices_a_lost_a_doubled_and_an_unreserved_page() -> None:
    lost = PagePool(4)
    lost._free.pop()
    unreserved = PagePool(4)
    unreserved.take(1)
    doubled = PagePool(4)
    doubled.reserve(2)
    doubled._free.append(doubled.take(1)[0])
    doubled._free.pop(0)
    for pool in (lost, unreserved, doubled):
        with pytest.raises(AssertionError):
            pool.check()


def test_a_pool_needs_its_null_page() -> None:
    with pytest.raises(ValueError, match="null page"):
        PagePool(0)
    assert PagePool(1).total == 0
