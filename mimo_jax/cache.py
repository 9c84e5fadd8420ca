"""The dual-pool paged KV cache: one pool for full layers, one for window layers.

A page id means the same page in every layer of its pool. A step writes its keys and values into the pages first, then
attention reads pages only. Page 0 is the null page: padding writes there and nobody reads it. The device obeys page
tables; who owns which page is decided on the host (`engine/pages.py`).

Page of 4 tokens, a sequence of 10 tokens in the pages 7, 2, 5 of the full pool; its window is 5, so the window pool
keeps positions 6..9 (and what shares a page with them) for the next query at position 10:

    full_table    7 2 5         window_table  9 3          window_first 1
    positions     0123 4567 89..                4567 89..
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from mimo_jax.config import LayerKind, ModelConfig
from mimo_jax.params import ArraySpec


@dataclass(frozen=True)
class PoolSizes:
    """Pages of both pools, the null page included, and tokens in a page of each."""

    full_pages: int
    window_pages: int
    full_page_tokens: int = 16
    window_page_tokens: int = 16

    def __post_init__(self) -> None:
        for name in ("full_pages", "window_pages", "full_page_tokens", "window_page_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; at least 1 is needed")

    def pages(self, kind: LayerKind) -> int:
        return self.full_pages if kind is LayerKind.FULL else self.window_pages

    def page_tokens(self, kind: LayerKind) -> int:
        return self.full_page_tokens if kind is LayerKind.FULL else self.window_page_tokens


@struct.dataclass
class LayerCache:
    keys: Any  # [pages, page, kv_heads, head_dim]
    values: Any  # [pages, page, kv_heads, v_dim]


@struct.dataclass
class Cache:
    """One entry per layer of the trunk and per draft head; its kind says which pool its pages belong to.

    `hidden` keeps, beside the keys and values of the draft heads and in pages of their pool, the hidden states that
    they are fed: the trunk's, and if heads are chained, those of all heads but the last.
    """

    layers: tuple[LayerCache, ...]
    mtp: tuple[LayerCache, ...] = ()
    hidden: tuple[Any, ...] = ()  # [pages, page, embed]


@struct.dataclass
class PoolView:
    """One pool as one step sees it: where the new tokens go and what attention reads."""

    page_ids: Array  # [seqs, step], page of each new token, 0 for padding
    offsets: Array  # [seqs, step], place inside the page
    table: Array  # [seqs, width]
    first_page: Array  # [seqs], logical page of table[:, 0]


def cache_specs(config: ModelConfig, sizes: PoolSizes, dtype: Any = jnp.bfloat16) -> Cache:
    """`Cache` of ArraySpec."""
    layers = tuple(_layer_specs(config, kind, sizes, dtype) for kind in config.layer_kinds)
    if config.mtp is None:
        return Cache(layers)
    kind = config.mtp.kind
    hidden = ArraySpec((sizes.pages(kind), sizes.page_tokens(kind), config.embed), dtype, ("pages", "page", "embed"))
    return Cache(
        layers,
        mtp=(_layer_specs(config, kind, sizes, dtype),) * config.mtp.heads,
        hidden=(hidden,) * config.mtp.hidden_states,
    )


def init_cache(config: ModelConfig, sizes: PoolSizes, dtype: Any = jnp.float32) -> Cache:
    """An empty cache: zeros in every page of both pools."""
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), cache_specs(config, sizes, dtype))


def page_bytes(config: ModelConfig, kind: LayerKind, page_tokens: int, dtype: Any) -> int:
    """Bytes of one page over all layers of its pool."""
    dims = config.full if kind is LayerKind.FULL else config.window
    if dims is None:
        return 0
    token = config.cached_kinds.count(kind) * dims.kv_heads * (dims.head_dim + dims.v_dim)
    if config.mtp is not None and config.mtp.kind is kind:
        token += config.mtp.hidden_states * config.embed
    return token * page_tokens * jnp.dtype(dtype).itemsize


def first_window_page(position: int | Array, window_tokens: int, page_tokens: int) -> Any:
    """The logical page of the first key that a query at `position` sees (host ints and arrays alike)."""
    first = position - (window_tokens - 1)
    return (first * (first > 0)) // page_tokens


def pool_view(table: Array, first_page: Array, positions: Array, valid: Array, page_tokens: int) -> PoolView:
    """positions and valid are [seqs, step]; a token that is not valid is sent to the null page."""
    entry = jnp.where(valid, positions // page_tokens - first_page[:, None], 0)
    page_ids = jnp.where(valid, jnp.take_along_axis(table, entry, axis=1), 0)
    return PoolView(page_ids, positions % page_tokens, table, first_page)


def write(cache: LayerCache, view: PoolView, keys: Array, values: Array) -> LayerCache:
    """Scatters keys [seqs, step, kv_heads, head_dim] and values into their pages."""
    return LayerCache(keys=write_pages(cache.keys, view, keys), values=write_pages(cache.values, view, values))


def write_pages(pages: Array, view: PoolView, new: Array) -> Array:
    """Scatters new [seqs, step, ...] into pages [pages, page, ...].

    Two indices, page and place: with the two merged into one by a reshape, XLA's CPU compiler copies every pool.
    """
    return pages.at[view.page_ids, view.offsets].set(new.astype(pages.dtype))


def read_pages(pages: Array, view: PoolView, valid: Array) -> Array:
    """What `write_pages` wrote: pages [pages, page, ...] -> [seqs, step, ...]; zeros where `valid` is false."""
    found = pages[view.page_ids, view.offsets]
    return jnp.where(valid.reshape(*valid.shape, *(1,) * (found.ndim - 2)), found, 0)


def _layer_specs(config: ModelConfig, kind: LayerKind, sizes: PoolSizes, dtype: Any) -> LayerCache:
    dims = config.dims(kind)
    kv = "kv_heads_full" if kind is LayerKind.FULL else "kv_heads_window"
    axes = ("pages", "page", kv, "head_dim")
    shape = (sizes.pages(kind), sizes.page_tokens(kind), dims.kv_heads)
    return LayerCache(ArraySpec((*shape, dims.head_dim), dtype, axes), ArraySpec((*shape, dims.v_dim), dtype, axes))
