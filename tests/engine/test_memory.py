"""How much memory the cache is given."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from mimo_jax.engine.setup import cache_budget

GB = 10**9


def gpu(limit: int, in_use: int = 0) -> Any:
    return SimpleNamespace(memory_stats=lambda: {"bytes_limit": limit, "bytes_in_use": in_use})


def test_the_weights_have_their_place_beside_it() -> None:
    """Nine tenths of the device's memory in all; the budget may be a sixteenth less."""
    for weights in (0, 20 * GB, 71 * GB):
        budget = cache_budget(gpu(80 * GB), weights)
        assert (72 * GB - weights) * 15 / 16 <= budget <= 72 * GB - weights


def test_a_little_memory_more_in_use_makes_no_other_programs() -> None:
    assert cache_budget(gpu(80 * GB, 300_000_000), 20 * GB) == cache_budget(gpu(80 * GB, 400_000_000), 20 * GB)
    assert cache_budget(gpu(80 * GB, 30 * GB), 20 * GB) < cache_budget(gpu(80 * GB), 20 * GB)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="73,000,000,000"):
        cache_budget(gpu(80 * GB), 73 * GB)


def test_on_a_cpu_it_does_not_hang_on_what_is_free_just_now() -> None:
    device = jax.devices("cpu")[0]
    held = bytearray(200_000_000)
    budget = cache_budget(device, 0)
    del held
    assert cache_budget(device, 0) == budget
