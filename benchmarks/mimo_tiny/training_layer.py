"""`decoder_layer` in a form that a gradient passes through quickly, for whole texts that start at position 0.

The same function of the same parameters (a test compares the two). Attention goes through the project's own block, but
not all queries over all keys: a window layer cuts the texts into rows of one window, which see two pages each; a full
layer goes through a text page by page, as chunked prefill does. The experts are one batched product over rows sorted
by expert.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from mimo_jax.attention import attention_block
from mimo_jax.cache import LayerCache, PoolView
from mimo_jax.config import AttentionDims, FfnKind, ModelConfig, MoeDims
from mimo_jax.layers import activate, dense_ffn, rms_norm
from mimo_jax.moe import route
from mimo_jax.params import Attention, Layer, Moe

RunLayer = Callable[..., tuple[Array, LayerCache]]
ROOM = 1.5  # rows that an expert has room for, over the mean; what does not fit goes without this expert


def training_layer(loads: list[Array]) -> RunLayer:
    """`forward`'s run_layer. Each mixture appends the share of the valid tokens' choices per expert, [experts]."""

    def run(
        x: Array,
        layer: Layer,
        cache: LayerCache,
        view: PoolView,
        positions: Array,
        lengths: Array,
        rope: tuple[Array, Array],
        *,
        dims: AttentionDims,
        ffn_kind: FfnKind,
        config: ModelConfig,
    ) -> tuple[Array, LayerCache]:
        attention = _full if dims.window_tokens is None else _window
        normed = rms_norm(x, layer.attention_norm, config.norm_epsilon)
        out, cache = attention(normed, layer.attention, cache, view, positions, lengths, rope, dims, config)
        x = x + out
        normed = rms_norm(x, layer.ffn_norm, config.norm_epsilon)
        if ffn_kind is FfnKind.DENSE:
            return x + dense_ffn(normed, layer.ffn, config.activation), cache
        assert config.moe is not None  # ModelConfig checks it
        out, load = experts(normed, layer.ffn, config.moe, config.activation, positions < lengths[:, None])
        loads.append(load)
        return x + out, cache

    return run


def _window(
    x: Array,
    layer: Attention,
    cache: LayerCache,
    view: PoolView,
    positions: Array,
    lengths: Array,
    rope: tuple[Array, Array],
    dims: AttentionDims,
    config: ModelConfig,
) -> tuple[Array, LayerCache]:
    """Rows of one page of queries; each sees that page and the one before it."""
    pages = view.table.shape[1]
    rows = x.shape[0] * pages

    def cut(array: Array) -> Array:
        return array.reshape(rows, -1, *array.shape[2:])

    first = jnp.maximum(jnp.arange(pages) - 1, 0)
    table = jnp.stack([view.table[:, first], view.table[:, first + 1]], axis=-1).reshape(rows, 2)
    first_page = jnp.broadcast_to(first, view.table.shape).reshape(rows)
    row_view = PoolView(cut(view.page_ids), cut(view.offsets), table, first_page)
    row_rope = (cut(rope[0]), cut(rope[1]))
    row_lengths = jnp.repeat(lengths, pages)
    out, cache = attention_block(
        cut(x), layer, cache, row_view, cut(positions), row_lengths, row_rope, dims, config.norm_epsilon
    )
    return out.reshape(x.shape), cache


def _full(
    x: Array,
    layer: Attention,
    cache: LayerCache,
    view: PoolView,
    positions: Array,
    lengths: Array,
    rope: tuple[Array, Array],
    dims: AttentionDims,
    config: ModelConfig,
) -> tuple[Array, LayerCache]:
    """Page by page; the queries of page p see the pages 0 to p."""
    pages = view.table.shape[1]
    size = x.shape[1] // pages
    outs = []
    for page in range(pages):
        part = slice(page * size, (page + 1) * size)
        page_view = PoolView(
            view.page_ids[:, part], view.offsets[:, part], view.table[:, : page + 1], jnp.zeros_like(view.first_page)
        )
        part_rope = (rope[0][:, part], rope[1][:, part])
        out, cache = attention_block(
            x[:, part], layer, cache, page_view, positions[:, part], lengths, part_rope, dims, config.norm_epsilon
        )
        outs.append(out)
    return jnp.concatenate(outs, axis=1), cache


def experts(x: Array, moe: Moe, dims: MoeDims, activation: str, valid: Array) -> tuple[Array, Array]:
    """x [seqs, step, embed] -> (the mixture's output, the experts' shares of the valid tokens' choices [experts])."""
    tokens = x.reshape(-1, x.shape[-1])
    chosen, weights = route(tokens, moe, dims)
    room = int(ROOM * chosen.size / dims.experts)
    # Padding chooses an expert that is not there, so it stands last.
    flat = jnp.where(valid.reshape(-1, 1), chosen, dims.experts).reshape(-1)
    sizes = jnp.bincount(flat, length=dims.experts + 1)
    starts = jnp.cumsum(sizes) - sizes
    order = jnp.argsort(flat, stable=True)  # choices sorted by expert
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size)) - starts[flat]
    slot = jnp.where((flat < dims.experts) & (place < room), flat * room + place, dims.experts * room)
    inside = jnp.arange(room) < sizes[: dims.experts, None]  # [experts, room]
    choice = order[jnp.minimum(starts[: dims.experts, None] + jnp.arange(room), order.size - 1)]
    source = jnp.where(inside, choice // dims.experts_per_token, tokens.shape[0])

    rows = jnp.pad(tokens, ((0, 1), (0, 0)))[source]  # [experts, room, embed]; zeros where nothing stands
    inner = activate(jnp.einsum("xre,xfe->xrf", rows, moe.gate), activation) * jnp.einsum("xre,xfe->xrf", rows, moe.up)
    out = jnp.einsum("xrf,xef->xre", inner, moe.down).reshape(-1, x.shape[-1])
    per_choice = jnp.pad(out, ((0, 1), (0, 0)))[slot].reshape(*chosen.shape, -1)
    share = sizes[: dims.experts] / jnp.maximum(sizes[: dims.experts].sum(), 1)
    return jnp.einsum("tke,tk->te", per_choice, weights).reshape(x.shape), share
