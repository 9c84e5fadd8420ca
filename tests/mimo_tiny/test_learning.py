"""What learns is what runs: the training forms of layer and draft heads against the engine's and the oracle's."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from benchmarks.mimo_tiny import training_layer as forms
from benchmarks.mimo_tiny.acceptance import step_lengths, written_spans
from benchmarks.mimo_tiny.architecture import DRAFT_HEADS, hub_config, model_config
from benchmarks.mimo_tiny.heads import head_hidden
from benchmarks.mimo_tiny.hub_format import named
from benchmarks.mimo_tiny.learning import balanced, initial_params, losses, replace_biases, router_biases
from benchmarks.mimo_tiny.paging import fresh_cache, whole_texts
from benchmarks.mimo_tiny.training_layer import training_layer
from mimo_jax import forward
from mimo_jax.config import ModelConfig
from mimo_jax.params import Params
from tests import oracle_mtp
from tests.oracle import Tensors

SEQS, STEP = 2, 96  # three windows
COUNTS = jnp.array([96, 70])
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_experimental_ynn_fusion_type": ""}  # to compile, not to run


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    whole = model_config()
    kept = slice(3, 5)  # a window layer and a full one
    return replace(whole, layer_kinds=whole.layer_kinds[kept], ffn_kinds=whole.ffn_kinds[kept])


@pytest.fixture(scope="module")
def params(config: ModelConfig) -> Params:
    made = jax.jit(partial(initial_params, config=config), compiler_options=QUICK)(jax.random.key(3))
    biases = [jnp.linspace(-0.1, 0.1, bias.size) for bias in router_biases(made)]
    return replace_biases(made, biases)


@pytest.fixture(scope="module")
def tokens() -> Array:
    return jax.random.randint(jax.random.key(4), (SEQS, STEP), 0, 1000)


def hidden_of(params: Params, tokens: Array, config: ModelConfig, **options: Any) -> np.ndarray:
    cache, inputs = fresh_cache(config, *tokens.shape), whole_texts(tokens, COUNTS, config)
    run = jax.jit(partial(forward, config=config, **options), compiler_options=QUICK)
    hidden = run(params, cache, inputs)[0]
    return np.asarray(jnp.where(jnp.arange(STEP)[:, None] < COUNTS[:, None, None], hidden, 0))


def test_the_training_layer_is_the_engine_s_layer(
    config: ModelConfig, params: Params, tokens: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = hidden_of(params, tokens, config)
    monkeypatch.setattr(forms, "ROOM", 8.0)  # for every token, whatever the router says
    got = hidden_of(params, tokens, config, run_layer=training_layer([]))
    np.testing.assert_allclose(got, expected, atol=2e-5)  # float32 sums in another order
    monkeypatch.setattr(forms, "ROOM", 0.1)  # a control that must differ
    assert np.abs(hidden_of(params, tokens, config, run_layer=training_layer([])) - expected).max() > 0.1


def test_the_heads_that_learn_are_those_of_the_report(config: ModelConfig, params: Params, tokens: Array) -> None:
    hub = hub_config() | {
        "num_hidden_layers": config.layers,
        "hybrid_layer_pattern": [int(letter == "W") for letter in config.pattern],
        "moe_layer_freq": [1] * config.layers,
    }
    tensors: Tensors = {name: np.asarray(tensor, np.float64) for name, tensor in named(params).items()}
    ids = tokens[0].tolist()
    trunk = oracle_mtp.trunk_hidden(hub, tensors, ids)
    hidden = jnp.asarray(np.stack([trunk] * SEQS), jnp.float32)
    for index in range(DRAFT_HEADS):
        places = STEP - 1 - index
        states = oracle_mtp.head_states(hub, tensors, index, trunk[:places], ids)
        got = head_hidden(index, params, hidden, tokens, COUNTS, config)[0, :places]
        scale = np.sqrt((states**2).mean(axis=-1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(got, states / scale, atol=1e-4)


def test_no_gradient_reaches_a_router_bias(config: ModelConfig, params: Params, tokens: Array) -> None:
    ones = jnp.ones(tokens.shape)
    run = jax.jit(jax.grad(partial(losses, config=config), has_aux=True), compiler_options=QUICK)
    gradient, (reported, loads) = run(params, tokens, COUNTS, ones)
    assert not any(np.asarray(bias).any() for bias in router_biases(gradient))
    nothing = [jax.tree_util.keystr(path) for path, leaf in jax.tree.leaves_with_path(gradient) if not leaf.any()]
    assert all(name.endswith("router_bias") for name in nothing)
    assert reported.shape == (1 + DRAFT_HEADS,)
    assert np.abs(np.asarray(reported) - np.log(1024)).max() < 1  # it knows nothing yet
    assert loads.shape == (config.layers, 8)
    np.testing.assert_allclose(loads.sum(axis=1), 1, atol=1e-6)


def test_a_busy_expert_s_bias_goes_down(params: Params) -> None:
    loads = jnp.stack([jnp.array([0.3, 0.0, *[0.1] * 4, 0.15, 0.15])] * len(params.layers))
    before, after = router_biases(params)[0], router_biases(balanced(params, loads, jnp.float32(0.5)))[0]
    np.testing.assert_allclose(after - before, [-0.5, *[0.5] * 5, -0.5, -0.5], atol=1e-6)


def test_runs_of_written_tokens() -> None:
    weights = np.array([0, 0.1, 1, 1, 0.1, 1], np.float32)
    assert written_spans(weights) == [(2, 4), (5, 6)]


def test_accepted_lengths_on_a_text_worked_out_by_hand() -> None:
    text = np.arange(10)
    right = np.stack([text + 1, text + 2, text + 3, text + 4])  # the trunk's choices, then the heads'
    assert step_lengths(right, text, 2, 10) == [4, 3]
    second_wrong = right.copy()
    second_wrong[2] = 0
    assert step_lengths(second_wrong, text, 2, 10) == [2, 2, 2, 1]
    trunk_disagrees = right.copy()
    trunk_disagrees[0, 3] = trunk_disagrees[2, 1] = 99  # the draft for token 4 is what the trunk wants, the text is not
    assert step_lengths(trunk_disagrees, text, 2, 10) == [3, 4]
