"""What a model is and how much of it there is, from its headers alone: no weight is read."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mimo_jax.checkpoint.checkpoint import Checkpoint, describe, open_checkpoint
from mimo_jax.config import LayerKind, ModelConfig
from mimo_jax.families import HF_FAMILIES
from mimo_jax.families.mimo_v2_published import PUBLISHED, published_forms
from mimo_jax.families.reader import ConfigReader
from mimo_jax.models import BUILT_IN, resolve_model
from mimo_jax.params import Params, param_specs
from pallas_kernels.formats import Fp8Block, Int8, MxFp4, is_format

_CACHE_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class Summary:
    """Everything is counted over the text model with its draft heads, except where it says otherwise.

    parameters           weights that mean something: without scale factors, 4-bit ones counted one by one
    active_parameters    of those in the trunk, what one token is multiplied with: its experts alone, the head, and not
                         the embedding (of which one row is read)
    checkpoint_elements  elements of all tensors that are loaded, scale factors included
    bytes_by_format      in memory, kept as stored; plain matrices in the type of the embedding
    full_cache_bytes_per_token, window_cache_bytes_per_sequence
                         keys and values of the trunk in bfloat16: of each token in full layers, and of a whole window
    draft_cache_bytes_per_sequence
                         the same of the draft heads
    """

    model: str
    family: str
    layers: str
    draft_heads: int
    context_tokens: int
    parameters: int
    draft_parameters: int
    active_parameters: int
    checkpoint_elements: int
    bytes_by_format: dict[str, int]
    full_cache_bytes_per_token: int
    window_cache_bytes_per_sequence: int
    draft_cache_bytes_per_sequence: int
    skipped_tensors: dict[str, int]


def inspect_model(model: str, *, hf_overrides: dict[str, Any] | None = None) -> Summary:
    """A folder, a .gguf file, a built-in name, or the name of a published model, which needs no files."""
    if model in PUBLISHED:
        return _summary(model, published_checkpoint(model, hf_overrides or {}))
    return _summary(model, open_checkpoint(resolve_model(model, (*BUILT_IN, *PUBLISHED)), hf_overrides=hf_overrides))


def published_checkpoint(name: str, overrides: dict[str, Any] | None = None) -> Checkpoint:
    """A published model whose tensors are known and not there: reading one fails."""
    values = PUBLISHED[name] | (overrides or {})
    forms = published_forms(values)
    reader = ConfigReader(values, name)
    config, sources, skipped = describe(Path(name), HF_FAMILIES[values["model_type"]], reader, forms)

    def read(tensor: str, rows: tuple[int, int] | None) -> Any:
        raise FileNotFoundError(f"{name} is known by its shapes alone; {tensor} is not there")

    return Checkpoint(Path(name), config, sources, "bfloat16", read, forms, skipped)


def _summary(model: str, checkpoint: Checkpoint) -> Summary:
    config = checkpoint.config
    plain = param_specs(config)
    names = {name for source in jax.tree.leaves(checkpoint.sources) for name in source.names}
    draft = _count(plain.mtp)
    return Summary(
        model=model,
        family=config.family,
        layers=config.pattern,
        draft_heads=config.draft_heads,
        context_tokens=config.max_position_tokens,
        parameters=_count(plain),
        draft_parameters=draft,
        active_parameters=_active(config, plain),
        checkpoint_elements=sum(math.prod(checkpoint.forms[name].shape) for name in names),
        bytes_by_format=_bytes_by_format(checkpoint),
        full_cache_bytes_per_token=sum(
            _token_bytes(config, kind) for kind in config.layer_kinds if kind is LayerKind.FULL
        ),
        window_cache_bytes_per_sequence=sum(_window_bytes(config, kind) for kind in config.layer_kinds),
        draft_cache_bytes_per_sequence=sum(
            _window_bytes(config, kind) for kind in config.cached_kinds[config.layers :]
        ),
        skipped_tensors=checkpoint.skipped,
    )


def _count(specs: Any) -> int:
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs))


def _active(config: ModelConfig, plain: Params) -> int:
    trunk = _count(plain) - _count(plain.mtp)
    if config.moe is not None:
        experts = sum(math.prod(spec.shape) for spec in jax.tree.leaves(plain.layers) if spec.axes[0] == "experts")
        trunk -= experts // config.moe.experts * (config.moe.experts - config.moe.experts_per_token)
    return trunk if config.tied_head else trunk - _count(plain.embedding)


def _bytes_by_format(checkpoint: Checkpoint) -> dict[str, int]:
    formats = {Fp8Block: "fp8", MxFp4: "mxfp4", Int8: "int8"}
    sizes: dict[str, int] = {}
    for weight in jax.tree.leaves(checkpoint.specs(jnp.dtype(checkpoint.dtype)), is_leaf=is_format):
        name = formats.get(type(weight)) or jnp.dtype(weight.dtype).name
        sizes[name] = sizes.get(name, 0) + sum(spec.size_bytes for spec in jax.tree.leaves(weight))
    return sizes


def _token_bytes(config: ModelConfig, kind: LayerKind) -> int:
    dims = config.dims(kind)
    return dims.kv_heads * (dims.head_dim + dims.v_dim) * _CACHE_BYTES


def _window_bytes(config: ModelConfig, kind: LayerKind) -> int:
    return _token_bytes(config, kind) * (config.dims(kind).window_tokens or 0)


def as_text(summary: Summary) -> str:
    """A few lines for people."""
    formats = ", ".join(f"{name} {_size(count)}" for name, count in summary.bytes_by_format.items())
    skipped = ", ".join(f"{prefix}* ({count})" for prefix, count in summary.skipped_tensors.items())
    rows = {
        "model": f"{summary.model} ({summary.family})",
        "layers": f"{summary.layers} ({len(summary.layers)}: F full, W window) + {summary.draft_heads} draft heads",
        "context": f"{summary.context_tokens:,} tokens",
        "parameters": f"{summary.parameters:,}, {summary.draft_parameters:,} of them in draft heads",
        "active": f"{summary.active_parameters:,} per token, without draft heads",
        "elements": f"{summary.checkpoint_elements:,} in the tensors that are loaded, scale factors included",
        "memory": formats,
        "KV cache": f"full layers {_size(summary.full_cache_bytes_per_token)} per token, "
        f"window layers {_size(summary.window_cache_bytes_per_sequence)} per sequence, "
        f"draft heads {_size(summary.draft_cache_bytes_per_sequence)} (bfloat16)",
        "not loaded": skipped or "nothing",
    }
    return "\n".join(f"{name:<11} {text}" for name, text in rows.items())


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
