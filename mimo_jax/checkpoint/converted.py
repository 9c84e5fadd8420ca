"""Converted models: what `mimo-jax convert` writes, and opening it as a checkpoint.

    mimo_jax.json      config, weight formats, type and shape of every array, size of every file below
    weights/PART/      the arrays of a layer, a draft head, the embedding, ...: an Orbax checkpoint each
    config.json, tokenizer.json, ... or tokenizer.gguf    what the original's tokenizer is read from

Weights are mapped: whoever changes a folder's files changes the models that run from it.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves_with_path

from mimo_jax.checkpoint import gguf
from mimo_jax.checkpoint.checkpoint import CONVERTED, Checkpoint
from mimo_jax.checkpoint.config_json import config_from_json, config_to_json
from mimo_jax.checkpoint.new_folder import new_folder
from mimo_jax.checkpoint.orbax import map_array, save_arrays
from mimo_jax.checkpoint.safetensors import read_json
from mimo_jax.checkpoint.specs import in_format
from mimo_jax.errors import CheckpointError
from mimo_jax.families.source import Form, Forms, Piece, Source
from mimo_jax.params import ArraySpec, Params, param_specs, parameter_name
from pallas_kernels.formats import Fp8Block, Int8, MxFp4, Weight, is_format

_VERSION = 2
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


def write_converted(
    checkpoint: Checkpoint, weights: Iterable[tuple[str, Weight]], specs: Params, dtype: str, folder: Path
) -> None:
    """Writes a new folder. `weights` are what `load_weights` makes of `specs`; never more than one part is kept.

    Raises CheckpointError when the folder is there already or cannot be written.
    """
    arrays = {parameter_name(path): spec for path, spec in tree_leaves_with_path(specs)}
    with new_folder(folder, sum(spec.size_bytes for spec in arrays.values())) as part:
        for name, group in groupby(weights, key=lambda weight: _part(weight[0])):
            save_arrays(part / _WEIGHTS / name, dict(_arrays(group)))
        _copy_tokenizer(checkpoint.path, part)
        about = {
            "version": _VERSION,
            "config": config_to_json(checkpoint.config),
            "dtype": dtype,
            "formats": dict(_formats(specs)),
            "arrays": {name: [jnp.dtype(spec.dtype).name, *spec.shape] for name, spec in arrays.items()},
            "files": {name: (part / name).stat().st_size for name in _files(part)},
        }
        (part / CONVERTED).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def open_converted(folder: Path) -> Checkpoint:
    """Raises CheckpointError naming what is missing, cut short, unknown or not listed."""
    about = read_json(folder / CONVERTED)
    if set(about) != _KEYS or about["version"] != _VERSION:
        raise CheckpointError(f"{folder / CONVERTED}: is not of version {_VERSION}; convert the model again")
    for key in ("files", "arrays", "formats"):
        if not isinstance(about[key], dict):
            raise CheckpointError(f"{folder / CONVERTED}: {key} is no object; convert the model again")
    _check_files(folder, about["files"])
    try:
        config = config_from_json(about["config"])
        plain = param_specs(config, jnp.dtype(about["dtype"]))
        formats = dict(about["formats"])
        sources = jax.tree_util.tree_map_with_path(
            lambda path, spec: _sources(parameter_name(path), spec, formats.pop(parameter_name(path), None)), plain
        )
        if formats:
            raise ValueError(f"formats: the model has no {min(formats)}")
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / CONVERTED}: {error}") from error
    specs = jax.tree.map(in_format, plain, sources)
    pairs = zip(jax.tree.leaves(sources), jax.tree.leaves(specs), strict=True)
    forms = {source.names[0]: Form(jnp.dtype(spec.dtype).name, spec.shape) for source, spec in pairs}
    _check_arrays(folder, about, forms)

    @lru_cache(maxsize=2)  # a weight's values and its factors, read in blocks of rows
    def whole(name: str) -> np.ndarray:
        return map_array(folder / _place(name), np.dtype(forms[name].dtype), forms[name].shape)

    def read(name: str, rows: tuple[int, int] | None) -> np.ndarray:
        return whole(name)[slice(*rows)] if rows else whole(name)

    return Checkpoint(folder, config, sources, about["dtype"], read, forms, mapped=True)


def _check_files(folder: Path, files: dict[str, Any]) -> None:
    for name, size_bytes in files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size_bytes:
            raise CheckpointError(f"{file}: is missing or does not have {size_bytes} bytes; convert the model again")


def _check_arrays(folder: Path, about: dict[str, Any], forms: Forms) -> None:
    arrays = about["arrays"]
    for name, form in forms.items():
        if arrays.get(name) != [form.dtype, *form.shape]:
            raise CheckpointError(f"{folder}: {name} is {arrays.get(name)}; {form} is needed")
        if f"{_place(name)}/.zarray" not in about["files"]:
            raise CheckpointError(f"{folder / CONVERTED}: the files of {name} are not listed; convert the model again")
    if unknown := set(arrays) - set(forms):
        raise CheckpointError(f"{folder / CONVERTED}: the model has no {min(unknown)} (and {len(unknown) - 1} more)")


def _part(name: str) -> str:
    """What is written, and kept in memory, at once: a layer, a draft head, or one of the arrays outside of them."""
    return ".".join(name.split(".")[:2])


def _place(name: str) -> str:
    return f"{_WEIGHTS}/{_part(name)}/{name}"


def _arrays(weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, jax.Array]]:
    for name, weight in weights:
        for path, array in tree_leaves_with_path(weight):
            yield ".".join(filter(None, (name, parameter_name(path)))), array


def _formats(specs: Params) -> Iterator[tuple[str, list[Any]]]:
    """Weights that are no plain arrays."""
    for path, weight in tree_leaves_with_path(specs, is_leaf=is_format):
        if isinstance(weight, Fp8Block):
            yield parameter_name(path), ["fp8", *weight.block]
        elif isinstance(weight, Int8):
            yield parameter_name(path), ["int8", weight.group]
        elif isinstance(weight, MxFp4):
            yield parameter_name(path), ["mxfp4"]


def _sources(name: str, spec: ArraySpec, format_: list[Any] | None) -> Any:
    def source(part: str) -> Source:
        return Source((Piece(f"{name}.{part}"),))

    if format_ is None:
        return Source((Piece(name),))
    if len(spec.shape) > 1:
        match format_:
            case ["fp8", int(rows), int(columns)] if min(rows, columns) > 0:
                return Fp8Block(source("values"), source("scale"), (rows, columns))
            case ["int8", int(group)] if group > 0:
                return Int8(source("values"), source("scale"), group)
            case ["mxfp4"]:
                return MxFp4(source("packed"), source("scale"))
    raise ValueError(f"{name}: {format_!r} is no format of a weight {list(spec.shape)}")


def _copy_tokenizer(model: Path, folder: Path) -> None:
    if model.is_dir():
        for name in (*_TOKENIZER_FILES, "tokenizer.gguf"):
            if (model / name).is_file():
                shutil.copyfile(model / name, folder / name)
    else:
        (folder / "tokenizer.gguf").write_bytes(gguf.without_tensors(model))


def _files(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
