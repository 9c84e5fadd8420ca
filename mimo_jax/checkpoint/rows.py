"""Reading what a Source describes: whole arrays, or some rows of a weight as floats."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mimo_jax.checkpoint.numbers import dequantise
from mimo_jax.errors import CheckpointError
from mimo_jax.families.source import Source
from mimo_jax.weights import Fp8Block, MxFp4

# One tensor, or its rows [first, last), as a fresh array.
Read = Callable[[str, tuple[int, int] | None], np.ndarray]


def read_slice(read: Read, source: Source, index: int) -> np.ndarray:
    """A whole slice of a stacked source, or with index 0 a whole source of one piece; converted."""
    piece = source.pieces[index]
    return converted(source, piece.name, read(piece.name, piece.rows))


def read_rows(read: Read, source: Source, index: int, first: int, last: int) -> np.ndarray:
    """Rows [first, last) of one slice of a stacked source (or of the source itself, index 0), converted."""
    parts = []
    start = 0
    for piece in source.pieces[index : index + 1] if source.stacked else source.pieces:
        if piece.rows is None:  # there is no other piece
            parts.append(converted(source, piece.name, read(piece.name, (first, last))))
            break
        rows = piece.rows[1] - piece.rows[0]
        low, high = max(first, start), min(last, start + rows)
        if low < high:
            shift = piece.rows[0] - start
            parts.append(converted(source, piece.name, read(piece.name, (low + shift, high + shift))))
        start += rows
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def converted(source: Source, name: str, array: np.ndarray) -> np.ndarray:
    if source.convert is None:
        return array
    try:
        return source.convert(array)
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error


def float_rows(read: Read, weight: Any, index: int, first: int, last: int) -> np.ndarray:
    """Rows [first, last) of one slice of a quantised weight as float32. `first` starts a block."""
    if isinstance(weight, Fp8Block):
        rows = weight.block[0]
        values = read_rows(read, weight.values, index, first, last)
        scale = read_rows(read, weight.scale, index, first // rows, -(-last // rows))
        return dequantise(Fp8Block(values, scale, weight.block))
    if isinstance(weight, MxFp4):
        packed, powers = (read_rows(read, part, index, first, last) for part in (weight.packed, weight.scale))
        return dequantise(MxFp4(packed, powers))
    return read_rows(read, weight, index, first, last).astype(np.float32)
