"""The draft heads while they learn: all positions of a text at once.

Head j stands at place t for token t + 1 + j: it reads that token's embedding and the trunk's hidden state of place t,
attends over the places before it and predicts token t + 2 + j. The same as `mimo_jax.mtp`, which counts by the token's
position, 1 + j behind the place; here no key has to be hidden, and head j's text is 1 + j shorter.
"""

import jax.numpy as jnp
from jax import Array

from benchmarks.mimo_tiny.paging import fresh_cache, page_tokens, whole_texts
from benchmarks.mimo_tiny.training_layer import training_layer
from mimo_jax.cache import pool_view
from mimo_jax.config import FfnKind, ModelConfig
from mimo_jax.layers import embed, rms_norm
from mimo_jax.params import Params
from mimo_jax.rope import rope_tables
from mimo_jax.weights import linear


def head_hidden(index: int, params: Params, hidden: Array, tokens: Array, counts: Array, config: ModelConfig) -> Array:
    """hidden [seqs, step, embed] of the trunk -> the same shape, ready for the trunk's lm_head.

    The last 1 + index places have no token to read and mean nothing.
    """
    assert config.mtp is not None
    head, dims = params.mtp[index], config.dims(config.mtp.kind)
    seqs, step = tokens.shape
    tokens = jnp.pad(tokens[:, 1 + index :], ((0, 0), (0, 1 + index)))
    inputs = whole_texts(tokens, jnp.maximum(counts - 1 - index, 0), config)
    positions = jnp.broadcast_to(jnp.arange(step, dtype=jnp.int32), (seqs, step))
    view = pool_view(
        inputs.window_table,
        inputs.window_first,
        positions,
        positions < inputs.counts[:, None],
        page_tokens(config, step)[1],
    )
    embedded = rms_norm(embed(tokens, params, config), head.embed_norm, config.norm_epsilon)
    states = rms_norm(hidden, head.hidden_norm, config.norm_epsilon)
    x, _ = training_layer([])(
        linear(jnp.concatenate([embedded, states], axis=-1), head.projection),
        head.layer,
        fresh_cache(config, seqs, step).mtp[index],
        view,
        positions,
        inputs.counts,
        rope_tables(positions, dims),
        dims=dims,
        ffn_kind=FfnKind.DENSE,
        config=config,
    )
    return rms_norm(x, head.final_norm, config.norm_epsilon)
