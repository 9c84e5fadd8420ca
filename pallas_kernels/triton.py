"""What Triton asks of every kernel: arrays of power-of-two sizes, and float32 products that are float32."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

_LEAST_COLUMNS = 16  # of a matrix unit's operand


@dataclass(frozen=True)
class Part:
    """Columns [start, start + size) of an axis, of which the first `valid` are there."""

    start: int
    size: int
    valid: int

    @property
    def columns(self) -> Array:
        """[size]; only the first `valid` are inside the axis."""
        return self.start + jnp.arange(self.size)

    @property
    def mask(self) -> Array:
        return jnp.arange(self.size) < self.valid


def parts(size: int) -> tuple[Part, ...]:
    """An axis in powers of two: 192 is 128 + 64, 80 is 64 + 16; what is left over is masked."""
    found, start = [], 0
    while start < size:
        left = size - start
        power = max(_LEAST_COLUMNS, 1 << (left.bit_length() - 1))
        found.append(Part(start, power, min(power, left)))
        start += power
    return tuple(found)


def precision(dtype: Any) -> jax.lax.Precision | None:
    """Of a product of that type: float32 is not to become TF32."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None
