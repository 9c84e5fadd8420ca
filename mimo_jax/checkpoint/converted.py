"""Converted models: what `mimo-jax convert` writes, and opening it as a checkpoint.

    mimo_jax.json      config, weight formats, type and shape of every array, size of every file below
    weights/           the arrays (Orbax)
    config.json, tokenizer.json, ... or tokenizer.gguf    what the original's tokenizer is read from

A folder is written under another name and renamed when it is whole; a killed conversion leaves `.NAME.PID.part`.
Weights are mapped: whoever changes a folder's files changes the models that run from it.
"""

import json
import os
import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mimo_jax.checkpoint import gguf
from mimo_jax.checkpoint.checkpoint import CONVERTED, Checkpoint
from mimo_jax.checkpoint.config_json import config_from_json, config_to_json
from mimo_jax.checkpoint.orbax import map_array, save_arrays
from mimo_jax.checkpoint.safetensors import read_json
from mimo_jax.checkpoint.specs import in_format
from mimo_jax.errors import CheckpointError
from mimo_jax.families.source import Form, Piece, Source
from mimo_jax.params import Params, param_specs
from mimo_jax.weights import Fp8Block, Int8, MxFp4, is_format

_VERSION = 1
_KEYS = {"version", "config", "dtype", "formats", "arrays", "files"}
_WEIGHTS = "weights"
_TOKENIZER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def write_converted(checkpoint: Checkpoint, params: Params, dtype: str, folder: Path) -> None:
    """Writes a model whose weights are loaded. Raises CheckpointError if the folder is there already."""
    if folder.exists():
        raise CheckpointError(f"{folder}: is there already")
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        arrays = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        save_arrays(part / _WEIGHTS, arrays)
        _copy_tokenizer(checkpoint.path, part)
        about = {
            "version": _VERSION,
            "config": config_to_json(checkpoint.config),
            "dtype": dtype,
            "formats": dict(_formats(params)),
            "arrays": {name: [array.dtype.name, *array.shape] for name, array in arrays.items()},
            "files": {name: (part / name).stat().st_size for name in _files(part)},
        }
        (part / CONVERTED).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        try:
            part.rename(folder)
        except OSError as error:  # another conversion was quicker
            raise CheckpointError(f"{folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def open_converted(folder: Path) -> Checkpoint:
    """Raises CheckpointError naming what is missing, cut short or unknown."""
    about = read_json(folder / CONVERTED)
    if set(about) != _KEYS or about["version"] != _VERSION:
        raise CheckpointError(f"{folder / CONVERTED}: is not of version {_VERSION}; convert the model again")
    files, arrays = about["files"], about["arrays"]
    if not isinstance(files, dict) or not isinstance(arrays, dict):
        raise CheckpointError(f"{folder / CONVERTED}: files and arrays are no objects; convert the model again")
    for name, size_bytes in files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size_bytes:
            raise CheckpointError(f"{file}: is missing or does not have {size_bytes} bytes; convert the model again")
    try:
        config = config_from_json(about["config"])
        plain = param_specs(config, jnp.dtype(about["dtype"]))
        sources = jax.tree_util.tree_map_with_path(
            lambda path, spec: _sources(_name(path), about["formats"].get(_name(path))), plain
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / CONVERTED}: {error}") from error
    specs = jax.tree.map(in_format, plain, sources)
    pairs = zip(jax.tree.leaves(sources), jax.tree.leaves(specs), strict=True)
    forms = {source.names[0]: Form(jnp.dtype(spec.dtype).name, spec.shape) for source, spec in pairs}
    for name, form in forms.items():
        if arrays.get(name) != [form.dtype, *form.shape]:
            raise CheckpointError(f"{folder}: {name} is {arrays.get(name)}; {form} is needed")
        if f"{_WEIGHTS}/{name}/.zarray" not in files:
            raise CheckpointError(f"{folder / CONVERTED}: the files of {name} are not listed; convert the model again")

    @lru_cache(maxsize=2)  # a weight's values and its factors, read in blocks of rows
    def whole(name: str) -> np.ndarray:
        return map_array(folder / _WEIGHTS, name, np.dtype(forms[name].dtype), forms[name].shape)

    def read(name: str, rows: tuple[int, int] | None) -> np.ndarray:
        return whole(name)[slice(*rows)] if rows else whole(name)

    return Checkpoint(folder, config, sources, about["dtype"], read, forms, mapped=True)


def _name(path: Any) -> str:
    """layers.0.attention.query, layers.0.attention.query.scale"""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _formats(params: Params) -> Iterator[tuple[str, list[Any]]]:
    """Weights that are no plain arrays."""
    for path, weight in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_format):
        if isinstance(weight, Fp8Block):
            yield _name(path), ["fp8", *weight.block]
        elif isinstance(weight, Int8):
            yield _name(path), ["int8", weight.group]
        elif isinstance(weight, MxFp4):
            yield _name(path), ["mxfp4"]


def _sources(name: str, format_: list[Any] | None) -> Any:
    def source(part: str) -> Source:
        return Source((Piece(f"{name}.{part}"),))

    match format_:
        case None:
            return Source((Piece(name),))
        case ["fp8", int(rows), int(columns)]:
            return Fp8Block(source("values"), source("scale"), (rows, columns))
        case ["int8", int(group)]:
            return Int8(source("values"), source("scale"), group)
        case ["mxfp4"]:
            return MxFp4(source("packed"), source("scale"))
    raise ValueError(f"{name}: unknown weight format {format_!r}")


def _copy_tokenizer(model: Path, folder: Path) -> None:
    if model.is_dir():
        for name in (*_TOKENIZER_FILES, "tokenizer.gguf"):
            if (model / name).is_file():
                shutil.copyfile(model / name, folder / name)
    else:
        (folder / "tokenizer.gguf").write_bytes(gguf.without_tensors(model))


def _files(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
