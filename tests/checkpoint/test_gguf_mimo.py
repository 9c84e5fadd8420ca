"""MiMo-V2 as GGUF: the same model as its Hugging Face form, with split or fused projections, and draft heads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest

from mimo_jax import CheckpointError, Params
from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.checkpoint.load import load_params
from pallas_kernels.formats import widen
from sharding import Rules, make_mesh
from tests.checkpoint.published import HEADS, floats
from tests.tiny_write import Config, Tensors, write

NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.attention_sink_bias": "attn_sinks.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "pre_mlp_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "eh_proj.weight": "nextn.eh_proj.weight",
    "enorm.weight": "nextn.enorm.weight",
    "hnorm.weight": "nextn.hnorm.weight",
    "final_layernorm.weight": "layer_output_norm.weight",
}
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_tensors(config: Config, tensors: Tensors, fused: bool) -> Tensors:
    out: Tensors = {}
    layers = config["num_hidden_layers"]
    for name, weight in tensors.items():
        stem, _, kind = name.rpartition(".")
        if stem in ENDS:
            out[f"{ENDS[stem]}.{kind}"] = weight
        elif ".experts." not in name:
            head = name.startswith("model.mtp.")
            index, part = name.removeprefix("model.mtp.layers." if head else "model.layers.").split(".", 1)
            out[f"blk.{int(index) + layers * head}.{NAMES[part]}"] = weight
    for index, moe in enumerate(config["moe_layer_freq"]):
        for part in ("gate", "up", "down") if moe else ():
            experts = [
                f"model.layers.{index}.mlp.experts.{e}.{part}_proj.weight" for e in range(config["n_routed_experts"])
            ]
            out[f"blk.{index}.ffn_{part}_exps.weight"] = np.stack([tensors[name] for name in experts])
    for index in range(layers + HEADS) if fused else ():
        parts = [out.pop(f"blk.{index}.attn_{part}.weight") for part in "qkv"]
        out[f"blk.{index}.attn_qkv.weight"] = np.concatenate(parts)
    return out


def gguf_keys(config: Config) -> dict[str, Any]:
    pattern = config["hybrid_layer_pattern"] + [1] * HEADS
    kv_heads = [config["swa_num_key_value_heads" if one else "num_key_value_heads"] for one in pattern]
    return {
        "block_count": len(pattern),
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": kv_heads,
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["v_head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": pattern,
        "attention.layer_norm_rms_epsilon": config["layernorm_epsilon"],
        "attention.value_scale": config["attention_value_scale"],
        "rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"]),
        "rope.freq_base": float(config["rope_theta"]),
        "rope.freq_base_swa": float(config["swa_rope_theta"]),
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_gating_func": 2,
        "nextn_predict_layers": HEADS,
    }


def write_gguf(path: Path, keys: dict[str, Any], tensors: Tensors, kind: gguf.GGMLQuantizationType) -> Path:
    writer = gguf.GGUFWriter(path, "mimo2")
    for key, value in keys.items():
        add = {list: writer.add_array, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"mimo2.{key}", value)
    for name, weight in tensors.items():
        matrix = weight.ndim > 1 and "ffn_gate_inp" not in name
        stored = gguf.quantize(weight, kind) if matrix else weight
        writer.add_tensor(name, stored, raw_dtype=kind if matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Float = gguf.GGMLQuantizationType.F32
Q8 = gguf.GGMLQuantizationType.Q8_0
WIDE = {"v_head_dim": 24, "swa_v_head_dim": 24, "num_attention_heads": 8, "swa_num_attention_heads": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Tensors, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    config, tensors = floats(folder / "floats", 5, **WIDE)
    return config, tensors, write(folder / "hf", config, tensors, 1, "float32")


def load(path: Path, quantization: str | None = None) -> Params:
    return load_params(
        open_checkpoint(path), np.float32, make_mesh(jax.devices()[0]), Rules(), quantization=quantization
    )


@pytest.mark.parametrize("fused", [False, True])
def test_a_gguf_is_the_model_of_its_hugging_face_form(
    fused: bool, model: tuple[Config, Tensors, Path], tmp_path: Path
) -> None:
    config, tensors, folder = model
    path = write_gguf(tmp_path / "m.gguf", gguf_keys(config), gguf_tensors(config, tensors, fused), Float)
    one, two = open_checkpoint(folder).config, open_checkpoint(path).config
    assert two.mtp == one.mtp
    assert (two.layer_kinds, two.ffn_kinds, two.moe, two.vocab) == (one.layer_kinds, one.ffn_kinds, one.moe, one.vocab)
    for first, second in ((one.full, two.full), (one.window, two.window)):
        assert first is not None
        assert second is not None
        assert second.value_scale == pytest.approx(first.value_scale, rel=1e-6)  # GGUF floats are single
        assert (second.kv_heads, second.rotary_dims, second.window_tokens, second.has_sink, second.rope_theta) == (
            first.kv_heads,
            first.rotary_dims,
            first.window_tokens,
            first.has_sink,
            first.rope_theta,
        )
    wanted, got = load(folder), load(path)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_blocks_of_eight_bits_and_int8_from_them(model: tuple[Config, Tensors, Path], tmp_path: Path) -> None:
    config, tensors, folder = model
    path = write_gguf(tmp_path / "m.gguf", gguf_keys(config), gguf_tensors(config, tensors, True), Q8)
    wanted, got, small = load(folder), load(path), load(path, "int8")
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.abs(np.asarray(one) - np.asarray(two)).max() <= np.abs(two).max() / 127
    for part in ("gate", "down"):  # experts: one tensor in the file
        exact, eight = getattr(got.layers[1].ffn, part), getattr(small.layers[1].ffn, part)
        assert eight.values.shape == exact.shape
        assert (np.abs(widen(eight, np.float32) - exact) <= 0.5001 * np.asarray(eight.scale)).all()


@pytest.mark.parametrize("key", ["attention.value_scale", "rope.freq_base_swa", "attention.sliding_window_pattern"])
def test_a_missing_key_is_named(key: str, model: tuple[Config, Tensors, Path], tmp_path: Path) -> None:
    """Converters of before llama.cpp's pull request 22493 left the value scale out; it is not 1."""
    config, tensors, _ = model
    keys = gguf_keys(config)
    del keys[key]
    path = write_gguf(tmp_path / "m.gguf", keys, gguf_tensors(config, tensors, True), Float)
    with pytest.raises(CheckpointError, match=key):
        open_checkpoint(path)


def test_a_file_without_the_blocks_of_its_draft_heads_is_the_trunk(
    model: tuple[Config, Tensors, Path], tmp_path: Path
) -> None:
    config, tensors, _ = model
    trunk = {name: weight for name, weight in tensors.items() if not name.startswith("model.mtp.")}
    path = write_gguf(tmp_path / "m.gguf", gguf_keys(config), gguf_tensors(config, trunk, False), Float)
    assert open_checkpoint(path).config.mtp is None


CHANGES: dict[str, Callable[[Tensors], Any]] = {
    "blk.6.nextn.enorm.weight": lambda tensors: tensors.pop("blk.6.nextn.enorm.weight"),
    "blk.2.exp_probs_b.bias": lambda tensors: tensors.pop("blk.2.exp_probs_b.bias"),
    "blk.9.attn_norm.weight": lambda tensors: tensors.update({"blk.9.attn_norm.weight": np.zeros(3, np.float32)}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_tensors_that_are_missing_or_unknown_are_named(
    name: str, model: tuple[Config, Tensors, Path], tmp_path: Path
) -> None:
    config, tensors, _ = model
    changed = gguf_tensors(config, tensors, True)
    CHANGES[name](changed)
    path = write_gguf(tmp_path / "m.gguf", gguf_keys(config), changed, Float)
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(path)
