"""Visibility, drawn: rows are queries, columns are keys, 1 is seen."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.masks import visible

FULL = """
1 . . . . .
1 1 . . . .
1 1 1 . . .
1 1 1 1 . .
1 1 1 1 1 .
1 1 1 1 1 1
"""
WINDOW_1 = """
1 . . . . .
. 1 . . . .
. . 1 . . .
. . . 1 . .
. . . . 1 .
. . . . . 1
"""
FROM_2 = """
. . . . . .
. . . . . .
. . 1 . . .
. . 1 1 . .
. . 1 1 1 .
. . . 1 1 1
"""
WINDOW_3 = """
1 . . . . .
1 1 . . . .
1 1 1 . . .
. 1 1 1 . .
. . 1 1 1 .
. . . 1 1 1
"""


def drawn(picture: str) -> np.ndarray:
    return np.array([[letter == "1" for letter in line.split()] for line in picture.split("\n") if line])


def mask(queries: np.ndarray, keys: np.ndarray, window_tokens: int | None, first_position: int = 0) -> np.ndarray:
    seen = visible(jnp.asarray(queries)[:, None], jnp.asarray(keys)[None, :], window_tokens, first_position)
    return np.asarray(seen)


@pytest.mark.parametrize(
    ("window_tokens", "picture"), [(None, FULL), (1, WINDOW_1), (3, WINDOW_3), (6, FULL), (7, FULL)]
)
def test_the_mask_is_the_drawn_one(window_tokens: int | None, picture: str) -> None:
    assert np.array_equal(mask(np.arange(6), np.arange(6), window_tokens), drawn(picture))


@pytest.mark.parametrize("window_tokens", [1, 2, 11, 128])
def test_a_query_sees_window_keys_its_own_included(window_tokens: int) -> None:
    seen = mask(np.arange(300), np.arange(300), window_tokens)
    assert np.array_equal(seen.sum(axis=1), np.minimum(np.arange(300) + 1, window_tokens))
    assert seen.diagonal().all()


@pytest.mark.parametrize("window_tokens", [None, 3])
def test_a_chunk_sees_the_rows_that_the_whole_sequence_sees(window_tokens: int | None) -> None:
    whole = mask(np.arange(9), np.arange(9), window_tokens)
    assert np.array_equal(mask(np.arange(4, 9), np.arange(2, 9), window_tokens), whole[4:, 2:])


def test_no_key_stands_before_the_first_position() -> None:
    assert np.array_equal(mask(np.arange(6), np.arange(6), 3, first_position=2), drawn(FROM_2))
