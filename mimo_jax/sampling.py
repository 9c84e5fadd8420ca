"""Choosing the next token on the device.

Order: temperature, top_k, top_p over what top_k kept, min_p. The random key is a function of (seed, choice, position)
alone, so a request draws the same numbers whoever shares its batch. Ties go to the lower id.

Nothing is sorted: the smallest kept value of top_k and of top_p is found by bisection over the 32 bits of a float,
which takes 32 passes over a row and is exact. (A sort of 49,152 logits takes several milliseconds a row on a CPU.)
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from mimo_jax.inputs import SamplingInputs

TOP_LOGPROBS = 20  # alternatives reported at most
BANNED = 32  # ids a row can forbid at most
GREEDY_BELOW = 1e-5  # a lower temperature is greedy: dividing by it would overflow


@struct.dataclass
class Sampled:
    """`logprob` and the alternatives are of the model's own distribution, before temperature and any cut.

    Behind a step each array has [seqs, places], behind the scoring of a prompt [rows].
    """

    token: Array  # int32
    logprob: Array  # float32
    rank: Array  # int32, 1 is the most likely
    top_ids: Array  # [..., TOP_LOGPROBS] int32; zeros unless asked for
    top_logprobs: Array  # [..., TOP_LOGPROBS] float32


def sample(logits: Array, sampling: SamplingInputs, positions: Array, *, vocab: int) -> Sampled:
    """A token for each of a row's places, from float32 logits [seqs, places, vocab padded].

    positions [seqs, places] are those of the tokens to be chosen. Each place is drawn as if it were the only one, so
    the tokens are the same whether they come one a step or several. Returns Sampled of [seqs, places]. Ids from `vocab`
    on do not exist.
    """
    seqs, places = positions.shape
    banned = jnp.where(
        (jnp.arange(places) < sampling.banned_places[:, None])[:, :, None], sampling.banned[:, None], logits.shape[-1]
    )  # [seqs, places, BANNED]; "none" lies outside the row
    each = jax.tree.map(lambda leaf: jnp.repeat(leaf, places, axis=0) if leaf.ndim else leaf, sampling)
    sampled = _sample_rows(
        mask_padding(logits.reshape(seqs * places, -1), vocab),
        replace(each, banned=banned.reshape(seqs * places, -1)),
        positions.reshape(-1),
    )
    return jax.tree.map(lambda leaf: leaf.reshape(seqs, places, *leaf.shape[1:]), sampled)


def accept(tokens: Array, sampled: Array, counts: Array, sampling: SamplingInputs) -> tuple[Array, Array]:
    """How far a row's drafts are what was chosen in their place.

    tokens [seqs, step] are the row's tokens, of which `counts` are valid; sampled [seqs, places] are the choices behind
    its last given token, behind the first draft, and so on. Returns (accepted [seqs], the token [seqs] that follows
    the accepted ones). Nothing is accepted of a row whose next token is known.

        tokens   t d1 d2 d3      sampled  d1 d2 x y      accepted 2, then x
    """
    rows = jnp.arange(tokens.shape[0])
    draft_at = sampling.given[:, None] + jnp.arange(sampled.shape[1] - 1)  # [seqs, drafts]
    drafts = jnp.take_along_axis(tokens, jnp.minimum(draft_at, tokens.shape[1] - 1), axis=1)
    same = (drafts == sampled[:, :-1]) & (draft_at < counts[:, None])
    accepted = jnp.cumprod(same, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    known = sampling.following >= 0
    accepted = jnp.where(known, 0, accepted)
    return accepted, jnp.where(known, sampling.following, sampled[rows, accepted])


def _sample_rows(logits: Array, sampling: SamplingInputs, positions: Array) -> Sampled:
    rows = jnp.arange(logits.shape[0])[:, None]
    # Row ids that mean "none" lie outside the array and are dropped by name, never clamped.
    allowed = logits.at[rows, sampling.banned].set(-jnp.inf, mode="drop")
    greedy = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
    random_rows = sampling.temperature >= GREEDY_BELOW
    token = jax.lax.cond(
        random_rows.any(),
        lambda: jnp.where(random_rows, _draw(allowed, sampling, positions), greedy),
        lambda: greedy,
    )
    return describe(logits, token, sampling.top_logprobs)


def mask_padding(logits: Array, vocab: int) -> Array:
    """-inf for the ids from `vocab` on, which pad the head and are no tokens."""
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab, logits, -jnp.inf)


def describe(logits: Array, token: Array, want_top: Array) -> Sampled:
    """The log-probabilities that go with chosen tokens; logits [rows, vocab], token [rows]."""
    log_total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)
    rank = 1 + (logits > chosen).sum(axis=-1, dtype=jnp.int32)
    count = min(TOP_LOGPROBS, logits.shape[-1])

    def top() -> tuple[Array, Array]:
        values, ids = jax.lax.top_k(logits, count)
        return ids.astype(jnp.int32), values - log_total[:, None]

    def none() -> tuple[Array, Array]:
        shape = (logits.shape[0], count)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    top_ids, top_logprobs = jax.lax.cond(want_top, top, none)
    return Sampled(token, chosen[:, 0] - log_total, rank, top_ids, top_logprobs)


def _draw(logits: Array, sampling: SamplingInputs, positions: Array) -> Array:
    """One token a row from the cut distribution, by the Gumbel maximum."""
    kept = cut(logits, sampling)

    def noise(seed: Array, choice: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), choice), position)
        return jax.random.gumbel(key, logits.shape[-1:], jnp.float32)

    return jnp.argmax(kept + jax.vmap(noise)(sampling.seed, sampling.choice, positions), axis=-1).astype(jnp.int32)


def cut(logits: Array, sampling: SamplingInputs) -> Array:
    """Scaled logits [seqs, vocab] with -inf where top_k, top_p or min_p forbid."""
    temperature = jnp.where(sampling.temperature < GREEDY_BELOW, 1.0, sampling.temperature)[:, None]
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    vocab = logits.shape[-1]
    top_k = jnp.where(sampling.top_k <= 0, vocab, jnp.minimum(sampling.top_k, vocab)).astype(jnp.float32)

    def by_rank() -> Array:
        by_k = _keep_top(scaled, jnp.ones_like(scaled), top_k)
        weights = jnp.where(by_k, jnp.exp(scaled), 0.0)
        # Not quite zero, so that the most likely token stays under the smallest top_p.
        wanted = jnp.maximum(sampling.top_p * weights.sum(axis=-1), 1e-30)
        return by_k & _keep_top(scaled, weights, jnp.where(sampling.top_p >= 1.0, jnp.inf, wanted))

    cuts = ((sampling.top_k > 0) & (sampling.top_k < vocab)) | (sampling.top_p < 1.0)
    kept = jax.lax.cond(cuts.any(), by_rank, lambda: jnp.ones_like(scaled, bool))
    # exp(scaled) is a token's probability over the most likely one's.
    kept &= (jnp.exp(scaled) >= sampling.min_p[:, None]) | (scaled >= 0)
    return jnp.where(kept, scaled, -jnp.inf)


def _keep_top(values: Array, weights: Array, wanted: Array) -> Array:
    """The shortest run of largest values, ties in order of id, whose weights sum to `wanted` [seqs] or more.

    With unit weights this is top_k, with probabilities top_p.
    """
    ordered = _ordered_bits(values)

    def enough(threshold: Array) -> Array:
        return jnp.where(ordered >= threshold[:, None], weights, 0.0).sum(axis=-1) >= wanted

    # The largest threshold that still gathers enough is the smallest value kept. If all together are too few, all stay.
    threshold = _bisect(enough, values.shape[0])
    above = ordered > threshold[:, None]
    ties = ordered == threshold[:, None]
    missing = wanted - jnp.where(above, weights, 0.0).sum(axis=-1)
    before = jnp.cumsum(jnp.where(ties, weights, 0.0), axis=-1) - jnp.where(ties, weights, 0.0)
    return above | (ties & (before < missing[:, None]))


def _ordered_bits(values: Array) -> Array:
    """float32 -> uint32 in the same order."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _bisect(enough: Callable[[Array], Array], rows: int) -> Array:
    """The largest uint32 [rows] for which `enough` holds, bit by bit from the top; 0 if for none."""

    def one_bit(step: Array, found: Array) -> Array:
        candidate = found | (jnp.uint32(1) << (jnp.uint32(31) - step.astype(jnp.uint32)))
        return jnp.where(enough(candidate), candidate, found)

    return jax.lax.fori_loop(0, 32, one_bit, jnp.zeros(rows, jnp.uint32))
