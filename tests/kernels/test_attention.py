"""Attention, each implementation, against loops that know nothing of pages, and errors that the bound has to catch."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import paged_attention
from pallas_kernels.attention.gpu import Blocks, paged_attention_gpu
from tests.kernels.attention_cases import (
    CASES,
    FULL_ROWS,
    GROUP,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    PAGES,
    V_DIM,
    WIDTH,
    WINDOW,
    Attend,
    Sequence,
    error,
    first_seen_page,
    looped,
    make_case,
    paged,
)

BOUND = 2e-6  # worst row, float32

_kernel = partial(paged_attention_gpu, interpret=True)
IMPLEMENTATIONS = {
    "reference": paged_attention,
    "kernel": _kernel,
    "kernel, blocks within a step": partial(_kernel, blocks=Blocks(rows=16, tile_tokens=16, splits=1)),
    "kernel, split context": partial(_kernel, blocks=Blocks(rows=32, tile_tokens=16, splits=3)),
}


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def attend(request: pytest.FixtureRequest) -> Attend:
    return jax.jit(IMPLEMENTATIONS[request.param], static_argnames=("scale", "window_tokens", "first_position"))


@pytest.mark.parametrize("name", CASES)
def test_attention_over_pages_equals_the_loop_and_never_reads_what_is_not_owned(attend: Attend, name: str) -> None:
    case = CASES[name]
    got = paged(attend, case)
    assert got.shape == (len(case.sequences), 7, HEADS, V_DIM)
    assert error(case, got, looped(case)) < BOUND


@pytest.mark.parametrize("name", CASES)
def test_what_unowned_pages_hold_and_where_pages_lie_changes_no_bit(attend: Attend, name: str) -> None:
    case = CASES[name]
    expected = paged(attend, case)
    valid = np.array([[place < sequence.count for place in range(7)] for sequence in case.sequences])
    for poison in (0.0, 1e30, math.inf, -math.inf):
        assert np.array_equal(paged(attend, case, poison=poison)[valid], expected[valid])
    assert np.array_equal(paged(attend, case, seed=9)[valid], expected[valid])


@pytest.mark.parametrize("name", CASES)
def test_a_padding_row_yields_zeros(attend: Attend, name: str) -> None:
    padding = [row for row, sequence in enumerate(CASES[name].sequences) if not sequence.count]
    assert padding
    assert not paged(attend, CASES[name])[padding].any()


def test_a_page_id_out_of_range_reads_some_page(attend: Attend) -> None:
    """No caller may ask for it; what comes out means nothing, and nothing beyond the pages is touched."""
    key = jax.random.normal(jax.random.key(0), (2, 4, 1, 16))
    integers = [jnp.array(values, jnp.int32) for values in ([0], [[7]], [8])]
    outs = [
        attend(
            jnp.ones((1, 1, 2, 16)),
            key,
            key,
            jnp.array([[page_id, 1]], jnp.int32),
            *integers,
            scale=0.3,
            window_tokens=None,
            first_position=0,
            sink=None,
        )
        for page_id in (2, 2**31 - 1, -5)
    ]
    assert all(np.isfinite(out).all() for out in outs)


def test_a_token_of_a_sequence_is_the_same_computed_alone_or_in_a_chunk(attend: Attend) -> None:
    case = CASES["window with sinks"]
    row = 3
    whole = paged(attend, case)[row]
    for place in range(case.sequences[row].count):
        position = case.sequences[row].start + place
        alone = replace(
            case,
            sequences=(Sequence(position, 1, first_seen_page(position)),),
            query=case.query[row : row + 1, place : place + 1],
            keys=(case.keys[row][: position + 1],),
            values=(case.values[row][: position + 1],),
        )
        np.testing.assert_allclose(paged(attend, alone)[0, 0], whole[place], rtol=0, atol=1e-6)


def test_the_bound_catches_every_wrong_attention(attend: Attend) -> None:
    """Negative controls: each of these mistakes is far outside the bound."""
    case = CASES["window with sinks"]
    expected = looped(case)
    keys_as_values = tuple(keys[:, :, :V_DIM] for keys in case.keys)
    wrong = {
        "zeros": np.zeros_like(expected),
        "keys for values": paged(attend, replace(case, values=keys_as_values)),
        "window one short": paged(attend, replace(case, window_tokens=WINDOW - 1)),
        "no sink": paged(attend, replace(case, sink=None)),
        "sinks of other heads": paged(attend, replace(case, sink=np.roll(case.sink, 1))),
        "scale of the other width": paged(attend, replace(case, scale=V_DIM**-0.5)),
        "heads grouped the other way": paged(attend, case)[
            :, :, np.arange(HEADS).reshape(GROUP, KV_HEADS).T.reshape(-1)
        ],
    }
    errors = {name: error(case, got, expected) for name, got in wrong.items()}
    assert all(found > 1e4 * BOUND for found in errors.values()), errors
    # One key more than the window lies before these tables' first page, so this control has tables from page 0.
    wide = make_case(FULL_ROWS, WINDOW, True)
    assert error(wide, paged(attend, wide), looped(wide)) < BOUND
    assert error(wide, paged(attend, replace(wide, window_tokens=WINDOW + 1)), looped(wide)) > 1e4 * BOUND


BAD = {
    "not a multiple": {"query": (2, 3, 5, HEAD_DIM)},
    "head_dim": {"query": (2, 3, HEADS, HEAD_DIM + 1)},
    "value_pages": {"value_pages": (PAGES, PAGE, KV_HEADS + 1, V_DIM)},
    "page_table": {"page_table": (3, WIDTH)},
    "sink": {"sink": (KV_HEADS,)},
}


@pytest.mark.parametrize("message", BAD)
def test_shapes_that_do_not_fit_are_refused_by_name(message: str) -> None:
    shapes = {
        "query": (2, 3, HEADS, HEAD_DIM),
        "key_pages": (PAGES, PAGE, KV_HEADS, HEAD_DIM),
        "value_pages": (PAGES, PAGE, KV_HEADS, V_DIM),
        "page_table": (2, WIDTH),
        "sink": (HEADS,),
    } | BAD[message]
    arrays = {
        name: jnp.zeros(shape, jnp.int32 if name == "page_table" else jnp.float32) for name, shape in shapes.items()
    }
    integers = {"first_page": (2,), "positions": (2, 3), "lengths": (2,)}
    arrays |= {name: jnp.zeros(shape, jnp.int32) for name, shape in integers.items()}
    with pytest.raises(ValueError, match=message):
        paged_attention(**arrays, scale=1.0, window_tokens=WINDOW, first_position=0)


def test_unowned_pages_do_not_reach_the_gradient() -> None:
    shapes = {"query": (1, 1, 2, 6), "keys": (3, 4, 1, 6), "values": (3, 4, 1, 5)}
    query, keys, values = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate(shapes.values()))
    keys, values = keys.at[2].set(jnp.nan), values.at[2].set(jnp.nan)

    def total(query: jax.Array) -> jax.Array:
        table, first = jnp.array([[1, 2]]), jnp.array([0])
        out = paged_attention(
            query,
            keys,
            values,
            table,
            first,
            jnp.array([[2]]),
            jnp.array([3]),
            scale=0.4,
            window_tokens=None,
            first_position=0,
            sink=None,
        )
        return out.sum()

    assert jnp.isfinite(jax.grad(total)(query)).all()
