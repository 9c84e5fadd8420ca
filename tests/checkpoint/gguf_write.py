"""Writes a tiny Hugging Face checkpoint as GGUF, the way llama.cpp's converter does, in any type that can be made."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
END_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(folder: Path, target: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """Matrices get `kind`, vectors stay float32."""
    config = json.loads((folder / "config.json").read_text())
    arch = config["model_type"].removesuffix("_text")
    writer = gguf.GGUFWriter(target, arch)
    write_config(writer, config, arch)
    for file in sorted(folder.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            values = converted(name, weight.astype(np.float32), config, arch)
            stored = gguf.quantize(values, kind) if values.ndim > 1 else values
            writer.add_tensor(gguf_name(name, arch), stored, raw_dtype=kind if values.ndim > 1 else None)
    scaling = config.get("rope_scaling")
    if scaling and scaling["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def write_config(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str) -> None:
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if arch == "llama":
        writer.add_rope_dimension_count(head_dim)
        writer.add_vocab_size(config["vocab_size"])
    if arch == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        if config["rope_scaling"]:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])


def gguf_name(name: str, arch: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in END_NAMES:
        return f"{END_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    names = GEMMA_NAMES if arch == "gemma3" else LAYER_NAMES
    return f"blk.{layer}.{names[part]}.{kind}"


def converted(name: str, weight: np.ndarray, config: dict[str, Any], arch: str) -> np.ndarray:
    """Llama's q and k change to neighbouring rotary pairs, Gemma's norms get their 1."""
    if arch == "gemma3" and name.endswith("norm.weight"):
        return weight + 1
    for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        if arch == "llama" and name.endswith(f"{part}_proj.weight"):
            halves = weight.reshape(config[heads], 2, -1, weight.shape[1])
            return halves.swapaxes(1, 2).reshape(weight.shape)
    return weight


def llama3_divisors(config: dict[str, Any]) -> np.ndarray:
    """What each rotary frequency is divided by: 1 for short waves, the factor for long ones, a ramp between."""
    scaling, head_dim = config["rope_scaling"], config["head_dim"]
    frequencies = config["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (kept + (1 - kept) / scaling["factor"])).astype(np.float32)
