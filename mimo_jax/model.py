"""The decoder: embedding, layers, final norm. A pure function over frozen trees."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from mimo_jax.attention import attention_block
from mimo_jax.cache import Cache, LayerCache, PoolView, pool_view
from mimo_jax.config import AttentionDims, FfnKind, LayerKind, ModelConfig
from mimo_jax.inputs import StepInputs
from mimo_jax.layers import dense_ffn, embed, rms_norm
from mimo_jax.moe import moe_ffn
from mimo_jax.params import Layer, Params
from mimo_jax.rope import rope_tables


def forward(
    params: Params,
    cache: Cache,
    inputs: StepInputs,
    *,
    config: ModelConfig,
    run_layer: Callable[..., tuple[Array, LayerCache]] | None = None,
) -> tuple[Array, Cache]:
    """Runs the step's tokens through all layers.

    Returns (hidden [seqs, step, embed] after the final norm, the cache with the step's keys and values). Prefill,
    decode and verification are the same call with other sizes of [seqs, step]. Rows and tokens beyond `inputs.counts`
    write to the null page and their hidden states mean nothing. `run_layer` stands in for `decoder_layer` (a jitted
    one is traced once for all layers of a kind). Draft heads do not run here, see `mimo_jax/mtp.py`.
    """
    x, cache = trunk(params, cache, inputs, config=config, run_layer=run_layer or decoder_layer)
    return rms_norm(x, params.final_norm, config.norm_epsilon), cache


def trunk(
    params: Params,
    cache: Cache,
    inputs: StepInputs,
    *,
    config: ModelConfig,
    run_layer: Callable[..., tuple[Array, LayerCache]],
) -> tuple[Array, Cache]:
    """As `forward`, before the final norm."""
    step = inputs.tokens.shape[1]
    positions = inputs.starts[:, None] + jnp.arange(step, dtype=jnp.int32)  # [seqs, step]
    valid = jnp.arange(step, dtype=jnp.int32) < inputs.counts[:, None]
    lengths = jnp.where(inputs.counts > 0, inputs.starts + inputs.counts, 0)  # tokens in the pages after this step
    views = {kind: view(inputs, positions, valid, kind, _page_tokens(cache, kind, config)) for kind in config.kinds}
    rope = {kind: rope_tables(positions, config.dims(kind)) for kind in config.kinds}

    with jax.named_scope("embed"):
        x = embed(inputs.tokens, params, config)
    new_layers: list[LayerCache] = []
    # Unrolled: a scan over the cache takes many times the temporary memory, and the layers are not alike anyway.
    for layer, layer_cache, kind, ffn_kind in zip(
        params.layers, cache.layers, config.layer_kinds, config.ffn_kinds, strict=True
    ):
        x, layer_cache = run_layer(
            x,
            layer,
            layer_cache,
            views[kind],
            positions,
            lengths,
            rope[kind],
            dims=config.dims(kind),
            ffn_kind=ffn_kind,
            config=config,
        )
        new_layers.append(layer_cache)
    return x, replace(cache, layers=tuple(new_layers))


def decoder_layer(
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
    first_position: int = 0,
) -> tuple[Array, LayerCache]:
    """x [seqs, step, embed] -> (x behind attention and FFN, the layer's cache with the step's keys and values).

    No key stands before `first_position`.
    """
    out, cache = attention_block(
        rms_norm(x, layer.attention_norm, config.norm_epsilon),
        layer.attention,
        cache,
        view,
        positions,
        lengths,
        rope,
        dims,
        config.norm_epsilon,
        first_position,
    )
    x = x + _post_norm(out, layer.post_attention_norm, config)
    with jax.named_scope("ffn"):
        out = _ffn(rms_norm(x, layer.ffn_norm, config.norm_epsilon), layer, ffn_kind, config)
    return x + _post_norm(out, layer.post_ffn_norm, config), cache


def view(inputs: StepInputs, positions: Array, valid: Array, kind: LayerKind, page_tokens: int) -> PoolView:
    """The pool of a layer kind as tokens at `positions` [seqs, step] see it."""
    if kind is LayerKind.FULL:
        return pool_view(inputs.full_table, jnp.zeros_like(inputs.starts), positions, valid, page_tokens)
    return pool_view(inputs.window_table, inputs.window_first, positions, valid, page_tokens)


def _page_tokens(cache: Cache, kind: LayerKind, config: ModelConfig) -> int:
    tokens: int = cache.layers[config.layer_kinds.index(kind)].keys.shape[1]
    return tokens


def _ffn(x: Array, layer: Layer, ffn_kind: FfnKind, config: ModelConfig) -> Array:
    if ffn_kind is FfnKind.DENSE:
        return dense_ffn(x, layer.ffn, config.activation)
    assert config.moe is not None  # ModelConfig checks it
    return moe_ffn(x, layer.ffn, config.moe, config.activation)


def _post_norm(x: Array, weight: Array | None, config: ModelConfig) -> Array:
    return x if weight is None else rms_norm(x, weight, config.norm_epsilon)
