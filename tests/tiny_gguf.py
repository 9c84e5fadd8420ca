"""A tiny MiMo-V2 folder as a GGUF file of llama.cpp's arch `mimo2`: trunk alone, float32, no vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

# Hub name behind "model.layers.N." -> GGUF name behind "blk.N.".
_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.qkv_proj.weight": "attn_qkv.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.attention_sink_bias": "attn_sinks.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_mimo2_gguf(folder: Path, target: Path) -> Path:
    """`folder` is what `tests.tiny.write_mimo_v2` or `write_mimo_v2_flash` wrote."""
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    writer = gguf.GGUFWriter(target, "mimo2")
    _add_keys(writer, config)
    for name, value in sorted(_renamed(config, tensors).items()):
        writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    windowed = [kind == 1 for kind in config["hybrid_layer_pattern"]]
    kv_heads = [config["swa_num_key_value_heads" if window else "num_key_value_heads"] for window in windowed]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["v_head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(windowed)
    writer.add_layer_norm_rms_eps(config["layernorm_epsilon"])
    writer.add_float32("mimo2.attention.value_scale", config["attention_value_scale"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_float32("mimo2.rope.freq_base_swa", config["swa_rope_theta"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def _renamed(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    named = {gguf_name: tensors[name] for name, gguf_name in _ENDS.items()}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, gguf_name in _LAYER_NAMES.items():
            if prefix + name in tensors:
                named[f"blk.{layer}.{gguf_name}"] = tensors[prefix + name]
        if config["moe_layer_freq"][layer]:
            for part in ("gate", "up", "down"):
                experts = range(config["n_routed_experts"])
                stacked = [tensors[f"{prefix}mlp.experts.{expert}.{part}_proj.weight"] for expert in experts]
                named[f"blk.{layer}.ffn_{part}_exps.weight"] = np.stack(stacked)
    return named
