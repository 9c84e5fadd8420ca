"""Weight formats and the one way to multiply by a weight.

Weights lie as in the checkpoints, [out, in]: rows are contiguous for the CPU and K-major for a GPU's matrix units.
A plain array is the only format so far; a quantized one becomes a dataclass here and a case in `linear`.
"""

import jax.numpy as jnp
from jax import Array

Weight = Array


def linear(x: Array, weight: Weight) -> Array:
    """x [..., in] times weight [out, in] -> [..., out], in x's dtype, accumulated in float32."""
    return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32).astype(x.dtype)


def linear_float32(x: Array, weight: Weight) -> Array:
    """The same with a float32 result, for logits and the router."""
    return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32)
