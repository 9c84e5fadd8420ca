"""One forward pass over a whole prompt, for tests that compare what was loaded."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mimo_jax import ModelConfig, Params, PoolSizes, StepInputs, forward, init_cache
from mimo_jax.layers import unembed

PAGE = 16


def logits(params: Params, config: ModelConfig, token_ids: Sequence[int]) -> np.ndarray:
    """[tokens, vocab] in float32."""
    return np.asarray(_logits(params, jnp.asarray([token_ids], jnp.int32), config=config))


@partial(jax.jit, static_argnames="config")
def _logits(params: Params, tokens: jax.Array, *, config: ModelConfig) -> jax.Array:
    pages = -(-tokens.shape[1] // PAGE)
    cache = init_cache(config, PoolSizes(1 + pages, 1 + pages, PAGE, PAGE), jnp.float32)
    table = 1 + jnp.arange(pages, dtype=jnp.int32)[None]
    zero = jnp.zeros(1, jnp.int32)
    inputs = StepInputs(
        tokens=tokens,
        starts=zero,
        counts=zero + tokens.shape[1],
        full_table=table,
        window_table=table,
        window_first=zero,
    )
    hidden, _ = forward(params, cache, inputs, config=config)
    return unembed(hidden[0], params)
