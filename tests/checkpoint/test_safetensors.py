"""Safetensors folders: what is stored is what is read; what is not whole is refused, naming file and tensor."""

import json
import logging
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from mimo_jax.checkpoint.checkpoint import Checkpoint, open_checkpoint
from mimo_jax.checkpoint.safetensors import read_index, read_tensor
from tests import tiny
from tests.checkpoint.rewrite import (
    INDEX,
    cut,
    edit_index,
    edit_json,
    edit_tensors,
    index_of,
    refused,
    shard_of,
    shards,
)


@pytest.mark.parametrize(
    "dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8, np.uint8]
)
def test_every_dtype_reads_in_whole_and_in_rows(dtype: Any, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    stored = {
        "matrix": (100 * draw.standard_normal((7, 5))).astype(dtype),
        "cube": (100 * draw.standard_normal((3, 4, 2))).astype(dtype),
        "vector": (100 * draw.standard_normal(9)).astype(dtype),
        "scalar": np.array(3, dtype),
        "empty": np.zeros((0, 4), dtype),
    }
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tensors = read_index(tmp_path)
    assert set(tensors) == set(stored)
    for name, wanted in stored.items():
        got = read_tensor(tensors[name])
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        assert got.tobytes() == wanted.tobytes()
        assert got.flags.writeable
    for first, last in ((0, 1), (2, 5), (6, 7), (0, 7)):
        rows = read_tensor(tensors["matrix"], (first, last))
        assert rows.tobytes() == stored["matrix"][first:last].tobytes()


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


def test_vision_and_audio_tensors_are_skipped_with_one_line_in_the_log(
    flash: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["audio_encoder.projection.mlp.0.weight", "visual.blocks.0.norm1.weight", "visual.merger.mlp.0.bias"]
    extra = {name: np.zeros(3, np.float32) for name in names}
    edit_tensors(shards(flash)[0], lambda tensors: tensors.update(extra))
    with caplog.at_level(logging.INFO, logger="mimo_jax"):
        opened: Checkpoint = open_checkpoint(flash)
    assert opened.config.layers == 5
    (line,) = [record.getMessage() for record in caplog.records]
    assert "3 tensors are not loaded" in line
    assert "audio_encoder.* (1)" in line
    assert "visual.* (2)" in line
    assert opened.skipped == {"audio_encoder.": 1, "visual.": 2}
