"""Reading what a Source describes: whole arrays, or some rows of a weight as floats."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mimo_jax.checkpoint.numbers import dequantise
from mimo_jax.errors import CheckpointError
from mimo_jax.families.source import Source
from pallas_kernels.formats import Fp8Block, Int8, MxFp4

# One tensor, or its rows [first, last).
Read = Callable[[str, tuple[int, int] | None], np.ndarray]


def read_slice(read: Read, source: Source, index: int, deep: bool = False) -> np.ndarray:
    """A whole slice of a stacked source, or with index 0 a whole source of one piece; converted.

    `deep`: the source is one tensor [experts, out, in], and slice `index` of it is wanted.
    """
    piece = source.pieces[0 if deep else index]
    array = read(piece.name, (index, index + 1))[0] if deep else read(piece.name, piece.rows)
    return _converted(source, piece.name, array)


def read_rows(read: Read, source: Source, index: int, first: int, last: int, deep: bool = False) -> np.ndarray:
    """Rows [first, last) of one slice, as `read_slice` has it."""
    if deep:
        return read_slice(read, source, index, deep)[first:last]
    parts = []
    start = 0
    for piece in source.pieces[index : index + 1] if source.stacked else source.pieces:
        if piece.rows is None:  # there is no other piece
            parts.append(_converted(source, piece.name, read(piece.name, (first, last))))
            break
        rows = piece.rows[1] - piece.rows[0]
        low, high = max(first, start), min(last, start + rows)
        if low < high:
            shift = piece.rows[0] - start
            parts.append(_converted(source, piece.name, read(piece.name, (low + shift, high + shift))))
        start += rows
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def float_rows(read: Read, weight: Any, index: int, first: int, last: int, deep: bool = False) -> np.ndarray:
    """Rows [first, last) of one slice of a weight in any format, as float32. `first` starts a block."""

    def rows_of(source: Source, block: int = 1) -> np.ndarray:
        return read_rows(read, source, index, first // block, -(-last // block), deep)

    if isinstance(weight, Fp8Block):
        return dequantise(Fp8Block(rows_of(weight.values), rows_of(weight.scale, weight.block[0]), weight.block))
    if isinstance(weight, Int8):
        return dequantise(Int8(rows_of(weight.values), rows_of(weight.scale), weight.group))
    if isinstance(weight, MxFp4):
        return dequantise(MxFp4(rows_of(weight.packed), rows_of(weight.scale)))
    return rows_of(weight).astype(np.float32)


def _converted(source: Source, name: str, array: np.ndarray) -> np.ndarray:
    if source.convert is None:
        return array
    try:
        return source.convert(array)
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error
