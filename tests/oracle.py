"""The oracle: the whole model a second time, in NumPy and plain loops, with no cache, batch or page.

Written from the MiMo-V2 report and the published checkpoints, never from the product's code; it reads the hub
folder itself. Where speed and legibility disagree, legibility wins. Weights are [out, in]; `tokens` is the
length of the one sequence. Families: mimo_v2_flash, mimo_v2 (rows [Q; K; V]), llama, qwen2, qwen3 and
gemma3_text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray
Config = dict[str, Any]
Tensors = dict[str, Array]


@dataclass(frozen=True)
class Layer:
    """What distinguishes one layer's attention from another's."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    window: int | None  # keys a query sees, itself included; None = all
    frequencies: Array  # [rotary_dims / 2], radians per position
    query_scale: float
    value_scale: float = 1.0
    experts: bool = False


def oracle_log_probs(folder: Path, token_ids: Sequence[int]) -> Array:
    """[tokens, vocab]: row t is the natural-log distribution of token t + 1, in float64."""
    return log_probs(*read_checkpoint(folder), token_ids)


def read_checkpoint(folder: Path, precision: type = np.float64) -> tuple[Config, Tensors]:
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    config = json.loads((folder / "config.json").read_text())
    return config, {name: tensor.astype(precision) for name, tensor in tensors.items()}


def log_probs(config: Config, tensors: Tensors, token_ids: Sequence[int], last: int | None = None) -> Array:
    """As `oracle_log_probs`, in the precision of `tensors`. `last` keeps that many rows, to save the head."""
    hidden = embed(config, tensors, token_ids)  # [tokens, hidden]
    for layer in layers(config):
        hidden = hidden + attention_half(config, tensors, layer, hidden)
        hidden = hidden + feed_forward_half(config, tensors, layer, hidden)
    hidden = norm(config, hidden, tensors["model.norm.weight"])
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    logits = hidden[-(last or len(hidden)) :] @ head.T  # [tokens, vocab]
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


# ---- what the configuration says ----


def is_gemma(config: Config) -> bool:
    return config["model_type"] == "gemma3_text"


def layers(config: Config) -> list[Layer]:
    describe = mimo_layer if config["model_type"].startswith("mimo_v2") else dense_layer
    return [describe(config, index) for index in range(config["num_hidden_layers"])]


def mimo_layer(config: Config, index: int) -> Layer:
    windowed = config["hybrid_layer_pattern"][index] == 1
    kind = "swa_" if windowed else ""
    head_dim = config[kind + "head_dim"]
    rotary_dims = int(head_dim * config["partial_rotary_factor"])
    return Layer(
        name=f"model.layers.{index}.",
        heads=config[kind + "num_attention_heads"],
        kv_heads=config[kind + "num_key_value_heads"],
        head_dim=head_dim,
        v_dim=config[kind + "v_head_dim"],
        window=config["sliding_window"] if windowed else None,
        frequencies=rotary_frequencies(config[kind + "rope_theta"], rotary_dims),
        query_scale=head_dim**-0.5,
        value_scale=config["attention_value_scale"],
        experts=config["moe_layer_freq"][index] == 1,
    )


def dense_layer(config: Config, index: int) -> Layer:
    heads = config["num_attention_heads"]
    head_dim: int = config.get("head_dim") or config["hidden_size"] // heads
    windowed = is_gemma(config) and gemma_layer_is_windowed(config, index)
    theta = config["rope_local_base_freq"] if windowed else config["rope_theta"]
    scaling = None if windowed else config.get("rope_scaling")
    return Layer(
        name=f"model.layers.{index}.",
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        v_dim=head_dim,
        window=config["sliding_window"] if windowed else None,
        frequencies=scaled_frequencies(rotary_frequencies(theta, head_dim), scaling),
        query_scale=float(config.get("query_pre_attn_scalar", head_dim)) ** -0.5,
    )


def gemma_layer_is_windowed(config: Config, index: int) -> bool:
    if "layer_types" in config:
        return config["layer_types"][index] == "sliding_attention"
    return (index + 1) % config["sliding_window_pattern"] != 0


def rotary_frequencies(theta: float, rotary_dims: int) -> Array:
    """theta^(-2i / rotary_dims): the denominator is the number of *rotated* dims, not the head's."""
    return np.array([theta ** (-2 * pair / rotary_dims) for pair in range(rotary_dims // 2)])


def scaled_frequencies(frequencies: Array, scaling: Config | None) -> Array:
    if scaling is None or scaling["rope_type"] == "default":
        return frequencies
    if scaling["rope_type"] == "linear":
        return frequencies / scaling["factor"]
    assert scaling["rope_type"] == "llama3", scaling
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    scaled = []
    for frequency in frequencies:
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)  # 1: fast pairs keep their speed, 0: slow ones lose it
        scaled.append(frequency * (kept + (1 - kept) / scaling["factor"]))
    return np.array(scaled)


# ---- the forward pass ----


def embed(config: Config, tensors: Tensors, token_ids: Sequence[int]) -> Array:
    rows = tensors["model.embed_tokens.weight"][list(token_ids)]
    return rows * rows.dtype.type(math.sqrt(config["hidden_size"])) if is_gemma(config) else rows


def norm(config: Config, x: Array, weight: Array) -> Array:
    epsilon = config.get("layernorm_epsilon", config.get("rms_norm_eps"))
    gain = 1 + weight if is_gemma(config) else weight
    return gain * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon)


def attention_half(config: Config, tensors: Tensors, layer: Layer, hidden: Array) -> Array:
    name = layer.name + "self_attn."
    x = norm(config, hidden, tensors[layer.name + "input_layernorm.weight"])
    query, key, value = project(config, tensors, layer, x)
    sinks = tensors.get(name + "attention_sink_bias")  # [heads], window layers of MiMo-V2 only
    output = np.zeros((len(x), layer.heads * layer.v_dim), x.dtype)
    for head in range(layer.heads):
        kv_head = head // (layer.heads // layer.kv_heads)
        columns = slice(head * layer.v_dim, (head + 1) * layer.v_dim)
        for position in range(len(x)):
            keys = [p for p in range(len(x)) if window_visible(position, p, layer.window)]
            scores = key[keys, kv_head] @ query[position, head] * layer.query_scale
            weights = softmax_with_sink(scores, None if sinks is None else sinks[head])
            output[position, columns] = weights @ value[keys, kv_head]
    output = output @ tensors[name + "o_proj.weight"].T
    if is_gemma(config):
        output = norm(config, output, tensors[layer.name + "post_attention_layernorm.weight"])
    return output


def window_visible(query_position: int, key_position: int, window: int | None) -> bool:
    """The window counts the query itself: with window 3, position 5 sees 3, 4 and 5."""
    return key_position <= query_position and (window is None or key_position > query_position - window)


def softmax_with_sink(scores: Array, sink: float | None) -> Array:
    """The sink is one more column that takes weight and gives no value; it is not scaled."""
    top = scores.max() if sink is None else max(scores.max(), sink)
    weights = np.exp(scores - top)
    return weights / (weights.sum() + (0 if sink is None else np.exp(sink - top)))


def project(config: Config, tensors: Tensors, layer: Layer, x: Array) -> tuple[Array, Array, Array]:
    """[tokens, heads, head_dim] query, [tokens, kv_heads, head_dim] key, [tokens, kv_heads, v_dim] value."""
    name = layer.name + "self_attn."
    shapes = {"q": (layer.heads, layer.head_dim), "k": (layer.kv_heads, layer.head_dim)}
    shapes["v"] = (layer.kv_heads, layer.v_dim)
    fused, first_row, made = tensors.get(name + "qkv_proj.weight"), 0, []
    for part, (heads, size) in shapes.items():
        rows = slice(first_row, first_row + heads * size)
        first_row = rows.stop
        weight = tensors[f"{name}{part}_proj.weight"] if fused is None else fused[rows]
        flat = x @ weight.T + tensors.get(f"{name}{part}_proj.bias", 0)
        split = flat.reshape(len(x), heads, size)
        if f"{name}{part}_norm.weight" in tensors:
            split = norm(config, split, tensors[f"{name}{part}_norm.weight"])
        made.append(split if part == "v" else rotated(split, layer.frequencies))
    return made[0], made[1], made[2] * layer.value_scale


def rotated(x: Array, frequencies: Array) -> Array:
    """Turns the pairs (i, i + half) of every head by position * frequency; dims past the rotary ones stay."""
    half, turned = len(frequencies), x.copy()
    for position in range(len(x)):
        cos, sin = np.cos(position * frequencies), np.sin(position * frequencies)
        first, second = x[position, :, :half], x[position, :, half : 2 * half]
        turned[position, :, :half] = first * cos - second * sin
        turned[position, :, half : 2 * half] = second * cos + first * sin
    return turned


def feed_forward_half(config: Config, tensors: Tensors, layer: Layer, hidden: Array) -> Array:
    before = "pre_feedforward_layernorm" if is_gemma(config) else "post_attention_layernorm"
    x = norm(config, hidden, tensors[f"{layer.name}{before}.weight"])
    if layer.experts:
        return np.stack([mixture(config, tensors, layer.name + "mlp.", token) for token in x])
    output = gated_mlp(config, tensors, layer.name + "mlp.", x)
    if is_gemma(config):
        output = norm(config, output, tensors[layer.name + "post_feedforward_layernorm.weight"])
    return output


def mixture(config: Config, tensors: Tensors, name: str, token: Array) -> Array:
    """One token through its experts. `routed_scaling_factor` is null in the checkpoints, which means 1."""
    scores = 1 / (1 + np.exp(-(tensors[name + "gate.weight"] @ token)))
    weights = expert_weights(scores, tensors[name + "gate.e_score_correction_bias"], config["num_experts_per_tok"])
    output = np.zeros_like(token)
    for expert, weight in weights.items():
        output += weight * gated_mlp(config, tensors, f"{name}experts.{expert}.", token)
    return output * (config["routed_scaling_factor"] or 1.0)


def expert_weights(scores: Array, bias: Array, count: int) -> dict[int, float]:
    """The bias chooses and does not weigh: the weights are the chosen scores, made to sum to one."""
    chosen = np.argsort(-(scores + bias), kind="stable")[:count]
    total = scores[chosen].sum() + 1e-20
    return {int(expert): scores[expert] / total for expert in chosen}


def gated_mlp(config: Config, tensors: Tensors, name: str, x: Array) -> Array:
    gate = x @ tensors[name + "gate_proj.weight"].T
    if is_gemma(config):  # the tanh form of GELU
        active = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    else:
        active = gate / (1 + np.exp(-gate))
    return (active * (x @ tensors[name + "up_proj.weight"].T)) @ tensors[name + "down_proj.weight"].T
