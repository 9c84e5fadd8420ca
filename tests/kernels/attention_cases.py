"""Sequences in pages, for the tests of attention: made, attended by a plain loop, and compared."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

# Pairwise different, so that a swapped axis cannot pass.
KV_HEADS, GROUP, HEAD_DIM, V_DIM, PAGE, WIDTH, PAGES = 2, 3, 14, 9, 4, 8, 41
HEADS = KV_HEADS * GROUP
SCALE = 0.31
WINDOW = 5

Attend = Callable[..., Any]  # with the signature of `paged_attention`


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


def paged(attend: Attend, case: Case, *, poison: float = math.nan, seed: int = 1) -> np.ndarray:
    """What `attend` gives, with the sequences' tokens in random pages and `poison` wherever nobody owns anything."""
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
    out = attend(
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
