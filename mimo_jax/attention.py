"""One attention block for both layer kinds: project, rotate, write to the cache, attend, project back."""

import jax
import jax.numpy as jnp
from jax import Array

from mimo_jax.cache import LayerCache, PoolView, write
from mimo_jax.config import AttentionDims
from mimo_jax.layers import rms_norm
from mimo_jax.params import Attention
from mimo_jax.rope import apply_rope
from mimo_jax.weights import linear
from pallas_kernels.attention import paged_attention
from pallas_kernels.formats import Weight


def attention_block(
    x: Array,
    layer: Attention,
    cache: LayerCache,
    view: PoolView,
    positions: Array,
    lengths: Array,
    rope: tuple[Array, Array],
    dims: AttentionDims,
    norm_epsilon: float,
    first_position: int = 0,
) -> tuple[Array, LayerCache]:
    """x [seqs, step, embed], normed -> (out [seqs, step, embed], the cache with the step's keys and values)."""
    with jax.named_scope("qkv"):
        query = _project(x, layer.query, layer.query_bias, dims.heads)
        key = _project(x, layer.key, layer.key_bias, dims.kv_heads)
        value = _project(x, layer.value, layer.value_bias, dims.kv_heads)
        if dims.value_scale != 1.0:
            value = value * jnp.asarray(dims.value_scale, value.dtype)
        if layer.query_norm is not None:
            query = rms_norm(query, layer.query_norm, norm_epsilon)
            key = rms_norm(key, layer.key_norm, norm_epsilon)
    with jax.named_scope("rope"):
        query, key = apply_rope(query, *rope), apply_rope(key, *rope)
    with jax.named_scope("cache_write"):
        cache = write(cache, view, key, value)
    with jax.named_scope("attention"):
        out = paged_attention(
            query,
            cache.keys,
            cache.values,
            view.table,
            view.first_page,
            positions,
            lengths,
            scale=dims.scale,
            window_tokens=dims.window_tokens,
            first_position=first_position,
            sink=layer.sink,
        )
    with jax.named_scope("attention_output"):
        return linear(out.reshape(*x.shape[:-1], dims.heads * dims.v_dim), layer.output), cache


def _project(x: Array, weight: Weight, bias: Array | None, heads: int) -> Array:
    """[seqs, step, embed] -> [seqs, step, heads, dim]."""
    out = linear(x, weight)
    if bias is not None:
        out = out + bias
    return out.reshape(*x.shape[:-1], heads, -1)
