"""The draft heads against an independent forward pass, in steps of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.cache import Cache, PoolSizes, first_window_page, init_cache
from mimo_jax.config import FfnKind, LayerKind, ModelConfig, MtpDims, tiny_config
from mimo_jax.inputs import SamplingInputs, StepInputs
from mimo_jax.params import Layer, Params, init_params
from mimo_jax.sampling import BANNED
from mimo_jax.steps import StepOutputs, step
from mimo_jax.window_pages import window_table_pages
from tests import oracle_mtp
from tests.oracle import Tensors

PAGE, PAGES, HEADS = 4, 24, 3
CHUNK = 16  # prompts come in steps of this many tokens: every size would be a program to compile
TOKENS = np.random.default_rng(7).integers(0, 101, 45).tolist()  # four windows of 11


run_step = jax.jit(step, static_argnames=("config", "vocab"))


def mtp_config(**mtp: Any) -> ModelConfig:
    """A trunk of a full layer and two window layers, as small as it can be."""
    config = tiny_config()
    return replace(
        config, layer_kinds=config.layer_kinds[:3], ffn_kinds=config.ffn_kinds[:3], mtp=MtpDims(heads=HEADS, **mtp)
    )


@pytest.fixture(scope="module")
def params() -> Params:
    made = init_params(jax.random.key(5), mtp_config())
    # Random norms too: a norm of ones hides a missing or a doubled one.
    norms = iter(range(10_000))

    def shaken(leaf: jax.Array) -> jax.Array:
        if leaf.ndim > 1:
            return leaf
        return leaf * jnp.exp(0.3 * jax.random.normal(jax.random.key(next(norms)), leaf.shape))

    return jax.tree.map(shaken, made)


class Sequence1:
    """One sequence in steps of any size, on pages in a shuffled order."""

    def __init__(self, params: Params, config: ModelConfig) -> None:
        self.params, self.config = params, config
        sizes = PoolSizes(PAGES, PAGES, PAGE, PAGE)
        nan = partial(jnp.full_like, fill_value=jnp.nan)  # of what nobody wrote
        self.cache: Cache = jax.tree.map(nan, init_cache(config, sizes))
        self.table = 1 + np.random.default_rng(1).permutation(PAGES - 1).astype(np.int32)
        self.start = 0

    def prompt(self, end: int) -> StepOutputs:
        """Runs the tokens of TOKENS up to `end` that have not been run."""
        while True:
            part = TOKENS[self.start : min(self.start + CHUNK, end)]
            outputs = self.step(part, given=len(part), following=TOKENS[self.start + len(part)])
            if self.start == end:
                return outputs

    def step(self, tokens: Sequence[int], *, given: int, following: int = -1) -> StepOutputs:
        """Runs tokens, the first `given` of which are known."""
        width = next(width for width in (1, 1 + HEADS, CHUNK, len(TOKENS)) if width >= len(tokens))
        row = np.zeros(width, np.int32)
        row[: len(tokens)] = tokens
        window = self.config.window
        assert window is not None
        assert window.window_tokens is not None
        pages = window_table_pages(window.window_tokens, width + HEADS, PAGE)
        first = int(first_window_page(self.start, window.window_tokens, PAGE))
        # A row of padding beside it, which must change nothing.
        inputs = StepInputs(
            tokens=np.stack([row, np.zeros_like(row)]),
            starts=np.array([self.start, 0], np.int32),
            counts=np.array([len(tokens), 0], np.int32),
            full_table=np.stack([self.table, np.zeros_like(self.table)]),
            window_table=np.stack([np.resize(self.table[first : first + pages], pages), np.zeros(pages, np.int32)]),
            window_first=np.array([first, 0], np.int32),
        )
        outputs, self.cache = run_step(
            self.params, self.cache, inputs, greedy(given, following), config=self.config, vocab=self.config.vocab
        )
        self.start += given + int(outputs.accepted[0])
        return outputs


def greedy(given: int, following: int) -> SamplingInputs:
    def column(value: float, dtype: Any) -> np.ndarray:
        return np.array([value, 0], dtype)

    return SamplingInputs(
        given=column(given, np.int32),
        following=column(following, np.int32),
        temperature=column(0, np.float32),
        top_k=column(0, np.int32),
        top_p=np.ones(2, np.float32),
        min_p=column(0, np.float32),
        seed=column(0, np.uint32),
        choice=column(0, np.int32),
        banned=np.full((2, BANNED), 101, np.int32),
        banned_places=column(0, np.int32),
        top_logprobs=np.bool_(False),
    )


def oracle_config(config: ModelConfig) -> dict[str, Any]:
    assert config.full is not None
    assert config.window is not None
    assert config.moe is not None
    values: dict[str, Any] = {
        "model_type": "mimo_v2",
        "num_hidden_layers": config.layers,
        "hybrid_layer_pattern": [int(kind is LayerKind.WINDOW) for kind in config.layer_kinds],
        "moe_layer_freq": [int(kind is FfnKind.MOE) for kind in config.ffn_kinds],
        "sliding_window": config.window.window_tokens,
        "attention_value_scale": config.full.value_scale,
        "partial_rotary_factor": 0.334,
        "layernorm_epsilon": config.norm_epsilon,
        "num_experts_per_tok": config.moe.experts_per_token,
        "routed_scaling_factor": None,
    }
    for prefix, dims in (("", config.full), ("swa_", config.window)):
        values |= {
            prefix + "num_attention_heads": dims.heads,
            prefix + "num_key_value_heads": dims.kv_heads,
            prefix + "head_dim": dims.head_dim,
            prefix + "v_head_dim": dims.v_dim,
            prefix + "rope_theta": dims.rope_theta,
        }
        assert int(dims.head_dim * 0.334) == dims.rotary_dims
    return values


def published(params: Params, config: ModelConfig) -> Tensors:
    """The parameters under their published names."""
    named: dict[str, Any] = {
        "model.embed_tokens.weight": params.embedding,
        "model.norm.weight": params.final_norm,
        "lm_head.weight": params.head,
    }
    for index, layer in enumerate(params.layers):
        named |= layer_names(f"model.layers.{index}.", layer, "post_attention_layernorm")
    for index, head in enumerate(params.mtp):
        name = f"model.mtp.layers.{index}."
        named |= layer_names(name, head.layer, "pre_mlp_layernorm")
        named |= {name + "enorm.weight": head.embed_norm, name + "hnorm.weight": head.hidden_norm}
        named |= {name + "eh_proj.weight": head.projection, name + "final_layernorm.weight": head.final_norm}
    return {name: np.asarray(value, np.float64) for name, value in named.items() if value is not None}


def layer_names(name: str, layer: Layer, ffn_norm: str) -> dict[str, Any]:
    attention, ffn = layer.attention, layer.ffn
    named = {
        f"{name}input_layernorm.weight": layer.attention_norm,
        f"{name}{ffn_norm}.weight": layer.ffn_norm,
        f"{name}self_attn.q_proj.weight": attention.query,
        f"{name}self_attn.k_proj.weight": attention.key,
        f"{name}self_attn.v_proj.weight": attention.value,
        f"{name}self_attn.o_proj.weight": attention.output,
        f"{name}self_attn.attention_sink_bias": attention.sink,
    }
    if hasattr(ffn, "router"):
        named |= {f"{name}mlp.gate.weight": ffn.router, f"{name}mlp.gate.e_score_correction_bias": ffn.router_bias}
        for expert in range(ffn.router.shape[0]):
            for part in ("gate", "up", "down"):
                named[f"{name}mlp.experts.{expert}.{part}_proj.weight"] = getattr(ffn, part)[expert]
        return named
    return named | {f"{name}mlp.{part}_proj.weight": getattr(ffn, part) for part in ("gate", "up", "down")}


def expected(params: Params, config: ModelConfig, tokens: Sequence[int]) -> list[int]:
    assert config.mtp is not None
    guesses, leads = oracle_mtp.drafts(
        oracle_config(config),
        published(params, config),
        tokens,
        config.mtp.heads,
        chained=config.mtp.chained,
        normed=config.mtp.normed_hidden,
    )
    assert min(leads) > 1e-4, "float32 cannot be held to a tie"
    return guesses


READINGS: dict[str, dict[str, Any]] = {
    "the report's": {},
    "llama.cpp's": {"chained": True, "normed_hidden": False},
    "chained": {"chained": True},
}
# All at once, chunks around the window, and single tokens.
CUTS = [[44], [11, 10, 12, 11], [1] * 44, [16, 14, 1, 1, 5, 7]]


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_drafts_equal_the_oracles_however_the_tokens_came(params: Params, reading: str, cuts: list[int]) -> None:
    config = mtp_config(**READINGS[reading])
    sequence = Sequence1(params, config)
    for count in cuts:
        end = sequence.start + count
        outputs = sequence.step(TOKENS[sequence.start : end], given=count, following=TOKENS[end])
        if count > 1 or end in (1, 2, 3, 12, 44):
            assert outputs.drafts[0].tolist() == expected(params, config, TOKENS[: end + 1])


@pytest.mark.parametrize("reading", READINGS)
def test_drafts_equal_the_oracles_behind_accepted_and_rejected_ones(params: Params, reading: str) -> None:
    """What a wrong draft left in the cache is written anew with the token that came instead."""
    config = mtp_config(**READINGS[reading])
    sequence = Sequence1(params, config)
    sequence.prompt(16)
    outputs = sequence.step(TOKENS[16:20], given=4)
    tokens = [*TOKENS[:20], int(outputs.sampled.token[0, 0])]
    assert outputs.drafts[0].tolist() == expected(params, config, tokens)
    for right in (0, 3, 1, 2, 0, 0, 3, 3, 1):
        # The true continuation, cut off by a wrong draft.
        ahead = continuation(params, config, tokens, right)
        wrong = (ahead[right] + 1) % config.vocab
        guesses = (ahead[:right] + [wrong] * HEADS)[:HEADS]
        outputs = sequence.step([tokens[-1], *guesses], given=1)
        assert int(outputs.accepted[0]) == right
        tokens += outputs.sampled.token[0, : right + 1].tolist()
        assert outputs.drafts[0].tolist() == expected(params, config, tokens)


def continuation(params: Params, config: ModelConfig, tokens: list[int], count: int) -> list[int]:
    """Greedy, count + 1 tokens, each from a pass of its own over everything."""
    tokens = list(tokens)
    named, values = published(params, config), oracle_config(config)
    for _ in range(count + 1):
        hidden = oracle_mtp.trunk_hidden(values, named, tokens)[-1]
        tokens.append(int((named["lm_head.weight"] @ hidden).argmax()))
    return tokens[-count - 1 :]


@pytest.mark.parametrize("change", ["heads swapped", "one head twice", "halves swapped", "norm left out"])
def test_a_mistake_shows(params: Params, change: str) -> None:
    """Negative controls: each of these must give other drafts somewhere."""
    config, wrong = mtp_config(), params
    first, second, third = params.mtp
    if change == "heads swapped":
        wrong = params.replace(mtp=(second, first, third))
    elif change == "one head twice":
        wrong = params.replace(mtp=(first, first, third))
    elif change == "halves swapped":
        config = mtp_config(hidden_first=True)
    else:
        config = mtp_config(normed_hidden=False)
    sequence, right = Sequence1(wrong, config), mtp_config()
    same = []
    for end in (16, 30, 44):
        outputs = sequence.prompt(end)
        same.append(outputs.drafts[0].tolist() == expected(params, right, TOKENS[: end + 1]))
    assert not all(same)


def test_an_embedding_of_zeros_beside_the_first_position(params: Params) -> None:
    """MiMo-7B: the token at position 1 does not matter to the head's first entry, later ones do."""
    config = mtp_config(zero_first_embedding=True)
    plain = mtp_config()

    def keys(config: ModelConfig, second: int) -> np.ndarray:
        sequence = Sequence1(params, config)
        sequence.step([TOKENS[0], second, *TOKENS[2:8]], given=8, following=TOKENS[8])
        return np.asarray(sequence.cache.mtp[0].keys)[sequence.table[0], 1]

    assert not np.array_equal(keys(plain, 3), keys(plain, 4))
    # Position 0 is the same and its hidden state is all that is left.
    assert np.array_equal(keys(config, 3), keys(config, 4))
