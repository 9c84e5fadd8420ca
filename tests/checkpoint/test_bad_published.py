"""Damage to quantised checkpoints and draft heads is refused before serving, and the error names the tensor."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from mimo_jax import CheckpointError
from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.checkpoint.load import load_params
from sharding import Rules, make_mesh
from tests.checkpoint.published import Published, publish
from tests.checkpoint.rewrite import refused, shard_of
from tests.tiny_write import Tensors, write

QKV = "model.layers.0.self_attn.qkv_proj.weight_scale_inv"
EXPERT = "model.layers.3.mlp.experts.6.down_proj.weight"
HEAD = "model.mtp.layers.1.mlp.up_proj.weight_scale_inv"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Published]:
    names = ("flash", "v2.5", "v2.6", "v2.6 float")
    return {name: publish(tmp_path_factory.mktemp("bad") / "model", name) for name in names}


def changed(model: Published, folder: Path, change: Callable[[Tensors], Any], **config: Any) -> Path:
    stored = dict(model.stored)
    change(stored)
    return write(folder, model.config | config, stored, 3, "float32")


@pytest.mark.parametrize("name", [QKV, f"{EXPERT}_scale_inv", HEAD])
def test_missing_factors_are_named(name: str, made: dict[str, Published], tmp_path: Path) -> None:
    refused(changed(made["v2.5"], tmp_path, lambda stored: stored.pop(name)), name, "missing")


@pytest.mark.parametrize("name", ["v2.5", "flash"])
def test_missing_factors_of_the_layer_that_decides_the_layout_are_named(
    name: str, made: dict[str, Published], tmp_path: Path
) -> None:
    part = "k" if name == "flash" else "qkv"
    scale = f"model.layers.0.self_attn.{part}_proj.weight_scale_inv"
    refused(changed(made[name], tmp_path, lambda stored: stored.pop(scale)), scale, "missing")


@pytest.mark.parametrize("name", [f"{EXPERT}_scale_inv", HEAD])
@pytest.mark.parametrize("form", ["one row less", "one column more", "transposed", "a number"])
def test_factors_of_another_shape_are_named(name: str, form: str, made: dict[str, Published], tmp_path: Path) -> None:
    forms: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "one row less": lambda scale: scale[1:],
        "one column more": lambda scale: np.concatenate([scale, scale[:, :1]], axis=1),
        "transposed": lambda scale: np.ascontiguousarray(scale.T),
        "a number": lambda scale: np.array(scale[0, 0]),
    }
    refused(changed(made["v2.5"], tmp_path, lambda s: s.update({name: forms[form](s[name])})), name, "asks for")


@pytest.mark.parametrize(("name", "part"), [("v2.5", "qkv"), ("flash", "k")])
def test_as_many_factors_as_no_layout_has_are_refused(
    name: str, part: str, made: dict[str, Published], tmp_path: Path
) -> None:
    scale = f"model.layers.0.self_attn.{part}_proj.weight_scale_inv"
    folder = changed(made[name], tmp_path, lambda s: s.update({scale: np.concatenate([s[scale]] * 2)}))
    refused(folder, scale, "chunks")


def test_factors_in_a_missing_shard_are_named(made: dict[str, Published], tmp_path: Path) -> None:
    folder = changed(made["v2.5"], tmp_path, lambda stored: None)
    shard = shard_of(folder, f"{EXPERT}_scale_inv")
    assert shard != shard_of(folder, EXPERT)  # as it may be in published ones
    shard.unlink()
    first = min(name for name in made["v2.5"].stored if shard_of(folder, name) == shard)
    refused(folder, str(shard), first, "missing")


def loading(folder: Path) -> None:
    load_params(open_checkpoint(folder), np.float32, make_mesh(jax.devices()[0]), Rules())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_factors_that_are_no_numbers_are_named(value: float, made: dict[str, Published], tmp_path: Path) -> None:
    def damage(stored: Tensors) -> None:
        stored[QKV] = stored[QKV].copy()
        stored[QKV][3, 1] = value

    with pytest.raises(CheckpointError, match=QKV):
        loading(changed(made["v2.5"], tmp_path, damage))


@pytest.mark.parametrize(("name", "value"), [("v2.6", 255), ("v2.6 float", 3.0), ("v2.6 float", np.nan)])
def test_powers_of_two_that_are_none_are_named(
    name: str, value: float, made: dict[str, Published], tmp_path: Path
) -> None:
    def damage(stored: Tensors) -> None:
        stored[f"{EXPERT}_scale"] = stored[f"{EXPERT}_scale"].copy()
        stored[f"{EXPERT}_scale"][2, 0] = value

    with pytest.raises(CheckpointError, match=f"{EXPERT}_scale"):
        loading(changed(made[name], tmp_path, damage))


def test_experts_of_one_layer_in_two_formats_are_refused(made: dict[str, Published], tmp_path: Path) -> None:
    def damage(stored: Tensors) -> None:
        stored[EXPERT] = stored[EXPERT].astype(ml_dtypes.bfloat16)
        del stored[f"{EXPERT}_scale_inv"]

    refused(changed(made["v2.5"], tmp_path, damage), EXPERT, "bfloat16", "float8_e4m3fn")


def test_factors_without_a_use_are_refused(made: dict[str, Published], tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    refused(changed(made["v2.5"], tmp_path, lambda s: s.update({name: np.ones((2, 2), np.float32)})), name, "unknown")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fmt": "e5m2"}, ["fmt", "e5m2"]),
        ({"quant_method": "awq"}, ["quant_method", "awq"]),
        ({"activation_scheme": "static"}, ["activation_scheme"]),
        ({"store_dtype": "int4"}, ["store_dtype"]),
        ({"mxfp4_block_size": 16}, ["mxfp4_block_size"]),
        ({"weight_block_size": None}, ["weight_block_size"]),
        ({"weight_block_size": [128]}, ["weight_block_size"]),
        ({"weight_block_size": [128, 0]}, ["weight_block_size"]),
        ({"twist": 1}, ["twist", "unknown"]),
    ],
)
def test_quantization_that_is_not_known_is_refused(
    change: dict[str, Any], words: list[str], made: dict[str, Published], tmp_path: Path
) -> None:
    model = made["v2.5"]
    quantization = model.config["quantization_config"] | change
    folder = changed(model, tmp_path, lambda stored: None, quantization_config=quantization)
    refused(folder, "config.json", "quantization_config", *words)


def test_fp8_weights_without_a_block_size_are_refused(made: dict[str, Published], tmp_path: Path) -> None:
    folder = changed(made["v2.5"], tmp_path, lambda stored: None, quantization_config=None)
    refused(folder, "float8_e4m3fn", "weight_block_size")


# ---- draft heads ----


@pytest.mark.parametrize("index", [0, 1])
def test_a_gap_in_the_draft_heads_is_refused(index: int, made: dict[str, Published], tmp_path: Path) -> None:
    start = f"model.mtp.layers.{index}."
    gone = [name for name in made["v2.5"].stored if name.startswith(start)]
    folder = changed(made["v2.5"], tmp_path, lambda stored: [stored.pop(name) for name in gone])
    refused(folder, start.rstrip("."), "missing")


@pytest.mark.parametrize(
    "name",
    [
        "enorm.weight",
        "eh_proj.weight",
        "self_attn.qkv_proj.weight",
        "self_attn.attention_sink_bias",
        "mlp.up_proj.weight",
    ],
)
@pytest.mark.parametrize("index", [0, 2])
def test_a_missing_piece_of_a_draft_head_is_named(
    name: str, index: int, made: dict[str, Published], tmp_path: Path
) -> None:
    full = f"model.mtp.layers.{index}.{name}"
    refused(changed(made["v2.5"], tmp_path, lambda stored: stored.pop(full)), full, "missing")


def test_a_tensor_of_the_draft_heads_that_nobody_knows_is_named(made: dict[str, Published], tmp_path: Path) -> None:
    for name in ("model.mtp.layers.0.twist.weight", "model.mtp.norm.weight"):
        extra = {name: np.zeros(3, np.float32)}
        refused(changed(made["v2.5"], tmp_path / name, lambda s, extra=extra: s.update(extra)), name, "unknown")
