"""Writes what was learned as a model folder with the names of a published MiMo-V2.5 checkpoint."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file

from benchmarks.mimo_tiny.architecture import CONTEXT_TOKENS, hub_config
from benchmarks.mimo_tiny.tokenizer import write_tokenizer
from mimo_jax.params import Attention, Dense, Layer, Moe, MtpHead, Params

Tensors = dict[str, Any]
_FLOAT32 = (".mlp.gate.weight", ".e_score_correction_bias")  # the published router stays in float32


def write_checkpoint(folder: Path, params: Params, backend: tokenizers.Tokenizer) -> None:
    """config.json, generation_config.json, model.safetensors and the tokenizer's files. Nothing else is touched."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, backend)
    end, pad = backend.token_to_id("<|im_end|>"), backend.token_to_id("<|endoftext|>")
    _write_json(folder / "config.json", hub_config() | {"eos_token_id": end, "pad_token_id": pad})
    generation = {"eos_token_id": [end, pad], "pad_token_id": pad, "max_length": CONTEXT_TOKENS}
    _write_json(folder / "generation_config.json", generation | {"do_sample": True, "temperature": 1.0, "top_p": 0.95})
    path = folder / "model.safetensors"
    save_file(stored(named(params)), path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library makes it readable to its owner alone


def stored(tensors: Tensors) -> dict[str, np.ndarray]:
    """In the dtypes of the file, rounded to nearest."""
    return {
        name: np.ascontiguousarray(np.asarray(tensor, np.float32 if name.endswith(_FLOAT32) else ml_dtypes.bfloat16))
        for name, tensor in tensors.items()
    }


def named(params: Params) -> Tensors:
    """Every array under its published name."""
    tensors = {
        "model.embed_tokens.weight": params.embedding,
        "model.norm.weight": params.final_norm,
        "lm_head.weight": params.head,
    }
    for index, layer in enumerate(params.layers):
        tensors |= _layer(f"model.layers.{index}.", layer, "post_attention_layernorm")
    for index, head in enumerate(params.mtp):
        tensors |= _head(f"model.mtp.layers.{index}.", head)
    return tensors


def _head(prefix: str, head: MtpHead) -> Tensors:
    return {
        f"{prefix}enorm.weight": head.embed_norm,
        f"{prefix}hnorm.weight": head.hidden_norm,
        f"{prefix}eh_proj.weight": head.projection,
        f"{prefix}final_layernorm.weight": head.final_norm,
    } | _layer(prefix, head.layer, "pre_mlp_layernorm")


def _layer(prefix: str, layer: Layer, ffn_norm: str) -> Tensors:
    tensors = {f"{prefix}input_layernorm.weight": layer.attention_norm, f"{prefix}{ffn_norm}.weight": layer.ffn_norm}
    tensors |= _attention(f"{prefix}self_attn.", layer.attention)
    mixture = isinstance(layer.ffn, Moe)
    return tensors | (_experts(f"{prefix}mlp.", layer.ffn) if mixture else _dense(f"{prefix}mlp.", layer.ffn))


def _attention(prefix: str, attention: Attention) -> Tensors:
    rows = [np.asarray(part) for part in (attention.query, attention.key, attention.value)]
    tensors = {f"{prefix}qkv_proj.weight": np.concatenate(rows), f"{prefix}o_proj.weight": attention.output}
    if attention.sink is not None:
        tensors[f"{prefix}attention_sink_bias"] = attention.sink
    return tensors


def _dense(prefix: str, ffn: Dense) -> Tensors:
    return {f"{prefix}{name}_proj.weight": getattr(ffn, name) for name in ("gate", "up", "down")}


def _experts(prefix: str, ffn: Moe) -> Tensors:
    tensors = {f"{prefix}gate.weight": ffn.router, f"{prefix}gate.e_score_correction_bias": ffn.router_bias}
    for expert in range(ffn.router.shape[0]):
        tensors |= _dense(f"{prefix}experts.{expert}.", Dense(ffn.gate[expert], ffn.up[expert], ffn.down[expert]))
    return tensors


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
