"""How a family says where each parameter comes from."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Source:
    """The checkpoint tensors behind one parameter.

    One name: that tensor, or its rows [first, last) alone. Several names: one slice each along a new first axis
    (experts). `convert` maps what was read to what is kept, without changing the shape.
    """

    names: tuple[str, ...]
    rows: tuple[int, int] | None = None
    convert: Callable[[np.ndarray], np.ndarray] | None = None
    stacked: bool = False


def tensor(
    name: str, *, rows: tuple[int, int] | None = None, convert: Callable[[np.ndarray], np.ndarray] | None = None
) -> Source:
    return Source((name,), rows, convert)


def stack(names: list[str]) -> Source:
    return Source(tuple(names), stacked=True)
