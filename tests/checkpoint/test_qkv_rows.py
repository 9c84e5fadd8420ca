"""Where the rows and factors of q, k and v lie: the published numbers, and any others against a loop."""

import itertools

import numpy as np
import pytest

from mimo_jax.families.qkv import Chunks, fused_fp8, split_fp8
from mimo_jax.families.source import Piece, Source, merged

BLOCK = (128, 128)
# Chunks of V2.5's full layers (V2-Flash's have the same rows), its window layers and draft heads, and all of Pro's.
SIZES = (192, 192, 128)
FULL = Chunks(4, (16, 1, 1), SIZES)
WINDOW = Chunks(4, (16, 2, 2), SIZES)
PRO = Chunks(8, (16, 1, 1), SIZES)


def factor_rows(source: Source) -> list[tuple[str, int]]:
    """(tensor, row) of each row of a source that is made of pieces."""
    assert all(piece.rows is not None for piece in source.pieces)
    return [(piece.name, row) for piece in source.pieces for row in range(*piece.rows)]  # type: ignore[misc]


def test_a_published_chunk_has_27_or_29_blocks() -> None:
    assert [chunks.count * chunks.chunk_blocks(128) for chunks in (FULL, WINDOW, PRO)] == [108, 116, 216]
    whole = Chunks(1, (64, 4, 4), SIZES), Chunks(1, (128, 8, 8), SIZES)
    assert [chunks.chunk_blocks(128) for chunks in whole] == [106, 212]


def test_k_and_v_share_the_block_that_both_have_rows_in() -> None:
    query, key, value = fused_fp8("w", FULL, BLOCK)
    assert {query.block, key.block, value.block} == {(64, 128)}
    assert query.values.pieces[1] == Piece("w", (3392, 6464))
    assert key.values.pieces[1] == Piece("w", (3392 + 3072, 3392 + 3264))
    assert [row for _, row in factor_rows(query.scale)][:50] == [*np.repeat(np.arange(24), 2), 27, 27]
    assert [row for _, row in factor_rows(key.scale)][:6] == [24, 24, 25, 51, 51, 52]
    assert [row for _, row in factor_rows(value.scale)][:4] == [25, 26, 52, 53]


def test_a_head_of_a_window_layer_starts_in_the_middle_of_a_block() -> None:
    """Its two K heads have three blocks; in halves, each head has three of its own and goes to any device."""
    query, key, value = fused_fp8("w", WINDOW, BLOCK)
    assert (query.block, key.block, value.block) == ((64, 128), (64, 128), (128, 128))
    assert [row for _, row in factor_rows(key.scale)][:7] == [24, 24, 25, 25, 26, 26, 29 + 24]
    assert [row for _, row in factor_rows(value.scale)][:3] == [27, 28, 29 + 27]


def test_v2_flash_keeps_the_shared_block_with_k() -> None:
    query, key, value = split_fp8("p.", FULL, BLOCK)
    q, k, v = (f"p.{part}_proj.weight_scale_inv" for part in "qkv")
    assert factor_rows(query.scale) == [(q, row // 2) for row in range(192)]
    assert factor_rows(key.scale)[:6] == [(k, 0), (k, 0), (k, 1), (k, 2), (k, 2), (k, 3)]
    assert factor_rows(value.scale)[:4] == [(k, 1), (v, 0), (k, 3), (v, 1)]
    assert [FULL.count * FULL.owned(part, 128) for part in range(3)] == [96, 8, 4]
    assert [WINDOW.count * WINDOW.owned(part, 128) for part in range(3)] == [96, 12, 8]


SHAPES = list(itertools.product([1, 3], [40, 48, 24], [7, 16, 24], [5, 16]))


@pytest.mark.parametrize(("count", "query", "key", "value"), SHAPES)
def test_every_row_gets_the_factor_of_its_block(count: int, query: int, key: int, value: int) -> None:
    """Row by row, for sizes that fit blocks of 16 rows and sizes that do not."""
    chunks, block = Chunks(count, (2, 1, 3), (query, key, value)), 16
    total, blocks = chunks.chunk_rows, chunks.chunk_blocks(block)
    rows = np.arange(count * total)
    factor_of_row = rows // total * blocks + rows % total // block
    for part, weight in enumerate(fused_fp8("w", chunks, (block, 24))):
        own = [row for _, row in factor_rows(weight.values)]
        finer = [row for _, row in factor_rows(weight.scale)]
        assert len(finer) * weight.block[0] == len(own)
        assert chunks.sizes[part] % weight.block[0] == 0
        for place, row in enumerate(own):
            assert rows[row] % total in range(chunks.start(part), chunks.start(part) + chunks.rows[part])
            assert finer[place // weight.block[0]] == factor_of_row[row]


def test_neighbouring_rows_are_read_at_once() -> None:
    rows = [("a", 3), ("a", 3), ("a", 4), ("a", 5), ("b", 6), ("a", 0)]
    assert merged(rows) == (Piece("a", (3, 4)), Piece("a", (3, 6)), Piece("b", (6, 7)), Piece("a", (0, 1)))
