"""How a family says where each parameter comes from, and what it may know of the tensors that are there."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.formats import Fp8Block, MxFp4

FLOATS = ("float32", "bfloat16", "float16", "float64")
FP8 = "float8_e4m3fn"
PACKED = "uint8"
# A power of two: as a float, or as the exponent byte of one (of the type float8_e8m0fnu, or without a type).
POWERS = ("uint8", "float8_e8m0fnu", *FLOATS)

Convert = Callable[[np.ndarray], np.ndarray] | None


@dataclass(frozen=True)
class Form:
    """What is known of a tensor without reading it."""

    dtype: str
    shape: tuple[int, ...]


Forms = Mapping[str, Form]


@dataclass(frozen=True)
class Piece:
    """A tensor, or its rows [first, last) along the first axis alone."""

    name: str
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class Source:
    """The checkpoint tensors behind one array.

    One piece: that tensor or those rows. Several: one below the other; all of them have rows then, and the same rows
    may come twice (factors that two blocks share). `stacked`: one slice each along a new first axis instead
    (experts). `convert` maps what was read to what is kept, without changing the shape; it may raise ValueError.
    """

    pieces: tuple[Piece, ...]
    stacked: bool = False
    convert: Convert = None
    dtypes: tuple[str, ...] = FLOATS  # what the tensors may be stored in

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(piece.name for piece in self.pieces)


def tensor(name: str, *, rows: tuple[int, int] | None = None, convert: Convert = None) -> Source:
    return Source((Piece(name, rows),), convert=convert)


def merged(rows: Iterable[tuple[str, int]]) -> tuple[Piece, ...]:
    """Single rows, (tensor, row), as few pieces.

    (a, 3) (a, 3) (a, 4) (b, 0) -> a[3:4], a[3:5], b[0:1]
    """
    pieces: list[Piece] = []
    for name, row in rows:
        last = pieces[-1] if pieces else None
        if last is not None and last.rows is not None and last.name == name and last.rows[1] == row:
            pieces[-1] = Piece(name, (last.rows[0], row + 1))
        else:
            pieces.append(Piece(name, (row, row + 1)))
    return tuple(pieces)


def weight(names: list[str], forms: Forms, block: tuple[int, int] | None, *, stacked: bool = False) -> Any:
    """A matrix, or experts', in the format that its tensor is stored in: a Source, Fp8Block or MxFp4 of Sources.

    What a tensor is decides, not what the config says about its name: published configs leave names out.
    """

    def source(suffix: str, dtypes: tuple[str, ...], convert: Convert = None) -> Source:
        return Source(tuple(Piece(name + suffix) for name in names), stacked, convert, dtypes)

    dtype = forms[names[0]].dtype if names[0] in forms else None
    if dtype == FP8:
        block = needed_block(names[0], block)
        return Fp8Block(source("", (FP8,)), source("_scale_inv", FLOATS), block)
    if dtype == PACKED:
        return MxFp4(source("", (PACKED,)), source("_scale", POWERS, exponent_bytes))
    return source("", FLOATS)


def needed_block(name: str, block: tuple[int, int] | None) -> tuple[int, int]:
    if block is None:
        raise ValueError(f"{name} is {FP8}, but config.json has no quantization_config with a weight_block_size")
    return block


def exponent_bytes(scale: np.ndarray) -> np.ndarray:
    """Powers of two 2^(b - 127) -> b. Raises ValueError for other numbers and for the byte that means "no number"."""
    if scale.dtype.name == "float8_e8m0fnu":
        scale = scale.view(np.uint8)
    if scale.dtype == np.uint8:
        if (scale == 255).any():
            raise ValueError("a factor is NaN")
        return scale
    fraction, exponent = np.frexp(scale.astype(np.float64))  # 2^k is 0.5 * 2^(k + 1)
    exponent = exponent + 126
    if not ((fraction == 0.5) & (exponent >= 0) & (exponent <= 254)).all():
        raise ValueError("a factor is no power of two from 2^-127 to 2^127")
    return exponent.astype(np.uint8)
