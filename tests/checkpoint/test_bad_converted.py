"""Damaged converted models: refused by name, and mostly before anything is read."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo_jax import CheckpointError
from mimo_jax.checkpoint.checkpoint import CONVERTED, open_checkpoint
from tests.checkpoint.converting import load
from tests.checkpoint.rewrite import cut, edit_json

FINAL_NORM = "weights/final_norm/final_norm"


def test_every_file_of_a_converted_model_is_needed(made: Any, tmp_path: Path) -> None:
    """Known before anything is read."""
    _, out = made("v2.5", "int8")
    files = [file for file in (out / "weights").rglob("*") if file.is_file()]
    for file in [files[0], files[-1], out / FINAL_NORM / "0"]:
        data = file.read_bytes()
        for damage in (file.unlink, lambda file=file: cut(file, -1)):
            damage()
            with pytest.raises(CheckpointError, match=re.escape(str(file))):
                open_checkpoint(out)
            file.write_bytes(data)
    assert open_checkpoint(out).config.layers == 5


def test_an_array_in_another_form_is_refused(made: Any) -> None:
    _, out = made("v2.5", None)
    about = out / FINAL_NORM / ".zarray"
    text = about.read_text()
    try:
        for old, new in (('"C"', '"F"'), ('"order"', '"Order"'), ("<f4", "<i4"), ('"."', '"/"'), ("{", "[")):
            about.write_text(text.replace(old, new, 1))
            with pytest.raises(CheckpointError, match="final_norm"):
                load(out)
    finally:
        about.write_text(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda about: about.update(version=1), "version"),
        (lambda about: about.update(twist=1), "version"),
        (lambda about: about["config"].pop("ffn"), "ffn"),
        (lambda about: about["config"].update(twist=1), "twist"),
        (lambda about: about["config"].update(vocab="101"), "vocab"),
        (lambda about: about["config"].update(layer_kinds=["X"]), "X"),
        (lambda about: about["config"].update(vocab=102), "embedding"),
        (lambda about: about["arrays"].pop("layers.0.ffn.up"), "layers.0.ffn.up"),
        (lambda about: about.update(files=[]), "files"),
        (lambda about: about.update(arrays=[]), "arrays"),
        (lambda about: about.update(files={}), "not listed"),
        (lambda about: about["formats"].update({"layers.0.attention.query": ["int3"]}), "int3"),
        (lambda about: about["formats"].update({"layers.0.attention.query": ["int8", 0]}), "int8"),
        (lambda about: about["formats"].update({"layers.0.attention.query": ["fp8", 128, 0]}), "fp8"),
        (lambda about: about["formats"].update({"layers.0.attention.query": ["int8", True]}), "int8"),
        (lambda about: about["formats"].update({"final_norm": ["int8", 1]}), "final_norm"),
        (lambda about: about["formats"].update({"layers.99.attention.query": ["mxfp4"]}), "layers.99"),
        (lambda about: about.update(formats=[]), "formats"),
        (lambda about: about.update(dtype="int3"), "int3"),
        (lambda about: about["config"].update(mtp=None), "mtp.0"),
        (lambda about: about["config"].update(max_position_tokens=0), "max_position_tokens=0"),
        (lambda about: about["config"].update(embed=-1), "embed=-1"),
        (lambda about: about["config"]["full"].update(kv_heads=0), "kv_heads=0"),
        (lambda about: about["config"].update(norm_epsilon=0.0), "norm_epsilon=0"),
    ],
)
def test_a_changed_description_is_refused(
    change: Callable[[dict[str, Any]], Any], words: str, made: Any, tmp_path: Path
) -> None:
    _, out = made("bf16", None)
    marker = out / CONVERTED
    text = marker.read_text()
    try:
        edit_json(marker, change)
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(out)
    finally:
        marker.write_text(text)


def test_a_factor_that_is_not_finite_is_refused(made: Any) -> None:
    _, out = made("v2.5", None)
    file = out / "weights/layers.0/layers.0.attention.query.scale/0.0"
    data = file.read_bytes()
    try:
        file.write_bytes(np.float32(np.nan).tobytes() + data[4:])
        with pytest.raises(CheckpointError, match=re.escape("layers.0.attention.query.scale: a factor")):
            load(out)
    finally:
        file.write_bytes(data)


def test_files_of_others_are_ignored(made: Any) -> None:
    """Such as what a file manager leaves."""
    _, out = made("v2.5", None)
    strays = [out / folder / ".DS_Store" for folder in (".", "weights", "weights/final_norm", FINAL_NORM)]
    try:
        for stray in strays:
            stray.write_text("")
        load(out)
    finally:
        for stray in strays:
            stray.unlink()
