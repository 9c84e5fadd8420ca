"""A model on disk, whatever its form: its config, where each parameter comes from, and one tensor at a time.

`open_checkpoint` checks everything that can be known without reading weights: files, sizes, names, shapes.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mimo_jax.checkpoint import gguf, safetensors
from mimo_jax.config import ModelConfig
from mimo_jax.errors import CheckpointError
from mimo_jax.families import GGUF_FAMILIES, HF_FAMILIES, Family
from mimo_jax.families.reader import GGUF_IGNORED_PREFIXES, ConfigReader
from mimo_jax.families.source import Source
from mimo_jax.params import ArraySpec, Params, param_specs

log = logging.getLogger(__name__)

# Anything else needs scales, which unquantised families do not have.
_WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")

Read = Callable[[str, tuple[int, int] | None], np.ndarray]


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint. `read(name, rows)` returns a fresh array of one tensor, or of some of its rows."""

    path: Path
    config: ModelConfig
    sources: Params
    dtype: str  # "float32", "bfloat16" or "float16": what most of its weights are stored in or expand to
    read: Read


def open_checkpoint(path: Path, *, hf_overrides: dict[str, Any] | None = None) -> Checkpoint:
    """Opens a Hugging Face folder or a .gguf file. `hf_overrides` replace keys of config.json.

    Raises CheckpointError naming the file, key or tensor that is wrong.
    """
    if path.is_dir():
        return _open_folder(path, hf_overrides or {})
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path}: no such folder, and not the name of a .gguf file")
    if hf_overrides:
        raise CheckpointError(f"{path}: hf_overrides apply to config.json; a GGUF file has none")
    return _open_gguf(path)


def _open_folder(folder: Path, overrides: dict[str, Any]) -> Checkpoint:
    values = safetensors.read_json(folder / "config.json") | overrides
    model_type = values.get("model_type")
    family = _pick(HF_FAMILIES, model_type, f"{folder / 'config.json'}: model_type")
    reader = ConfigReader(values, str(folder / "config.json"))
    config = _checked(lambda: family.config_from_hf(reader), folder / "config.json")
    tensors = safetensors.read_index(folder)
    sources = family.hf_sources(config, reader)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    _check(folder, config, sources, shapes, family)
    for name in sorted(name for source in jax.tree.leaves(sources) for name in source.names):
        if tensors[name].dtype.name not in _WEIGHT_DTYPES:
            raise CheckpointError(
                f"{folder}: {name} is {tensors[name].dtype.name}; {', '.join(_WEIGHT_DTYPES)} are read"
            )
    embedding = tensors[sources.embedding.names[0]]
    return Checkpoint(
        folder, config, sources, embedding.dtype.name, lambda name, rows: safetensors.read_tensor(tensors[name], rows)
    )


def _open_gguf(path: Path) -> Checkpoint:
    file = gguf.read_gguf(path)
    family = _pick(GGUF_FAMILIES, file.architecture, f"{path}: general.architecture")
    read_config, sources_of = family.config_from_gguf, family.gguf_sources
    if read_config is None or sources_of is None:
        raise AssertionError(f"{file.architecture} is in the GGUF table without a GGUF reader")
    values = {key: value for key, value in file.metadata.items() if not key.startswith(GGUF_IGNORED_PREFIXES)}
    reader = ConfigReader(values, str(path))
    config = _checked(lambda: read_config(file, reader), path)
    sources = sources_of(config)
    _check(path, config, sources, {name: tensor.shape for name, tensor in file.tensors.items()}, family)
    return Checkpoint(path, config, sources, "float32", lambda name, rows: gguf.read_tensor(file, name, rows))


def _pick(families: dict[str, Family], name: Any, where: str) -> Family:
    if not isinstance(name, str) or name not in families:
        raise CheckpointError(f"{where} is {name!r}; supported are {', '.join(families)}")
    return families[name]


def _checked(make: Callable[[], ModelConfig], where: Path) -> ModelConfig:
    """Turns what ModelConfig refuses into an error that names the file."""
    try:
        config = make()
        if config.max_position_tokens < 1:
            raise ValueError(f"the context is {config.max_position_tokens} tokens; at least 1 is needed")
        return config
    except CheckpointError:
        raise
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def walk(sources: Params, specs: Params) -> Iterator[tuple[Source, ArraySpec]]:
    """Source and spec of every parameter, in the tree's order."""
    jax.tree.map(lambda source, spec: None, sources, specs)  # refuses trees of different structure
    return zip(jax.tree.leaves(sources), jax.tree.leaves(specs), strict=True)


def _check(
    path: Path, config: ModelConfig, sources: Params, shapes: dict[str, tuple[int, ...]], family: Family
) -> None:
    """Every parameter has its tensors in the right shape, and every tensor is used, in full, or knowingly ignored."""
    rows_used: dict[str, int] = {}
    for source, spec in walk(sources, param_specs(config)):
        for name in source.names:
            if name not in shapes:
                raise CheckpointError(f"{path}: tensor {name} is missing")
            wanted = spec.shape[1:] if source.stacked else spec.shape
            got = shapes[name]
            if source.rows is None:
                fits = got == wanted
            else:
                fits = got[1:] == wanted[1:] and source.rows[1] <= got[0]
                rows_used[name] = rows_used.get(name, 0) + source.rows[1] - source.rows[0]
            if not fits:
                raise CheckpointError(f"{path}: {name} is {list(got)}; the config asks for {list(wanted)}")
    for name, rows in rows_used.items():
        if rows != shapes[name][0]:
            raise CheckpointError(f"{path}: {name} has {shapes[name][0]} rows; the config accounts for {rows}")
    _check_leftovers(
        path, {name for source in jax.tree.leaves(sources) for name in source.names}, shapes, family, config
    )


def _check_leftovers(path: Path, used: set[str], names: Iterable[str], family: Family, config: ModelConfig) -> None:
    # Some exporters write the head of a tied model as well.
    ignored = family.ignored_tensors + (("lm_head.weight",) if config.tied_head else ())
    left = sorted(name for name in names if name not in used)
    unknown = [name for name in left if not name.startswith(ignored)] if ignored else left
    if unknown:
        raise CheckpointError(f"{path}: unknown tensor {unknown[0]} (and {len(unknown) - 1} more unknown ones)")
    if left:
        kinds = sorted({prefix for prefix in ignored for name in left if name.startswith(prefix)})
        log.info("%s: %d tensors are not loaded: %s", path, len(left), ", ".join(kinds))
