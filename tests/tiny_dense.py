"""Tiny random Llama, Qwen2, Qwen3 and Gemma 3 checkpoints; the contract is that of `tests/tiny.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny_write import VOCAB_SIZE, Config, Draw, attention, gated_mlp, trunk_ends, write


def llama3_scaling() -> Config:
    """Llama 3.1 style rotary scaling, with an original length short enough to touch a tiny head."""
    return {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    }


def write_llama(folder: Path, seed: int, *, shards: int = 1, dtype: str = "float32", **overrides: Any) -> Path:
    """Llama form. `tie_word_embeddings` and `rope_scaling` (see `llama3_scaling`) are overrides."""
    published = _dense_config("LlamaForCausalLM", "llama") | {
        "attention_bias": False,
        "head_dim": 14,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 500000.0,
    }
    return _write_dense(folder, seed, published | overrides, shards, dtype)


def write_qwen2(folder: Path, seed: int, *, shards: int = 1, dtype: str = "float32", **overrides: Any) -> Path:
    """Qwen2 form: biases on q, k and v; no `head_dim` key; the window is declared but switched off."""
    published = _dense_config("Qwen2ForCausalLM", "qwen2") | {
        "max_window_layers": 3,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 11,
        "use_sliding_window": False,
    }
    return _write_dense(folder, seed, published | overrides, shards, dtype, qkv_bias=True)


def write_qwen3(folder: Path, seed: int, *, shards: int = 1, dtype: str = "float32", **overrides: Any) -> Path:
    """Qwen3 form: q and k are normalised per head before the rotary embedding."""
    published = _dense_config("Qwen3ForCausalLM", "qwen3") | {
        "attention_bias": False,
        "head_dim": 14,
        "max_window_layers": 4,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    return _write_dense(folder, seed, published | overrides, shards, dtype, qk_norm=True)


def write_gemma3_text(
    folder: Path,
    seed: int,
    *,
    shards: int = 1,
    dtype: str = "float32",
    list_layers: bool = False,
    **overrides: Any,
) -> Path:
    """Gemma 3 text form, layers WWFWW, tied. Norm weights are stored around 0, because the model adds 1.

    The kinds of the layers are published in two ways: `sliding_window_pattern` or, with `list_layers`,
    `layer_types`.
    """
    config = _dense_config("Gemma3ForCausalLM", "gemma3_text") | {
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "head_dim": 14,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 5,
        "query_pre_attn_scalar": 9,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000,
        "sliding_window": 11,
        "sliding_window_pattern": 3,
    }
    del config["hidden_act"], config["tie_word_embeddings"]
    config |= overrides
    if list_layers:
        period = config.pop("sliding_window_pattern")
        kinds = [(layer + 1) % period == 0 for layer in range(config["num_hidden_layers"])]
        config["_sliding_window_pattern"] = period
        config["layer_types"] = ["full_attention" if full else "sliding_attention" for full in kinds]
        config["use_bidirectional_attention"] = False
    return _write_dense(folder, seed, config, shards, dtype, qk_norm=True, sandwich=True)


def _dense_config(architecture: str, model_type: str) -> Config:
    return {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 48,
        "initializer_range": 0.02,
        "intermediate_size": 60,
        "max_position_embeddings": 4096,
        "model_type": model_type,
        "num_attention_heads": 6,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.1",
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }


def _write_dense(
    folder: Path,
    seed: int,
    config: Config,
    shards: int,
    dtype: str,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    sandwich: bool = False,
) -> Path:
    """`sandwich` is Gemma's: norms before and after each half, all stored as weight - 1."""
    draw = Draw(seed, {}, norm_center=0.0 if sandwich else 1.0)
    hidden, heads, kv_heads = (
        config[f"{key}"] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    head_dim = config.get("head_dim", hidden // heads)
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if sandwich else []
    trunk_ends(draw, config)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        for norm in norms:
            draw.norm(f"{name}{norm}.weight", hidden)
        attention(draw, name, hidden, heads, kv_heads, head_dim, head_dim)
        for part, part_heads in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            if qkv_bias:
                draw.vector(f"{name}self_attn.{part}_proj.bias", part_heads * head_dim, spread=0.5)
            if qk_norm and part != "v":
                draw.norm(f"{name}self_attn.{part}_norm.weight", head_dim)
        gated_mlp(draw, name + "mlp.", hidden, config["intermediate_size"])
    return write(folder, config, draw.tensors, shards, dtype)
