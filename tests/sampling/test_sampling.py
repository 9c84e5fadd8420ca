"""The device's choice: the cut against a sort, draws against the plain softmax, and what can never be drawn."""

from operator import itemgetter
from typing import Any

import jax
import numpy as np
import pytest

from mimo_jax.inputs import SamplingInputs
from mimo_jax.sampling import BANNED, TOP_LOGPROBS, Sampled, accept, cut, sample

VOCAB, WIDTH = 23, 26  # the last three columns pad the head
ROWS = 2000
_sample = jax.jit(sample, static_argnames="vocab")
_cut = jax.jit(cut)


def inputs(rows: int, **values: Any) -> SamplingInputs:
    """Neutral rows at temperature 1, but for `values`, each a scalar or one value a row."""

    def column(name: str, neutral: float, dtype: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(values.pop(name, neutral), dtype), (rows,)).copy()

    made = SamplingInputs(
        given=np.ones(rows, np.int32),
        following=np.full(rows, -1, np.int32),
        banned_places=np.ones(rows, np.int32),
        temperature=column("temperature", 1.0, np.float32),
        top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1.0, np.float32),
        min_p=column("min_p", 0.0, np.float32),
        seed=column("seed", 7, np.uint32),
        choice=column("choice", 0, np.int32),
        banned=values.pop("banned", np.full((rows, BANNED), WIDTH, np.int32)),
        top_logprobs=np.bool_(values.pop("top_logprobs", False)),
    )
    assert not values
    return made


def draw(logits: np.ndarray, *, positions: np.ndarray | None = None, vocab: int = VOCAB, **values: Any) -> Sampled:
    """`logits` [width], drawn at ROWS positions, or [rows, width]."""
    rows = np.broadcast_to(logits.astype(np.float32), (ROWS, WIDTH)) if logits.ndim == 1 else logits.astype(np.float32)
    places = np.arange(len(rows), dtype=np.int32) if positions is None else positions
    sampled = _sample(rows[:, None], inputs(len(rows), **values), places[:, None], vocab=vocab)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:, 0], sampled)


def some_logits(seed: int = 0, spread: float = 1.5) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(WIDTH) * spread


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def chi_square_limit(freedom: int) -> float:
    """The value exceeded with probability 0.001 (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.0902 * (2 / (9 * freedom)) ** 0.5) ** 3


def assert_drawn_from(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[probabilities == 0].any()
    expected = probabilities * len(tokens)
    common = expected >= 5  # rarer ones are one class together
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) > 1:
        assert ((observed - wanted) ** 2 / wanted).sum() < chi_square_limit(len(wanted) - 1)


def sorted_cut(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which ids stay, by sorting: likelier first, of equals the lower id first."""
    scaled = ((logits - logits.max()) / np.float32(temperature)).astype(np.float32)
    order = np.lexsort((np.arange(len(scaled)), -scaled))
    if 0 < top_k < len(order):
        order = order[:top_k]
    weights = np.exp(scaled.astype(np.float64))
    if top_p < 1:
        before = np.cumsum(weights[order]) - weights[order]
        order = order[before < max(top_p * weights[order].sum(), 1e-30)]
    kept = np.zeros(len(scaled), bool)
    kept[order] = True
    return kept & (weights >= min_p)


def cut_rows() -> tuple[np.ndarray, list[tuple[int, float, float]]]:
    """Every combination of the options over random, tied, masked and huge logits."""
    generator = np.random.default_rng(5)
    options = [
        (top_k, top_p, min_p)
        for top_k in (-1, 0, 1, 2, WIDTH - 1, WIDTH, WIDTH + 10)
        for top_p in (1e-6, 0.1, 0.5, 0.999, 1.0)
        for min_p in (0.0, 0.5, 1.0)
    ] * 5
    rows = generator.standard_normal((len(options), WIDTH)).astype(np.float32) * 2
    kinds = np.arange(len(options)) // (len(options) // 5)
    rows[kinds == 1] = generator.integers(-2, 3, (int((kinds == 1).sum()), WIDTH))  # ties everywhere
    rows[kinds == 2] = np.where(generator.random((int((kinds == 2).sum()), WIDTH)) < 0.4, -np.inf, rows[kinds == 2])
    rows[kinds == 2, 3] = 0.0  # at least one is finite
    rows[kinds == 3] *= 5e3
    rows[kinds == 4] = np.roll(np.arange(WIDTH) == 0, 4) * 1.25  # one top, the rest tied
    return rows, options


def test_the_cut_equals_a_sort() -> None:
    rows, options = cut_rows()
    top_k, top_p, min_p = (np.array(column) for column in zip(*options, strict=True))
    got = np.asarray(_cut(rows, inputs(len(rows), top_k=np.maximum(top_k, 0), top_p=top_p, min_p=min_p)))
    assert not np.isnan(got).any()
    for row, (logits, option) in enumerate(zip(rows, options, strict=True)):
        expected = sorted_cut(logits, 1.0, *option) & (logits > -np.inf)
        kept = np.isfinite(got[row])
        if option[1] < 1 and not np.array_equal(kept, expected):
            # The sums of float32 and float64 may disagree about a token whose sum meets top_p to the last bits.
            weights = softmax(logits.astype(np.float64))
            assert abs(weights[kept & expected].sum() / weights[kept | expected].sum() - 1) < 1e-6, (option, logits)
        else:
            assert np.array_equal(kept, expected), (option, logits)


@pytest.mark.parametrize("top_k", [0, WIDTH, WIDTH + 10])
@pytest.mark.parametrize("top_p", [1.0])
def test_what_is_off_draws_from_the_plain_softmax(top_k: int, top_p: float) -> None:
    logits = some_logits()
    probabilities = np.append(softmax(logits[:VOCAB]), np.zeros(WIDTH - VOCAB))
    assert_drawn_from(draw(logits, top_k=top_k, top_p=top_p).token, probabilities)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 100.0])
def test_temperature_scales_the_logits(temperature: float) -> None:
    logits = some_logits(1)
    probabilities = np.append(softmax(logits[:VOCAB] / temperature), np.zeros(WIDTH - VOCAB))
    assert_drawn_from(draw(logits, temperature=temperature).token, probabilities)


@pytest.mark.parametrize("option", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.8}])
def test_what_is_cut_never_comes_and_the_rest_keeps_its_shares(option: dict[str, Any]) -> None:
    logits = some_logits(2)
    logits[VOCAB:] = -np.inf
    kept = sorted_cut(
        logits.astype(np.float32), 1.0, option.get("top_k", 0), option.get("top_p", 1.0), option.get("min_p", 0.0)
    )
    assert 1 < kept.sum() < VOCAB
    assert_drawn_from(draw(logits, **option).token, softmax(np.where(kept, logits, -np.inf)))


@pytest.mark.parametrize(
    "option",
    [{"temperature": 0.0}, {"temperature": 1e-12}, {"temperature": 1e-6}, {"top_k": 1}, {"top_p": 1e-6}],
    ids=str,
)
def test_greedy_takes_the_most_likely_and_of_equals_the_lowest_id(option: dict[str, Any]) -> None:
    logits = some_logits(3)
    assert (draw(logits, **option).token == logits[:VOCAB].argmax()).all()
    logits[[19, 6, 11]] = 9.0
    assert (draw(logits, **option).token == 6).all()


def test_a_tiny_temperature_takes_the_most_likely() -> None:
    logits = some_logits(3)
    assert (draw(logits, temperature=1e-3).token == logits[:VOCAB].argmax()).all()


def test_min_p_one_keeps_the_most_likely_and_its_equals() -> None:
    logits = some_logits(3)
    logits[[19, 6]] = 9.0
    assert set(draw(logits, min_p=1.0).token) == {6, 19}


def test_extreme_logits_bring_no_nan_and_no_id_outside_the_vocabulary() -> None:
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((ROWS, WIDTH)) * np.array([1e4, 1.0, 1e-30, 1e30])[np.arange(ROWS) % 4, None]
    rows[::5] = 1e4
    rows[1::5] = -50.0
    rows[:, VOCAB:] = 0.0  # zero rows of a padded head win when every real logit is negative
    for temperature in (0.0, 1e-12, 1e-6, 1e-3, 1.0, 100.0):
        for option in ({}, {"top_k": 5, "top_p": 0.5, "min_p": 0.5}):
            got = draw(rows, temperature=temperature, top_logprobs=True, **option)
            assert ((got.token >= 0) & (got.token < VOCAB)).all()
            assert (got.top_ids < VOCAB).all()
            assert not np.isnan(got.logprob).any()
            assert (got.logprob <= 1e-6).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_ids_are_never_taken_and_the_reported_distribution_does_not_change(temperature: float) -> None:
    logits = some_logits(4)
    best = np.argsort(-logits[:VOCAB])[:3]
    banned = np.full((ROWS, BANNED), VOCAB, np.int32)  # VOCAB itself means none
    banned[:, :3] = best
    got = draw(logits, temperature=temperature, banned=banned, top_logprobs=True)
    assert not np.isin(got.token, best).any()
    expected = np.log(softmax(logits[:VOCAB]))
    np.testing.assert_allclose(got.logprob, expected[got.token], atol=1e-5)
    assert (got.rank > 3).all()
    assert (got.top_ids[:, :3] == best).all()


def test_reported_probabilities_are_the_models_own() -> None:
    logits = some_logits(6)
    got = draw(logits, temperature=3.0, top_k=9, top_logprobs=True)
    expected = np.log(softmax(logits[:VOCAB]))
    order = np.argsort(-expected, kind="stable")[:TOP_LOGPROBS]
    np.testing.assert_allclose(got.logprob, expected[got.token], atol=1e-5)
    assert (got.rank == 1 + (expected[None] > expected[got.token][:, None]).sum(axis=1)).all()
    assert (got.top_ids == order).all()
    np.testing.assert_allclose(got.top_logprobs, np.broadcast_to(expected[order], got.top_logprobs.shape), atol=1e-5)


def test_a_draw_depends_on_seed_choice_and_position_alone() -> None:
    logits = some_logits(8, spread=0.3)
    generator = np.random.default_rng(1)
    row = {"seed": 123, "choice": 2, "temperature": 0.9}
    expected = draw(logits, **row).token
    order = generator.permutation(ROWS)
    assert np.array_equal(draw(logits, positions=order.astype(np.int32), **row).token, expected[order])
    # Neighbours of every kind: greedy, cut, other seeds.
    mine = np.arange(ROWS) % 3 == 0
    others = {
        "seed": np.where(mine, 123, generator.integers(0, 2**32, ROWS)),
        "choice": np.where(mine, 2, 0),
        "temperature": np.where(mine, 0.9, generator.choice([0.0, 0.5, 2.0], ROWS)),
        "top_k": np.where(mine, 0, 4),
        "top_p": np.where(mine, 1.0, 0.7),
    }
    assert np.array_equal(draw(logits, **others).token[mine], expected[mine])
    # And each of the three matters.
    assert (draw(logits, **row | {"seed": 124}).token != expected).mean() > 0.5
    assert (draw(logits, **row | {"choice": 3}).token != expected).mean() > 0.5
    assert len(np.unique(expected)) > 10


def test_several_places_of_a_row_are_drawn_as_if_each_were_alone() -> None:
    logits = np.random.default_rng(3).standard_normal((4, 3, WIDTH)).astype(np.float32)
    positions = np.array([[5, 6, 7], [0, 1, 2], [40, 41, 42], [5, 6, 7]], np.int32)
    options: dict[str, Any] = {"temperature": [0.0, 0.7, 1.3, 1.0], "top_k": [0, 4, 0, 9], "seed": [1, 2, 3, 1]}
    banned = np.full((4, BANNED), WIDTH, np.int32)
    banned[:, :20] = np.arange(20)
    asked = inputs(4, banned=banned, top_logprobs=True, **options).replace(banned_places=np.array([0, 1, 2, 3]))
    together = jax.tree.map(np.asarray, _sample(logits, asked, positions, vocab=VOCAB))
    for place in range(3):
        one = asked.replace(banned_places=(asked.banned_places > place).astype(np.int32))
        alone = _sample(logits[:, place : place + 1], one, positions[:, place : place + 1], vocab=VOCAB)
        this_place = jax.tree.map(itemgetter((slice(None), slice(place, place + 1))), together)
        jax.tree.map(np.testing.assert_array_equal, this_place, alone)
    assert (together.token[3] >= 20).all()  # banned at all three places
    assert together.token[0, 0] == logits[0, 0, :VOCAB].argmax()


def test_drafts_are_accepted_up_to_the_first_wrong_one() -> None:
    #                     given | drafts          sampled            accepted, what follows
    rows = [
        ([9, 1, 2, 3], 4, 1, -1, [1, 2, 3, 4], 3, 4),
        ([9, 1, 2, 3], 4, 1, -1, [1, 2, 8, 4], 2, 8),
        ([9, 1, 2, 3], 4, 1, -1, [7, 2, 3, 4], 0, 7),
        ([9, 1, 2, 3], 2, 1, -1, [1, 2, 3, 4], 1, 2),  # the last two tokens are not there
        ([9, 1, 2, 3], 1, 1, -1, [1, 2, 3, 4], 0, 1),
        ([9, 8, 2, 3], 4, 2, -1, [2, 3, 5, 6], 2, 5),
        ([9, 8, 2, 3], 4, 4, -1, [2, 3, 5, 6], 0, 2),
        ([9, 8, 2, 3], 4, 4, 6, [2, 3, 5, 6], 0, 6),  # ends inside its prompt
        ([0, 0, 0, 0], 0, 0, -1, [0, 0, 0, 0], 0, 0),  # padding
    ]
    tokens, counts, given, following, sampled, accepted, after = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    asked = inputs(len(rows)).replace(given=given, following=following)
    got = accept(tokens, sampled, counts, asked)
    assert np.asarray(got[0]).tolist() == accepted.tolist()
    assert np.asarray(got[1]).tolist() == after.tolist()


def test_tokens_that_drafts_bring_have_the_models_distribution() -> None:
    """Two tokens a row, the second only behind an accepted draft: each pair as often as drawing one by one gives it."""
    first, second = (softmax(some_logits(seed, 1.0)[:5]) for seed in (1, 2))
    logits = np.full((ROWS, 2, WIDTH), -np.inf, np.float32)
    logits[:, 0, :5], logits[:, 1, :5] = np.log(first), np.log(second)
    for draft in range(5):
        asked = inputs(ROWS, seed=np.arange(ROWS) + 10_000 * draft)
        positions = np.broadcast_to(np.array([8, 9], np.int32), (ROWS, 2))
        token = _sample(logits, asked, positions, vocab=VOCAB).token
        tokens = np.broadcast_to(np.array([3, draft], np.int32), (ROWS, 2))
        accepted, following = accept(tokens, token, np.full(ROWS, 2), asked)
        assert_drawn_from(np.asarray(token[:, 0]), np.pad(first, (0, WIDTH - 5)))
        stands = np.asarray(accepted) == 1
        assert np.array_equal(stands, np.asarray(token[:, 0]) == draft)
        assert_drawn_from(np.asarray(following)[stands], np.pad(second, (0, WIDTH - 5)))
        with pytest.raises(AssertionError):  # a bonus drawn from the wrong place would show
            assert_drawn_from(np.asarray(following)[stands], np.pad(first, (0, WIDTH - 5)))
