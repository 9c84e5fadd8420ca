"""What a checkpoint's parameters are once they are loaded: the spec tree with the weight formats in it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mimo_jax.config import ModelConfig
from mimo_jax.params import ArraySpec, Params, param_specs
from pallas_kernels.formats import MXFP4_GROUP, Fp8Block, Int8, MxFp4

# The name -> columns that share a factor; None: all of a row. One factor a row is the default of "int8": a row then
# needs no more than one multiplication behind its product.
INT8_GROUPS: dict[str, int | None] = {"int8": None, "int8-g128": 128}
DEQUANTISE = "dequantize"
QUANTIZATIONS = (None, *INT8_GROUPS, DEQUANTISE)

# What int8 is for. Embedding and head stay as they are: a row of the embedding is read and not multiplied, and an error
# in the head goes straight into the logits. So do router, norms and sinks: they are small, and decide.
_MATRICES = frozenset(("query", "key", "value", "output", "gate", "up", "down", "projection"))


def stored_specs(config: ModelConfig, sources: Params, dtype: Any) -> Params:
    """Specs in the formats that the sources are stored in; plain matrices have `dtype`."""
    return jax.tree.map(in_format, param_specs(config, dtype), sources)


def target_specs(config: ModelConfig, sources: Params, dtype: Any, quantization: str | None) -> Params:
    """Specs of what `load_params` makes.

    quantization   None: each weight in the format it is stored in; "int8", "int8-g128": matrices and experts in int8;
                   "dequantize": everything plain, with `dtype`
    """
    if quantization not in QUANTIZATIONS:
        names = ", ".join(repr(name) for name in QUANTIZATIONS)
        raise ValueError(f"quantization={quantization!r}; {names} are possible")
    if quantization is None:
        return stored_specs(config, sources, dtype)
    plain = param_specs(config, dtype)
    return plain if quantization == DEQUANTISE else _matrices(plain, _as_int8(INT8_GROUPS[quantization]))


def _matrices(specs: Params, change: Callable[[ArraySpec], Any]) -> Params:
    def one(path: tuple[Any, ...], spec: ArraySpec) -> Any:
        return change(spec) if getattr(path[-1], "name", None) in _MATRICES else spec

    return jax.tree_util.tree_map_with_path(one, specs)


def _as_int8(group: int | None) -> Callable[[ArraySpec], Int8]:
    def change(spec: ArraySpec) -> Int8:
        columns = spec.shape[-1]
        made: Int8 = in_format(spec, Int8(None, None, columns if group is None else min(group, columns)))
        return made

    return change


def in_format(spec: ArraySpec, like: Any) -> Any:
    """The specs of a weight in the format that `like` has; whatever is no format stands for a plain array."""
    if isinstance(like, Fp8Block):
        values = _like(spec, spec.shape, jnp.float8_e4m3fn)
        return Fp8Block(values, _like(spec, _blocks(spec.shape, *like.block), jnp.float32), like.block)
    if isinstance(like, Int8):
        scale = _like(spec, _blocks(spec.shape, 1, like.group), jnp.float32)
        return Int8(_like(spec, spec.shape, jnp.int8), scale, like.group)
    if isinstance(like, MxFp4):
        packed = _like(spec, _blocks(spec.shape, 1, 2), jnp.uint8)
        return MxFp4(packed, _like(spec, _blocks(spec.shape, 1, MXFP4_GROUP), jnp.uint8))
    return spec


def _blocks(shape: tuple[int, ...], rows: int, columns: int) -> tuple[int, ...]:
    """The shape in whole blocks."""
    return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))


def _like(spec: ArraySpec, shape: tuple[int, ...], dtype: Any) -> ArraySpec:
    return ArraySpec(shape, dtype, spec.axes, spec.init)
