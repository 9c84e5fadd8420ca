"""The attention reference against loops that know nothing of pages, and errors that the bound has to catch."""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import paged_attention

BOUND = 2e-6  # worst row, float32
# Pairwise different, so that a swapped axis cannot pass.
KV_HEADS, GROUP, HEAD_DIM, V_DIM, PAGE, WIDTH, PAGES = 2, 3, 14, 9, 4, 8, 41
HEADS = KV_HEADS * GROUP
SCALE = 0.31
WINDOW = 5

attention = jax.jit(paged_attention, static_argnames=("window_tokens", "first_position"))


@dataclass(frozen=True)
class Sequence:
    """One row: `count` queries from position `start`; its table begins at logical page `first_page`."""

    start: int
    count: int
    first_page: int = 0


@dataclass(frozen=True)
class Case:
    sequences: tuple[Sequence, ...]
    window_tokens: int | None
    sink: np.ndarray | None
    query: np.ndarray  # [seqs, step, heads, head_dim]
    keys: tuple[np.ndarray, ...]  # [tokens, kv_heads, head_dim] of each sequence
    values: tuple[np.ndarray, ...]
    scale: float = SCALE


def make_case(sequences: tuple[Sequence, ...], window_tokens: int | None, has_sink: bool, seed: int = 0) -> Case:
    draw = np.random.default_rng(seed)
    step = max(sequence.count for sequence in sequences)
    lengths = [sequence.start + sequence.count if sequence.count else 0 for sequence in sequences]

    def normal(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape).astype(np.float32)

    return Case(
        sequences=sequences,
        window_tokens=window_tokens,
        sink=normal(HEADS) + 1 if has_sink else None,
        query=normal(len(sequences), step, HEADS, HEAD_DIM),
        keys=tuple(normal(length, KV_HEADS, HEAD_DIM) for length in lengths),
        values=tuple(normal(length, KV_HEADS, V_DIM) for length in lengths),
    )


def looped(case: Case) -> np.ndarray:
    """Query by query and head by head, in float64; zeros for padding rows."""
    out = np.zeros((*case.query.shape[:3], V_DIM))
    for row, sequence in enumerate(case.sequences):
        for place in range(sequence.count):
            position = sequence.start + place
            first = 0 if case.window_tokens is None else max(0, position - case.window_tokens + 1)
            for head in range(HEADS):
                keys = case.keys[row][first : position + 1, head // GROUP].astype(np.float64)
                logits = keys @ case.query[row, place, head].astype(np.float64) * case.scale
                sink = [] if case.sink is None else [float(case.sink[head])]
                weights = np.exp(np.concatenate([logits, sink]) - max([*logits, *sink]))
                weights /= weights.sum()
                out[row, place, head] = weights[: len(logits)] @ case.values[row][first : position + 1, head // GROUP]
    return out


def paged(case: Case, *, poison: float = math.nan, seed: int = 1) -> np.ndarray:
    """The product, with the sequences' tokens in random pages and `poison` wherever nobody owns anything."""
    free = list(np.random.default_rng(seed).permutation(np.arange(1, PAGES)))
    key_pages = np.full((PAGES, PAGE, KV_HEADS, HEAD_DIM), poison, np.float32)
    value_pages = np.full((PAGES, PAGE, KV_HEADS, V_DIM), poison, np.float32)
    table = np.zeros((len(case.sequences), WIDTH), np.int32)
    for row, (sequence, keys, values) in enumerate(zip(case.sequences, case.keys, case.values, strict=True)):
        for entry, page in enumerate(range(sequence.first_page, -(-len(keys) // PAGE))):
            table[row, entry] = free.pop()
            held = slice(page * PAGE, min((page + 1) * PAGE, len(keys)))
            key_pages[table[row, entry], : held.stop - held.start] = keys[held]
            value_pages[table[row, entry], : held.stop - held.start] = values[held]
    starts = np.array([sequence.start for sequence in case.sequences], np.int32)
    out = attention(
        jnp.asarray(case.query),
        jnp.asarray(key_pages),
        jnp.asarray(value_pages),
        jnp.asarray(table),
        jnp.asarray([sequence.first_page for sequence in case.sequences], jnp.int32),
        jnp.asarray(starts[:, None] + np.arange(case.query.shape[1], dtype=np.int32)),
        jnp.asarray([len(keys) for keys in case.keys], jnp.int32),
        scale=case.scale,
        window_tokens=case.window_tokens,
        first_position=0,
        sink=None if case.sink is None else jnp.asarray(case.sink),
    )
    return np.asarray(out)


def error(case: Case, got: np.ndarray, expected: np.ndarray) -> float:
    """The worst valid row's distance over the expected row's length: an average would hide one bad row."""
    rows = []
    for row, sequence in enumerate(case.sequences):
        for place in range(sequence.count):
            for head in range(HEADS):
                right = expected[row, place, head]
                rows.append(np.linalg.norm(got[row, place, head] - right) / np.linalg.norm(right))
    return float(np.max(rows))  # NaN if any is


def first_seen_page(start: int) -> int:
    return max(0, start - WINDOW + 1) // PAGE


FULL_ROWS = tuple(
    Sequence(start, count) for start, count in ((0, 7), (20, 1), (0, 0), (11, 5), (0, 1), (7, 1), (8, 2), (9, 7))
)
WINDOW_ROWS = tuple(
    Sequence(start, count, first_seen_page(start))
    for start, count in ((0, 7), (23, 1), (0, 0), (30, 5), (4, 2), (5, 1), (3, 6), (1000, 7))
)
CASES = {
    "full": make_case(FULL_ROWS, None, False),
    "full with sinks": make_case(FULL_ROWS, None, True),
    "window": make_case(WINDOW_ROWS, WINDOW, False),
    "window with sinks": make_case(WINDOW_ROWS, WINDOW, True),
    "window of one": make_case(WINDOW_ROWS, 1, True),
    "window over everything": make_case(FULL_ROWS, 100, True),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_over_pages_equals_the_loop_and_never_reads_what_is_not_owned(name: str) -> None:
    case = CASES[name]
    got = paged(case)
    assert got.shape == (len(case.sequences), 7, HEADS, V_DIM)
    assert error(case, got, looped(case)) < BOUND


@pytest.mark.parametrize("name", CASES)
def test_what_unowned_pages_hold_and_where_pages_lie_changes_no_bit(name: str) -> None:
    case = CASES[name]
    expected = paged(case)
    valid = np.array([[place < sequence.count for place in range(7)] for sequence in case.sequences])
    for poison in (0.0, 1e30, math.inf, -math.inf):
        assert np.array_equal(paged(case, poison=poison)[valid], expected[valid])
    assert np.array_equal(paged(case, seed=9)[valid], expected[valid])


@pytest.mark.parametrize("name", CASES)
def test_a_padding_row_yields_zeros(name: str) -> None:
    padding = [row for row, sequence in enumerate(CASES[name].sequences) if not sequence.count]
    assert padding
    assert not paged(CASES[name])[padding].any()


def test_a_token_of_a_sequence_is_the_same_computed_alone_or_in_a_chunk() -> None:
    case = CASES["window with sinks"]
    row = 3
    whole = paged(case)[row]
    for place in range(case.sequences[row].count):
        position = case.sequences[row].start + place
        alone = replace(
            case,
            sequences=(Sequence(position, 1, first_seen_page(position)),),
            query=case.query[row : row + 1, place : place + 1],
            keys=(case.keys[row][: position + 1],),
            values=(case.values[row][: position + 1],),
        )
        np.testing.assert_allclose(paged(alone)[0, 0], whole[place], rtol=0, atol=1e-6)


def test_the_bound_catches_every_wrong_attention() -> None:
    """Negative controls: each of these mistakes is far outside the bound."""
    case = CASES["window with sinks"]
    expected = looped(case)
    keys_as_values = tuple(keys[:, :, :V_DIM] for keys in case.keys)
    wrong = {
        "zeros": np.zeros_like(expected),
        "keys for values": paged(replace(case, values=keys_as_values)),
        "window one short": paged(replace(case, window_tokens=WINDOW - 1)),
        "no sink": paged(replace(case, sink=None)),
        "sinks of other heads": paged(replace(case, sink=np.roll(case.sink, 1))),
        "scale of the other width": paged(replace(case, scale=V_DIM**-0.5)),
        "heads grouped the other way": paged(case)[:, :, np.arange(HEADS).reshape(GROUP, KV_HEADS).T.reshape(-1)],
    }
    errors = {name: error(case, got, expected) for name, got in wrong.items()}
    assert all(found > 1e4 * BOUND for found in errors.values()), errors
    # One key more than the window lies before these tables' first page, so this control has tables from page 0.
    wide = make_case(FULL_ROWS, WINDOW, True)
    assert error(wide, paged(wide), looped(wide)) < BOUND
    assert error(wide, paged(replace(wide, window_tokens=WINDOW + 1)), looped(wide)) > 1e4 * BOUND


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
