"""Generation as one pure function on arrays: no engine, no host loop. The file to read after model.py.

It shows how pages work with the simplest owner there is: sequence s owns one contiguous run of pages in both pools
for good.
"""

import jax
import jax.numpy as jnp
from jax import Array

from mimo_jax.cache import Cache, PoolSizes, first_window_page, init_cache
from mimo_jax.config import ModelConfig
from mimo_jax.inputs import StepInputs
from mimo_jax.layers import unembed
from mimo_jax.model import forward
from mimo_jax.params import Params
from mimo_jax.window_pages import window_table_pages

_PAGE_TOKENS = 16


def generate(
    params: Params,
    prompts: Array,
    *,
    config: ModelConfig,
    max_tokens: int,
    temperature: float = 0.0,
    key: Array | None = None,
) -> Array:
    """Continues prompts [seqs, length] int32 -> [seqs, max_tokens] int32. Pure: jit it with config and max_tokens
    static.

    Greedy at temperature 0; else `key` is needed. Nothing ends a sequence early.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}; at least 1 is needed")
    if temperature < 0:
        raise ValueError(f"temperature={temperature}; 0 or more is needed")
    if temperature > 0 and key is None:
        raise ValueError(f"temperature={temperature} needs a key")
    seqs, length = prompts.shape
    pages = -(-(length + max_tokens) // _PAGE_TOKENS)  # of one sequence
    cache = init_cache(
        config, PoolSizes(1 + seqs * pages, 1 + seqs * pages, _PAGE_TOKENS, _PAGE_TOKENS), params.embedding.dtype
    )
    table = 1 + jnp.arange(seqs * pages, dtype=jnp.int32).reshape(seqs, pages)  # page 0 is the null page

    def choose(hidden: Array, position: Array) -> Array:
        logits = unembed(hidden, params)
        if temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        assert key is not None
        return jax.random.categorical(jax.random.fold_in(key, position), logits / temperature).astype(jnp.int32)

    def one_token(carry: tuple[Cache, Array, Array], _: None) -> tuple[tuple[Cache, Array, Array], Array]:
        cache, token, position = carry
        inputs = _inputs(token[:, None], position, table, config)
        hidden, cache = forward(params, cache, inputs, config=config)
        following = choose(hidden[:, 0], position + 1)
        return (cache, following, position + 1), following

    hidden, cache = forward(params, cache, _inputs(prompts, jnp.int32(0), table, config), config=config)
    first = choose(hidden[:, -1], jnp.int32(length))
    carry = (cache, first, jnp.int32(length))
    _, rest = jax.lax.scan(one_token, carry, length=max_tokens - 1)
    return jnp.concatenate([first[None], rest]).T


def _inputs(tokens: Array, start: Array, table: Array, config: ModelConfig) -> StepInputs:
    """All rows stand at the same position and use all of their tokens."""
    seqs, step = tokens.shape
    window_table, window_first = table, jnp.int32(0)
    if config.window is not None and config.window.window_tokens is not None:
        window = config.window.window_tokens
        width = min(window_table_pages(window, step, _PAGE_TOKENS), table.shape[1])
        # Past the end of the table the slice would be moved back by itself; then it has to say so.
        window_first = jnp.minimum(first_window_page(start, window, _PAGE_TOKENS), table.shape[1] - width)
        window_table = jax.lax.dynamic_slice_in_dim(table, window_first, width, axis=1)
    return StepInputs(
        tokens=tokens.astype(jnp.int32),
        starts=jnp.full((seqs,), start, jnp.int32),
        counts=jnp.full((seqs,), step, jnp.int32),
        full_table=table,
        window_table=window_table,
        window_first=jnp.full((seqs,), window_first, jnp.int32),
    )
