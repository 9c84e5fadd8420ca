"""Edits to a written checkpoint: one place for the file formats that the damage tests need."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mimo_jax import CheckpointError
from mimo_jax.checkpoint import checkpoint
from mimo_jax.checkpoint.checkpoint import open_checkpoint
from tests import tiny

INDEX = "model.safetensors.index.json"


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_config(folder: Path, **values: Any) -> None:
    edit_json(folder / "config.json", lambda config: config.update(values))


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    edit_json(folder / INDEX, lambda index: change(index["weight_map"]))


def edit_tensors(path: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Changes a shard's tensors, and the index beside it so that it names what the shard holds."""
    tensors = load_file(path)
    before = set(tensors)
    change(tensors)
    save_file(tensors, path)
    if (path.parent / INDEX).exists():

        def follow(weight_map: dict[str, str]) -> None:
            for name in before - set(tensors):
                del weight_map[name]
            weight_map.update(dict.fromkeys(tensors, path.name))

        edit_index(path.parent, follow)


def cut(path: Path, size_bytes: int) -> None:
    """Leaves the first `size_bytes`; a negative number takes so many off the end."""
    data = path.read_bytes()
    path.write_bytes(data[:size_bytes])


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def refused(path: Path, *words: str) -> None:
    """Before any weight is read, with a message that has all of the words; paths are among them."""

    def read(*_: Any) -> None:
        raise AssertionError("weights were read")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.safetensors, "read_tensor", read)
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def case_named(name: str) -> tiny.Case:
    return next(case for case in tiny.cases() if case.name == name)


def index_of(folder: Path) -> dict[str, str]:
    names: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return names


def shard_of(folder: Path, name: str) -> Path:
    return folder / index_of(folder)[name]
