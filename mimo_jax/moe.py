"""Mixture of experts with a sigmoid router (MiMo-V2): route, sort by expert, multiply, combine."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from mimo_jax.config import MoeDims
from mimo_jax.layers import activate
from mimo_jax.params import Moe
from mimo_jax.weights import expert_linear, linear_float32


def route(x: Array, moe: Moe, dims: MoeDims) -> tuple[Array, Array]:
    """x [tokens, embed] -> expert ids and weights, [tokens, experts_per_token]; all in float32.

    The bias takes part in the choice and not in the weights. Ties go to the lower expert id.
    """
    logits = linear_float32(x.astype(jnp.float32), moe.router)
    scores = jax.nn.sigmoid(logits)
    _, chosen = jax.lax.top_k(scores + moe.router_bias, dims.experts_per_token)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if dims.normalise_top_k:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return chosen, weights * dims.routed_scale


def moe_ffn(x: Array, moe: Moe, dims: MoeDims, activation: str) -> Array:
    """x [seqs, step, embed] -> the same shape: the weighted sum of each token's experts."""
    tokens = x.reshape(-1, x.shape[-1])
    with jax.named_scope("router"):
        chosen, weights = route(tokens, moe, dims)
    with jax.named_scope("experts"):
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)  # rows sorted by expert
        expert_of_row = flat[order]
        rows = tokens[order // dims.experts_per_token]
        multiply = partial(expert_linear, expert_of_row=expert_of_row, most_rows=tokens.shape[0])
        gate = activate(multiply(rows, moe.gate), activation)
        out = multiply(gate * multiply(rows, moe.up), moe.down)
        # Back to token order before the sum: a token's experts are added in one order, whoever else is in the batch.
        back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
        per_token = out[back].reshape(*chosen.shape, -1)
        combined = jnp.einsum("tke,tk->te", per_token, weights, preferred_element_type=jnp.float32)
    return combined.astype(x.dtype).reshape(x.shape)
