"""Rotary position embedding on the first dims of each head, rotate-half pairing."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from mimo_jax.config import AttentionDims, RopeScaling


def inverse_frequencies(dims: AttentionDims) -> np.ndarray:
    """float64 [rotary_dims / 2]: theta^(-2i / rotary_dims). The exponent counts the rotated dims, not the head's."""
    exponents = np.arange(0, dims.rotary_dims, 2, dtype=np.float64) / dims.rotary_dims
    frequencies = dims.rope_theta**-exponents
    return frequencies if dims.rope_scaling is None else _scaled(frequencies, dims.rope_scaling)


def rope_tables(positions: Array, dims: AttentionDims) -> tuple[Array, Array]:
    """Cosines and sines, float32 [seqs, step, rotary_dims / 2], for positions [seqs, step]."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(inverse_frequencies(dims), jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: Array, cosines: Array, sines: Array) -> Array:
    """Rotates x [seqs, step, heads, head_dim]: dim i pairs with dim i + rotary_dims / 2, later dims pass through."""
    half = cosines.shape[-1]
    cosines, sines = cosines[:, :, None], sines[:, :, None]
    wide = x.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    rotated = (first * cosines - second * sines, second * cosines + first * sines, rest)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _scaled(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Linear: all slowed by the factor. Llama 3: short waves kept, long ones slowed, a ramp between."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "divisors":
        return frequencies / np.asarray(scaling.divisors)
    turns = scaling.original_max_position_tokens * frequencies / (2 * math.pi)  # over the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)
