"""Paged attention in plain jnp: the specification, and the way it runs where no kernel is at hand."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.masks import visible


def paged_attention_reference(
    query: Array,
    key_pages: Array,
    value_pages: Array,
    page_table: Array,
    first_page: Array,
    positions: Array,
    lengths: Array,
    *,
    scale: float,
    window_tokens: int | None,
    first_position: int,
    sink: Array | None,
) -> Array:
    """See `api.paged_attention` for the shapes."""
    seqs, step, heads, head_dim = query.shape
    _, page, kv_heads, v_dim = value_pages.shape
    width = page_table.shape[1]
    context = width * page

    keys = key_pages[page_table].reshape(seqs, context, kv_heads, head_dim)
    values = value_pages[page_table].reshape(seqs, context, kv_heads, v_dim)
    key_positions = first_page[:, None] * page + jnp.arange(context, dtype=jnp.int32)  # [seqs, context]
    owned = (key_positions < lengths[:, None]) & (key_positions >= first_position)  # [seqs, context]
    # 0 * NaN is NaN: what no query may see has to be replaced, a probability of zero is not enough. Keys need it in the
    # backward pass.
    keys = jnp.where(owned[:, :, None, None], keys, 0)
    values = jnp.where(owned[:, :, None, None], values, 0)

    grouped = query.reshape(seqs, step, kv_heads, heads // kv_heads, head_dim)
    logits = jnp.einsum("stkgd,sckd->skgtc", grouped, keys, preferred_element_type=jnp.float32) * scale
    seen = visible(positions[:, :, None], key_positions[:, None, :], window_tokens, first_position) & owned[:, None, :]
    logits = jnp.where(seen[:, None, None], logits, -jnp.inf)  # [seqs, kv_heads, group, step, context]

    top = logits.max(axis=-1, keepdims=True)
    if sink is not None:
        sink_logits = sink.astype(jnp.float32).reshape(kv_heads, heads // kv_heads)[None, :, :, None, None]
        top = jnp.maximum(top, sink_logits)
    top = jnp.where(jnp.isfinite(top), top, 0.0)  # a padding row sees nothing
    weights = jnp.exp(logits - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink_logits - top)
    weights = weights / jnp.where(total == 0, 1.0, total)
    out = jnp.einsum("skgtc,sckv->stkgv", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return out.reshape(seqs, step, heads, v_dim).astype(query.dtype)
