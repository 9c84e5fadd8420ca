"""A model on disk, whatever its form: its config, where each parameter comes from, and one tensor at a time.

`open_checkpoint` checks everything that can be known without reading weights: files, sizes, names, shapes.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from mimo_jax.checkpoint import gguf, safetensors
from mimo_jax.checkpoint.rows import Read
from mimo_jax.checkpoint.specs import stored_specs, target_specs
from mimo_jax.config import ModelConfig
from mimo_jax.errors import CheckpointError
from mimo_jax.families import GGUF_FAMILIES, HF_FAMILIES, Family
from mimo_jax.families.reader import GGUF_IGNORED_PREFIXES, ConfigReader
from mimo_jax.families.source import Form, Forms, Source
from mimo_jax.params import ArraySpec, Params

log = logging.getLogger(__name__)

T = TypeVar("T")

CONVERTED = "mimo_jax.json"  # the file that makes a folder one that `mimo-jax convert` wrote


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint. `read(name, rows)` returns one tensor, or some of its rows."""

    path: Path
    config: ModelConfig
    sources: Params
    dtype: str  # "float32", "bfloat16" or "float16": what its embedding is stored in or expands to
    read: Read
    forms: Forms = field(default_factory=dict, repr=False)  # what is there
    skipped: dict[str, int] = field(default_factory=dict)  # prefixes that are knowingly not loaded: tensors
    mapped: bool = False  # `read` returns views of files, aligned for a device: nothing is gained by copying them

    def specs(self, dtype: Any, quantization: str | None = None) -> Params:
        """Specs of what `load_params` makes of it; see `target_specs` for the kinds of quantization."""
        return target_specs(self.config, self.sources, dtype, quantization)

    def with_draft_heads(self, count: int) -> "Checkpoint":
        """The same model with its first `count` draft heads. Raises ValueError when it has fewer."""
        there = self.config.draft_heads
        if not 0 <= count <= there:
            raise ValueError(f"draft heads: {count} were asked for; {self.path} has {there}")
        if count == there:
            return self
        kept = replace(self.sources, mtp=self.sources.mtp[:count])
        left = {name for source in jax.tree.leaves(self.sources.mtp[count:]) for name in source.names}
        log.info("%s: %d tensors of %d draft heads are not loaded", self.path, len(left), there - count)
        assert self.config.mtp is not None
        mtp = replace(self.config.mtp, heads=count) if count else None
        skipped = self.skipped | {f"draft heads from {count}": len(left)}
        return replace(self, config=replace(self.config, mtp=mtp), sources=kept, skipped=skipped)


def open_checkpoint(path: Path, *, hf_overrides: dict[str, Any] | None = None) -> Checkpoint:
    """Opens a Hugging Face folder, a .gguf file or a converted model. `hf_overrides` replace keys of config.json.

    Raises CheckpointError naming the file, key or tensor that is wrong.
    """
    if (path / CONVERTED).is_file():
        from mimo_jax.checkpoint.converted import open_converted  # which needs this module

        if hf_overrides:
            raise CheckpointError(f"{path}: hf_overrides apply to the model that was converted; this is what it became")
        return open_converted(path)
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
    tensors = safetensors.read_index(folder)
    forms = {name: Form(tensor.dtype.name, tensor.shape) for name, tensor in tensors.items()}
    config, sources, skipped = describe(folder, family, reader, forms)
    dtype = forms[sources.embedding.names[0]].dtype
    return Checkpoint(
        folder,
        config,
        sources,
        dtype,
        lambda name, rows: safetensors.read_tensor(tensors[name], rows),
        forms,
        skipped,
    )


def describe(
    folder: Path, family: Family, reader: ConfigReader, forms: Forms
) -> tuple[ModelConfig, Params, dict[str, int]]:
    """Config, sources and what is skipped, of a config and the tensors beside it; all of it checked."""
    config = _checked(lambda: family.config_from_hf(reader, forms), folder / "config.json")
    sources = _checked(lambda: family.hf_sources(config, reader, forms), folder)
    return config, sources, _check(folder, config, sources, forms, family)


def _open_gguf(path: Path) -> Checkpoint:
    file = gguf.read_gguf(path)
    family = _pick(GGUF_FAMILIES, file.architecture, f"{path}: general.architecture")
    read_config, sources_of = family.config_from_gguf, family.gguf_sources
    if read_config is None or sources_of is None:
        raise AssertionError(f"{file.architecture} is in the GGUF table without a GGUF reader")
    values = {key: value for key, value in file.metadata.items() if not key.startswith(GGUF_IGNORED_PREFIXES)}
    reader = ConfigReader(values, str(path))
    forms = {name: Form("float32", tensor.shape) for name, tensor in file.tensors.items()}  # what they expand to
    config = _checked(lambda: read_config(file, reader), path)
    sources = _checked(lambda: sources_of(config, forms), path)
    skipped = _check(path, config, sources, forms, family)
    return Checkpoint(
        path, config, sources, "float32", lambda name, rows: gguf.read_tensor(file, name, rows), forms, skipped
    )


def _pick(families: dict[str, Family], name: Any, where: str) -> Family:
    if not isinstance(name, str) or name not in families:
        raise CheckpointError(f"{where} is {name!r}; supported are {', '.join(families)}")
    return families[name]


def _checked(make: Callable[[], T], where: Path) -> T:
    """Turns what a family or ModelConfig refuses into an error that names the file."""
    try:
        return make()
    except CheckpointError:
        raise
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def walk(sources: Params, specs: Params) -> Iterator[tuple[Source, ArraySpec]]:
    """Source and spec of every array, in the tree's order."""
    jax.tree.map(lambda source, spec: None, sources, specs)  # refuses trees of different structure
    return zip(jax.tree.leaves(sources), jax.tree.leaves(specs), strict=True)


def _check(path: Path, config: ModelConfig, sources: Params, forms: Forms, family: Family) -> dict[str, int]:
    """Every array has its tensors in the right shape and type, and every tensor is used, in full, or knowingly ignored.

    Returns how many are ignored, by prefix.
    """
    used: dict[str, list[tuple[int, int]]] = {}
    for source, spec in walk(sources, stored_specs(config, sources, jnp.float32)):
        for piece in source.pieces:
            if piece.name not in forms:
                raise CheckpointError(f"{path}: tensor {piece.name} is missing")
            got = forms[piece.name].shape
            wanted = spec.shape[1:] if source.stacked else spec.shape
            ranges = used.setdefault(piece.name, [])
            fits = got == wanted
            if piece.rows is not None:
                fits = len(got) > 0 and got[1:] == wanted[1:] and piece.rows[1] <= got[0]
                ranges.append(piece.rows)
            if not fits:
                raise CheckpointError(f"{path}: {piece.name} is {list(got)}; the config asks for {list(wanted)}")
            if forms[piece.name].dtype not in source.dtypes:
                known = ", ".join(source.dtypes)
                raise CheckpointError(f"{path}: {piece.name} is {forms[piece.name].dtype}; {known} are read")
    for name, ranges in used.items():
        rows = _covered(ranges)
        if ranges and rows != forms[name].shape[0]:
            raise CheckpointError(f"{path}: {name} has {forms[name].shape[0]} rows; the config accounts for {rows}")
    return _check_leftovers(path, set(used), forms, family, config)


def _covered(ranges: list[tuple[int, int]]) -> int:
    """How many rows lie in at least one range."""
    rows, end = 0, 0
    for first, last in sorted(ranges):
        rows += max(0, last - max(first, end))
        end = max(end, last)
    return rows


def _check_leftovers(
    path: Path, used: set[str], names: Iterable[str], family: Family, config: ModelConfig
) -> dict[str, int]:
    # Some exporters write the head of a tied model as well.
    ignored = family.ignored_tensors + (("lm_head.weight",) if config.tied_head else ())
    left = sorted(name for name in names if name not in used)
    counts = {prefix: sum(name.startswith(prefix) for name in left) for prefix in ignored}
    unknown = [name for name in left if not name.startswith(ignored)] if ignored else left
    if unknown:
        raise CheckpointError(f"{path}: unknown tensor {unknown[0]} (and {len(unknown) - 1} more unknown ones)")
    skipped = {prefix: count for prefix, count in counts.items() if count}
    if left:
        kinds = ", ".join(f"{prefix}* ({count})" for prefix, count in sorted(skipped.items()))
        log.info("%s: %d tensors are not loaded: %s", path, len(left), kinds)
    return skipped
