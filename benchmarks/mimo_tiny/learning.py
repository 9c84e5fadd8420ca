"""One training step: losses of the trunk and of the draft heads, gradients, new parameters, balanced experts."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import struct
from jax import Array

from benchmarks.mimo_tiny.heads import head_hidden
from benchmarks.mimo_tiny.paging import fresh_cache, whole_texts
from benchmarks.mimo_tiny.training_layer import training_layer
from mimo_jax import forward, init_params
from mimo_jax.config import ModelConfig
from mimo_jax.layers import unembed
from mimo_jax.params import Moe, Params

HEAD_WEIGHT = 0.3  # of each draft head's loss beside the trunk's
ADAM_SHARE = 0.5  # of the learning rate, for what Muon does not learn
BALANCE_STEP = 0.01  # by which a router bias moves at the highest learning rate


@struct.dataclass
class State:
    params: Params
    optimizer: Any


def initial_params(key: Array, config: ModelConfig) -> Params:
    """Random, with router biases of zero."""
    params = init_params(key, config)
    return replace_biases(params, [jnp.zeros_like(bias) for bias in router_biases(params)])


def router_biases(params: Params) -> list[Array]:
    """[experts] of each mixture."""
    return [layer.ffn.router_bias for layer in params.layers if isinstance(layer.ffn, Moe)]


def replace_biases(params: Params, biases: Iterable[Array]) -> Params:
    left = iter(biases)
    layers = tuple(
        replace(layer, ffn=replace(layer.ffn, router_bias=next(left))) if isinstance(layer.ffn, Moe) else layer
        for layer in params.layers
    )
    return replace(params, layers=layers)


def losses(
    params: Params, tokens: Array, counts: Array, values: Array, *, config: ModelConfig
) -> tuple[Array, tuple[Array, Array]]:
    """(what is minimised, (mean losses in nats of trunk and heads where the assistant writes, loads)).

    tokens and values [seqs, step] as in `Batch`; loads [mixtures, experts].
    """
    loads: list[Array] = []
    cache, inputs = fresh_cache(config, *tokens.shape), whole_texts(tokens, counts, config)
    hidden, _ = forward(params, cache, inputs, config=config, run_layer=training_layer(loads))
    written = jnp.where(values == 1.0, 1.0, 0.0)
    surprise = _surprise(hidden[:, :-1], params, tokens[:, 1:])
    total = _mean(surprise, values[:, 1:])
    reported = [_mean(surprise, written[:, 1:])]
    some = slice(0, -(-tokens.shape[0] // 2))  # the heads learn from every second text: they cost as much as the trunk
    for index in range(len(params.mtp)):
        drafted = head_hidden(index, params, hidden[some], tokens[some], counts[some], config)
        surprise = _surprise(drafted[:, : -2 - index], params, tokens[some, 2 + index :])
        reported.append(_mean(surprise, written[some, 2 + index :]))
        total = total + HEAD_WEIGHT * reported[-1]
    return total, (jnp.stack(reported), jnp.stack(loads))


def make_optimizer(rate: float, steps: int) -> optax.GradientTransformation:
    """Muon for the matrices inside the layers, Adam for everything else, behind a gradient norm of at most 1."""
    schedule = learning_rate(rate, steps)
    muon = optax.contrib.muon(
        schedule,
        consistent_rms=0.2,  # updates of the size of Adam's, so that one rate does for both
        weight_decay=0.05,
        adam_b2=0.95,
        adam_learning_rate=lambda step: ADAM_SHARE * schedule(step),
        muon_weight_dimension_numbers=_matrix_axes,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def _matrix_axes(params: Params) -> Params:
    """[.., out, in] for what Muon learns, None for the rest."""
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)

    def of(path: Any, array: Array) -> Any:
        inside = path[0].name in ("layers", "mtp") and path[-1].name != "router"
        return axes if inside and array.ndim > 1 else None

    return jax.tree_util.tree_map_with_path(of, params)


def learning_rate(rate: float, steps: int) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 20), steps, 0.02 * rate)


def train_step(
    state: State,
    tokens: Array,
    counts: Array,
    values: Array,
    balance: Array,
    *,
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
) -> tuple[State, Array, Array]:
    """(the state afterwards, losses [1 + heads], the busiest expert's load over the mean one). To be jitted."""
    gradient, (reported, loads) = jax.grad(losses, has_aux=True)(state.params, tokens, counts, values, config=config)
    updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
    params = balanced(optax.apply_updates(state.params, updates), loads, balance)
    return State(params, optimizer_state), reported, loads.max() * loads.shape[1]


def balanced(params: Params, loads: Array, step: Array) -> Params:
    """Moves each router bias by `step` towards equal loads [mixtures, experts]. No gradient ever reaches the biases."""
    moved = loads.mean(axis=1, keepdims=True) - loads
    return replace_biases(
        params, [bias + step * jnp.sign(way) for bias, way in zip(router_biases(params), moved, strict=True)]
    )


def _surprise(hidden: Array, params: Params, targets: Array) -> Array:
    """-log p of targets [seqs, step], float32."""
    logits = unembed(hidden, params)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def _mean(values: Array, weights: Array) -> Array:
    return (values * weights).sum() / jnp.maximum(weights.sum(), 1.0)
