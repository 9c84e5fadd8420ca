"""Multi-token prediction: draft heads that guess the tokens behind the next one.

A head is one decoder layer with keys and values of its own. Head j sees the embedding of a token at position p and the
trunk's hidden state 1 + j positions before it, and guesses the token at p + 1. With the trunk at "c" of "a b c" and
"d" chosen as the next token:

    head 0    at d: embedding of d, hidden state of c                    -> draft e
    head 1    at e: embedding of the draft e, hidden state of c          -> draft f
    head 2    at f: embedding of the draft f, hidden state of c          -> draft g

Everything a head stores belongs to the position of its token (not of its hidden state, as it is usually told; the
rotary angles differ by a constant, which drops out). So a page depends on no token behind it: pages can be shared like
the trunk's, and what was stored for a wrong draft is written anew with the token that came instead. Head j has nothing
at the first 1 + j positions.

Source: MiMo-V2-Flash technical report, section 2.3, as SGLang runs it (every head is fed the trunk's hidden state,
behind the final norm); llama.cpp chains the heads instead (`MtpDims.chained`).
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from mimo_jax.cache import Cache, LayerCache, PoolView, read_pages, write_pages
from mimo_jax.config import FfnKind, ModelConfig
from mimo_jax.inputs import StepInputs
from mimo_jax.layers import embed, rms_norm, unembed
from mimo_jax.model import view
from mimo_jax.params import MtpHead, Params
from mimo_jax.rope import rope_tables
from mimo_jax.weights import linear


def store_hidden(cache: Cache, inputs: StepInputs, hidden: Array, *, config: ModelConfig) -> Cache:
    """Keeps the trunk's hidden states [seqs, step, embed] of a step for its draft heads and those of later steps."""
    step = inputs.tokens.shape[1]
    positions = inputs.starts[:, None] + jnp.arange(step, dtype=jnp.int32)
    valid = jnp.arange(step) < inputs.counts[:, None]
    pages = write_pages(cache.hidden[0], _view(cache, inputs, positions, valid, config), hidden)
    return replace(cache, hidden=(pages, *cache.hidden[1:]))


def draft(
    params: Params,
    cache: Cache,
    inputs: StepInputs,
    counts: Array,
    following: Array,
    *,
    config: ModelConfig,
    vocab: int,
    run_layer: Callable[..., tuple[Array, LayerCache]],
) -> tuple[Array, Cache]:
    """Runs the draft heads behind a step whose hidden states are stored.

    Of the step's tokens the first `counts` [seqs] stand, and `following` [seqs] comes next. Each head runs at all new
    positions, the one of `following` included. Returns (drafts [seqs, heads], the tokens behind `following`; the cache
    with the heads' keys and values).
    """
    assert config.mtp is not None
    rows = jnp.arange(counts.shape[0])
    # New tokens from position starts + 1 on: the rest of the step's, `following` behind those that stand, then drafts.
    tokens = jnp.pad(inputs.tokens[:, 1:], ((0, 0), (0, config.mtp.heads)))
    tokens = tokens.at[rows, jnp.maximum(counts - 1, 0)].set(following)
    drafts: list[Array] = []
    for index, head in enumerate(params.mtp):
        with jax.named_scope(f"draft_head_{index}"):
            new = tokens[:, : inputs.tokens.shape[1] + index]
            x, cache = _run_head(index, head, new, cache, inputs, counts, params, config, run_layer)
            last = jnp.maximum(counts - 1, 0) + index
            logits = unembed(rms_norm(x[rows, last], head.final_norm, config.norm_epsilon), params)
            guess = jnp.argmax(jnp.where(jnp.arange(logits.shape[-1]) < vocab, logits, -jnp.inf), axis=-1)
        drafts.append(guess.astype(jnp.int32))
        if index + 1 < config.mtp.heads:
            tokens = tokens.at[rows, last + 1].set(drafts[-1])
    return jnp.stack(drafts, axis=1), cache


def _run_head(
    index: int,
    head: MtpHead,
    tokens: Array,
    cache: Cache,
    inputs: StepInputs,
    counts: Array,
    params: Params,
    config: ModelConfig,
    run_layer: Callable[..., tuple[Array, LayerCache]],
) -> tuple[Array, Cache]:
    """Head `index` at `tokens` [seqs, n], which stand from position starts + 1 on; the first counts + index of them are
    valid. Returns its states before the final norm [seqs, n, embed] and the cache."""
    mtp = config.mtp
    assert mtp is not None
    lag = 1 if mtp.chained else 1 + index  # how far behind its token's position the hidden state stands
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = inputs.starts[:, None] + 1 + place
    running = inputs.counts > 0
    valid = running[:, None] & (place < (counts + index)[:, None]) & (positions >= 1 + index)
    source = _view(cache, inputs, positions - lag, valid, config)
    hidden = read_pages(cache.hidden[index if mtp.chained else 0], source, valid)
    x = _combine(head, embed(tokens, params, config), hidden, positions, config)
    own = _view(cache, inputs, positions, valid, config)
    dims = config.dims(mtp.kind)
    x, layer_cache = run_layer(
        x,
        head.layer,
        cache.mtp[index],
        own,
        positions,
        jnp.where(running, inputs.starts + 1 + counts + index, 0),
        rope_tables(positions, dims),
        dims=dims,
        ffn_kind=FfnKind.DENSE,
        config=config,
        first_position=1 + index,
    )
    states = cache.hidden
    if mtp.chained and index + 1 < mtp.heads:
        states = (*states[: index + 1], write_pages(states[index + 1], own, x), *states[index + 2 :])
    return x, replace(cache, mtp=(*cache.mtp[:index], layer_cache, *cache.mtp[index + 1 :]), hidden=states)


def _combine(head: MtpHead, embedding: Array, hidden: Array, positions: Array, config: ModelConfig) -> Array:
    """projection of [norm(embedding); norm(hidden)], or of the two the other way round."""
    assert config.mtp is not None
    if config.mtp.zero_first_embedding:  # beside the hidden state of position 0 stands the token of position 1
        embedding = jnp.where((positions == 1)[:, :, None], 0, embedding)
    halves = [
        rms_norm(embedding, head.embed_norm, config.norm_epsilon),
        rms_norm(hidden, head.hidden_norm, config.norm_epsilon),
    ]
    if config.mtp.hidden_first:
        halves.reverse()
    return linear(jnp.concatenate(halves, axis=-1), head.projection)


def _view(cache: Cache, inputs: StepInputs, positions: Array, valid: Array, config: ModelConfig) -> PoolView:
    assert config.mtp is not None
    return view(inputs, positions, valid, config.mtp.kind, cache.hidden[0].shape[1])
