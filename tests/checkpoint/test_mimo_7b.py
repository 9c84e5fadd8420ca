"""MiMo-7B: Qwen2's trunk and one draft head under names of its own."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from mimo_jax import LayerKind, Params
from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.checkpoint.load import load_params
from mimo_jax.config import MtpDims
from sharding import Rules, make_mesh
from tests import tiny
from tests.checkpoint.rewrite import edit_config, edit_tensors, refused
from tests.tiny_write import Draw, Tensors, attention, gated_mlp, write

HEAD = "model.mtp_layers.0."
# What the published config.json has beside Qwen2's keys.
CONFIG = {
    "model_type": "mimo",
    "architectures": ["MiMoForCausalLM"],
    "attention_bias": True,
    "num_nextn_predict_layers": 1,
    "sliding_window": None,
    "use_mrope": False,
    "use_sliding_window": False,
}


def write_mimo(folder: Path, seed: int = 1) -> tuple[Path, Tensors]:
    """A Qwen2 checkpoint with a draft head of 16 tensors."""
    tiny.write_qwen2(folder / "qwen2", seed, shards=1)
    config: dict[str, Any] = json.loads((folder / "qwen2" / "config.json").read_text()) | CONFIG
    config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    draw = Draw(seed, load_file(folder / "qwen2" / "model.safetensors"))
    trunk, hidden = len(draw.tensors), config["hidden_size"]
    for part in ("token", "hidden", "input", "post_attention", "final"):
        draw.norm(f"{HEAD}{part}_layernorm.weight", hidden)
    draw.linear(f"{HEAD}input_proj.weight", hidden, 2 * hidden)
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    attention(draw, HEAD, hidden, heads, kv_heads, size, size)
    for part, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        draw.vector(f"{HEAD}self_attn.{part}_proj.bias", rows * size, spread=0.3)
    gated_mlp(draw, f"{HEAD}mlp.", hidden, config["intermediate_size"])
    assert len(draw.tensors) == trunk + 16
    return write(folder / "mimo", config, draw.tensors, 2, "float32"), draw.tensors


def load(folder: Path) -> Params:
    return load_params(open_checkpoint(folder), np.float32, make_mesh(jax.devices()[0]), Rules())


def test_the_trunk_is_qwen2_s_and_the_head_has_its_own_tensors(tmp_path: Path) -> None:
    folder, tensors = write_mimo(tmp_path)
    params, qwen2 = load(folder), load(tmp_path / "qwen2")
    assert jax.tree.structure(params.replace(mtp=())) == jax.tree.structure(qwen2)
    jax.tree.map(np.testing.assert_array_equal, params.replace(mtp=()), qwen2)
    (head,) = params.mtp
    for name, array in {
        "token_layernorm.weight": head.embed_norm,
        "hidden_layernorm.weight": head.hidden_norm,
        "input_proj.weight": head.projection,
        "input_layernorm.weight": head.layer.attention_norm,
        "self_attn.k_proj.bias": head.layer.attention.key_bias,
        "self_attn.o_proj.weight": head.layer.attention.output,
        "post_attention_layernorm.weight": head.layer.ffn_norm,
        "mlp.up_proj.weight": head.layer.ffn.up,
        "final_layernorm.weight": head.final_norm,
    }.items():
        np.testing.assert_array_equal(array, tensors[HEAD + name])


def test_the_config_says_how_the_head_is_fed(tmp_path: Path) -> None:
    config = open_checkpoint(write_mimo(tmp_path)[0]).config
    assert config.mtp == MtpDims(
        heads=1, kind=LayerKind.FULL, hidden_first=True, zero_first_embedding=True, normed_hidden=False
    )


def test_a_checkpoint_without_its_head_is_the_trunk_alone(tmp_path: Path) -> None:
    folder, tensors = write_mimo(tmp_path)
    for file in folder.glob("*.safetensors"):
        edit_tensors(file, lambda stored: [stored.pop(name) for name in list(stored) if name.startswith(HEAD)])
    assert open_checkpoint(folder).config.mtp is None
    assert all(name.startswith(HEAD) or name in load_all(folder) for name in tensors)


def load_all(folder: Path) -> Tensors:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", ["input_proj.weight", "self_attn.q_proj.bias", "final_layernorm.weight"])
def test_a_missing_piece_of_the_head_is_named(name: str, tmp_path: Path) -> None:
    folder, _ = write_mimo(tmp_path)
    for file in folder.glob("*.safetensors"):
        edit_tensors(file, lambda stored: stored.pop(HEAD + name, None))
    refused(folder, HEAD + name, "missing")


def test_a_second_head_is_refused(tmp_path: Path) -> None:
    folder, _ = write_mimo(tmp_path)
    edit_config(folder, num_nextn_predict_layers=2)
    refused(folder, "num_nextn_predict_layers")
