"""The small layers: norm, embedding, head, dense FFN."""

import jax
import jax.numpy as jnp
from jax import Array

from mimo_jax.config import ModelConfig
from mimo_jax.params import Dense, Params
from mimo_jax.weights import linear, linear_float32


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """weight * x / sqrt(mean(x^2) + epsilon) over the last axis, statistics in float32, in x's dtype."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * inverse * weight).astype(x.dtype)


def activate(x: Array, kind: str) -> Array:
    return jax.nn.silu(x) if kind == "silu" else jax.nn.gelu(x, approximate=True)


def dense_ffn(x: Array, ffn: Dense, activation: str) -> Array:
    """down(act(gate x) * up x): SwiGLU or GeGLU."""
    return linear(activate(linear(x, ffn.gate), activation) * linear(x, ffn.up), ffn.down)


def embed(tokens: Array, params: Params, config: ModelConfig) -> Array:
    """tokens [seqs, step] -> [seqs, step, embed]. The caller sees to it that ids lie inside the vocabulary."""
    x = params.embedding[tokens]
    if config.embedding_scale != 1.0:
        # Gemma rounds the scale to the activations' dtype; in float32 that is the exact square root.
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
    return x


def unembed(hidden: Array, params: Params) -> Array:
    """hidden [..., embed], after the final norm -> float32 logits [..., vocab]."""
    return linear_float32(hidden, params.embedding if params.head is None else params.head)
