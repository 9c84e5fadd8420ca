"""Tiny random checkpoints in Hugging Face hub form, made with NumPy alone.

Each writer fills `folder` with `config.json` and safetensors under the published names, and returns the
folder. `overrides` replace config.json keys; every shape is derived from the config afterwards. A tensor
depends only on (seed, name, shape), so two layouts of one model hold the same numbers. Sizes are pairwise
different, so that a swapped axis cannot pass. There is no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny_dense import llama3_scaling, write_gemma3_text, write_llama, write_qwen2, write_qwen3
from tests.tiny_write import VOCAB_SIZE, Config, Draw, Tensors, attention, gated_mlp, trunk_ends, write

__all__ = [
    "VOCAB_SIZE",
    "Case",
    "cases",
    "llama3_scaling",
    "prompt",
    "write_gemma3_text",
    "write_llama",
    "write_mimo_v2",
    "write_mimo_v2_flash",
    "write_qwen2",
    "write_qwen3",
]


@dataclass(frozen=True)
class Case:
    """One named checkpoint of the reference suite."""

    name: str
    write: Callable[..., Path]
    seed: int
    overrides: Config = field(default_factory=dict)
    in_transformers: bool = True

    def into(self, folder: Path) -> Path:
        return self.write(folder, self.seed, **self.overrides)


def cases() -> tuple[Case, ...]:
    """Every checkpoint that has committed reference values, and those only the oracle can run."""
    return (
        Case("mimo_v2_flash", write_mimo_v2_flash, 1),
        Case("mimo_v2", write_mimo_v2, 2),
        Case("mimo_v2_pro", write_mimo_v2, 3, {"num_key_value_heads": 4}, in_transformers=False),
        Case("llama", write_llama, 4),
        Case(
            "llama_tied_scaled",
            write_llama,
            5,
            {"tie_word_embeddings": True, "rope_scaling": llama3_scaling()},
        ),
        Case("qwen2", write_qwen2, 6),
        Case("qwen3", write_qwen3, 7),
        Case("gemma3_text", write_gemma3_text, 8),
    )


def prompt(length: int = 50, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """The fixed token sequence of the reference suite; 50 tokens are more than four windows of 11."""
    return np.random.default_rng(2024).integers(0, vocab_size, length).tolist()


def write_mimo_v2_flash(folder: Path, seed: int, *, shards: int = 2, dtype: str = "float32", **overrides: Any) -> Path:
    """V2-Flash form: split q/k/v projections. Layers FWWFW, layer 0 dense, the others experts."""
    config = _mimo_config(overrides)
    return write(folder, config, _mimo_tensors(config, seed), shards, dtype)


def write_mimo_v2(folder: Path, seed: int, *, shards: int = 2, dtype: str = "float32", **overrides: Any) -> Path:
    """V2.5 form of the same trunk: one unquantised `qkv_proj` with rows [Q; K; V].

    `num_key_value_heads=4` gives the Pro form, where full and window layers have equally many KV heads.
    """
    published = {
        "architectures": ["MiMoV2ForCausalLM"],
        "model_type": "mimo_v2",
        "attention_projection_layout": "fused_qkv",
        "rope_theta": 10000000,
        "rope_scaling": {"rope_type": "default", "type": "default"},
        "transformers_version": "4.57.1",
    }
    config = _mimo_config(published | overrides)
    tensors = _mimo_tensors(config, seed)
    for layer in range(config["num_hidden_layers"]):
        attention = f"model.layers.{layer}.self_attn."
        rows = [tensors.pop(f"{attention}{part}_proj.weight") for part in "qkv"]
        tensors[f"{attention}qkv_proj.weight"] = np.concatenate(rows)
    return write(folder, config, tensors, shards, dtype)


def _mimo_config(overrides: Config) -> Config:
    pattern = overrides.get("hybrid_layer_pattern", [0, 1, 1, 0, 1])  # 0 = full, 1 = window
    return {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "hidden_size": 48,
        "num_hidden_layers": len(pattern),
        "hybrid_layer_pattern": pattern,
        "hybrid_block_size": None,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "swa_num_attention_heads": 12,
        "swa_num_key_value_heads": 4,
        "head_dim": 20,
        "swa_head_dim": 20,
        "v_head_dim": 14,
        "swa_v_head_dim": 14,
        "partial_rotary_factor": 0.334,  # int(20 * 0.334) = 6 rotary dims
        "rope_theta": 5000000,
        "swa_rope_theta": 10000,
        "rope_scaling": None,
        "sliding_window": 11,
        "sliding_window_size": overrides.get("sliding_window", 11),
        "attention_chunk_size": overrides.get("sliding_window", 11),
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "attention_value_scale": 0.534,  # sqrt(hidden / (heads * v dims)), rounded as the published ones are
        "attention_bias": False,
        "attention_dropout": 0.0,
        "intermediate_size": 60,
        "moe_intermediate_size": 26,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "n_shared_experts": None,
        "moe_layer_freq": [0] + [1] * (len(pattern) - 1),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": None,
        "hidden_act": "silu",
        "layernorm_epsilon": 1e-5,
        "vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
        "use_cache": True,
        "transformers_version": "4.40.1",
    } | overrides


def _mimo_tensors(config: Config, seed: int) -> Tensors:
    draw = Draw(seed, {})
    trunk_ends(draw, config)
    for layer, window in enumerate(config["hybrid_layer_pattern"]):
        name, kind = f"model.layers.{layer}.", "swa_" if window else ""
        heads, kv_heads = config[f"{kind}num_attention_heads"], config[f"{kind}num_key_value_heads"]
        head_dim, v_dim = config[f"{kind}head_dim"], config[f"{kind}v_head_dim"]
        draw.norm(name + "input_layernorm.weight", config["hidden_size"])
        draw.norm(name + "post_attention_layernorm.weight", config["hidden_size"])
        attention(draw, name, config["hidden_size"], heads, kv_heads, head_dim, v_dim)
        if window:
            draw.vector(name + "self_attn.attention_sink_bias", heads, spread=1.5, center=1.0)
        if config["moe_layer_freq"][layer]:
            _experts(draw, name + "mlp.", config)
        else:
            gated_mlp(draw, name + "mlp.", config["hidden_size"], config["intermediate_size"])
    return draw.tensors


def _experts(draw: Draw, name: str, config: Config) -> None:
    experts = config["n_routed_experts"]
    draw.linear(name + "gate.weight", experts, config["hidden_size"])
    draw.vector(name + "gate.e_score_correction_bias", experts, spread=0.3)
    for expert in range(experts):
        gated_mlp(draw, f"{name}experts.{expert}.", config["hidden_size"], config["moe_intermediate_size"])
