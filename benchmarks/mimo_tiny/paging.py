"""The simplest owner of pages: every text has the pages it needs for itself, one after the other, in both pools."""

import jax.numpy as jnp
from jax import Array

from mimo_jax.cache import Cache, PoolSizes, init_cache
from mimo_jax.config import ModelConfig
from mimo_jax.inputs import StepInputs

FULL_CHUNKS = 4  # full layers go through a text in so many parts; a part is a page


def fresh_cache(config: ModelConfig, seqs: int, step: int) -> Cache:
    """Window pages hold one window, and full pages a part of the text; `step` is a multiple of both."""
    full, window = page_tokens(config, step)
    return init_cache(config, PoolSizes(1 + seqs * step // full, 1 + seqs * step // window, full, window))


def page_tokens(config: ModelConfig, step: int) -> tuple[int, int]:
    """Of the full pool and of the window pool."""
    assert config.window is not None
    assert config.window.window_tokens is not None
    return step // FULL_CHUNKS, config.window.window_tokens


def whole_texts(tokens: Array, counts: Array, config: ModelConfig) -> StepInputs:
    """tokens [seqs, step] and their counts [seqs] as one prefill."""
    seqs, step = tokens.shape
    full, window = page_tokens(config, step)
    zeros = jnp.zeros((seqs,), jnp.int32)
    return StepInputs(tokens, zeros, counts, _table(seqs, step // full), _table(seqs, step // window), zeros)


def _table(seqs: int, pages: int) -> Array:
    return 1 + jnp.arange(seqs * pages, dtype=jnp.int32).reshape(seqs, pages)
