"""Random choices that are the same in every Python version: all of them come from `random.Random.random` alone."""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """A stream of choices from one integer seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random  # the one method whose stream Python promises to keep

    def below(self, limit: int) -> int:
        """0 to limit - 1, all equally likely."""
        return int(self._random() * limit)

    def between(self, low: int, high: int) -> int:
        """low to high, both possible."""
        return low + self.below(high - low + 1)

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def pick(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def skewed(self, values: Sequence[T]) -> T:
        """The first value half of the time, the second a quarter, and so on; what is left over goes to the last."""
        for value in values[:-1]:
            if self.chance(0.5):
                return value
        return values[-1]

    def some(self, values: Sequence[T], count: int) -> list[T]:
        """`count` different values in a random order."""
        left = list(values)
        return [left.pop(self.below(len(left))) for _ in range(count)]
