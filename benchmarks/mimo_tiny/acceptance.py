"""How many tokens a step of speculative decoding would yield, estimated from texts without running it."""

from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.mimo_tiny.batches import Batch
from benchmarks.mimo_tiny.heads import head_hidden
from benchmarks.mimo_tiny.paging import fresh_cache, whole_texts
from mimo_jax import forward
from mimo_jax.config import ModelConfig
from mimo_jax.layers import unembed
from mimo_jax.params import Params


@partial(jax.jit, static_argnames="config")
def choices(params: Params, tokens: Array, counts: Array, *, config: ModelConfig) -> Array:
    """[1 + heads, seqs, step]: at place p the trunk's greedy choice for p + 1, then head j's for p + 2 + j."""
    cache, inputs = fresh_cache(config, *tokens.shape), whole_texts(tokens, counts, config)
    hidden, _ = forward(params, cache, inputs, config=config)
    rows = [hidden]
    for index in range(len(params.mtp)):
        rows.append(head_hidden(index, params, hidden, tokens, counts, config))
    return jnp.argmax(unembed(jnp.stack(rows), params), axis=-1)


def mean_accepted_length(params: Params, texts: Iterable[Batch], config: ModelConfig) -> float:
    """Tokens a step, 1 to 1 + heads, over everything that the assistant writes in these texts.

    A draft counts while it is what the trunk itself would choose. Where that is not what the text says, the step ends
    and the next one starts from the text again. A step yields nothing behind the end of the assistant's turn.
    """
    steps = tokens = 0
    for batch in texts:
        chosen = np.asarray(choices(params, batch.tokens, batch.counts, config=config))
        for row in range(batch.tokens.shape[0]):
            for first, end in written_spans(batch.weights[row]):
                lengths = step_lengths(chosen[:, row], batch.tokens[row], first, end)
                steps, tokens = steps + len(lengths), tokens + sum(lengths)
    return tokens / max(steps, 1)


def written_spans(weights: np.ndarray) -> list[tuple[int, int]]:
    """[first, end) of each run of tokens that the assistant writes."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], weights == 1.0, [0]]).astype(np.int8)))
    return [(int(first), int(end)) for first, end in zip(edges[::2], edges[1::2], strict=True)]


def step_lengths(chosen: np.ndarray, text: np.ndarray, first: int, end: int) -> list[int]:
    """Token `first` comes from the prompt; every later one from a step."""
    lengths, last = [], first
    while last < end - 1:
        accepted = 0
        while accepted < len(chosen) - 1 and last + 1 + accepted < end - 1:
            wanted = chosen[0, last + accepted]
            if chosen[1 + accepted, last - 1] != wanted:
                break
            accepted += 1
            if wanted != text[last + accepted]:
                break
        lengths.append(accepted + 1)
        last += accepted + 1
    return lengths
