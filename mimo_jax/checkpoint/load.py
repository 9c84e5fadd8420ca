"""Streaming a checkpoint into device arrays, one parameter at a time.

Host memory stays at the finished weights plus one tensor: a parameter is put on its device as soon as it is read, and
on the CPU the device takes over the host buffer instead of copying it (buffers are aligned for that). A weight that
changes its format does so in blocks of rows. What a converted model stores is mapped, and on the CPU used in its file.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from tqdm import tqdm

from mimo_jax.checkpoint.checkpoint import Checkpoint
from mimo_jax.checkpoint.numbers import quantise
from mimo_jax.checkpoint.rows import Read, float_rows, read_rows, read_slice
from mimo_jax.errors import CheckpointError
from mimo_jax.families.source import Source
from mimo_jax.params import ArraySpec, Params, parameter_name
from pallas_kernels.formats import Fp8Block, Int8, is_format
from sharding import Rules, array_sharding

_BLOCK_BYTES = 16 << 20
_FLOAT_BLOCK_BYTES = 4 << 20  # of what changes its format: quantising takes several times the room
_ALIGNMENT_BYTES = 64  # what XLA's CPU client needs in order to use a host buffer in place


def load_params(
    checkpoint: Checkpoint,
    dtype: Any,
    mesh: Mesh,
    rules: Rules,
    *,
    quantization: str | None = None,
    progress: bool = False,
) -> Params:
    """Reads all weights into `Params` of the arrays that `checkpoint.specs(dtype, quantization)` says.

    They are placed by `rules`. Plain matrices have `dtype`; norms, sinks and router float32.
    """
    specs = checkpoint.specs(dtype, quantization)
    weights = load_weights(checkpoint, specs, mesh, rules, progress=progress)
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_format), [weight for _, weight in weights])


def load_weights(
    checkpoint: Checkpoint, specs: Params, mesh: Mesh, rules: Rules, *, progress: bool = False
) -> Iterator[tuple[str, Any]]:
    """Name and weight one by one, in the tree's order: whoever drops one before the next never has the whole model."""
    targets = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_format)
    sources = jax.tree.leaves(checkpoint.sources, is_leaf=is_format)
    total = sum(spec.size_bytes for spec in jax.tree.leaves(specs))
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=not progress) as bar:

        def place(array: np.ndarray, spec: ArraySpec) -> Array:
            bar.update(spec.size_bytes)
            return jax.device_put(array, array_sharding(spec.shape, spec.axes, rules, mesh), may_alias=True)

        for source, (path, target) in zip(sources, targets, strict=True):
            yield parameter_name(path), jax.tree.map(place, _load(checkpoint, source, target), target)


def _load(checkpoint: Checkpoint, source: Any, target: Any) -> Any:
    """One weight: `target` with NumPy arrays for specs."""
    read = checkpoint.read
    stored: Any = jax.tree.structure(source)
    if stored == jax.tree.structure(target):  # of the same format
        one = _mapped if checkpoint.mapped else _read
        weight = jax.tree.map(partial(one, read), source, target)
        if isinstance(weight, Fp8Block | Int8) and not np.isfinite(weight.scale).all():
            raise CheckpointError(f"{source.scale.names[0]}: a factor is not finite")
        return weight
    if isinstance(target, Int8):
        return _requantised(read, source, target)
    out = _aligned_empty(target.shape, jnp.dtype(target.dtype))
    slices = out if out.ndim > 2 else out[None]
    for index, first, last, floats in _float_blocks(read, source, target):
        slices[index, first:last] = floats  # casts, rounding to nearest
    return out


def _requantised(read: Read, source: Any, target: Int8) -> Int8:
    values = _aligned_empty(target.values.shape, jnp.dtype(jnp.int8))
    scale = _aligned_empty(target.scale.shape, jnp.dtype(jnp.float32))
    slices, factors = (values, scale) if values.ndim > 2 else (values[None], scale[None])
    for index, first, last, floats in _float_blocks(read, source, target.values):
        block = quantise(floats, target.group)
        slices[index, first:last] = block.values
        factors[index, first:last] = block.scale
    return Int8(values, scale, target.group)


def _float_blocks(read: Read, weight: Any, spec: ArraySpec) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """(slice, first row, last row, these rows as float32), whole blocks of the format at once."""
    rows, columns = spec.shape[-2:]
    leaf = jax.tree.leaves(weight)[0]
    deep = len(spec.shape) > 2 and not leaf.stacked  # all experts in one tensor
    whole = deep or leaf.convert is not None  # and what a conversion needs
    unit = weight.block[0] if isinstance(weight, Fp8Block) else 1
    step = rows if whole else max(unit, _FLOAT_BLOCK_BYTES // (4 * columns) // unit * unit)
    for index in range(math.prod(spec.shape[:-2])):
        if leaf.convert is not None:
            yield index, 0, rows, read_slice(read, weight, index, deep).astype(np.float32)
            continue
        for first in range(0, rows, step):
            last = min(first + step, rows)
            yield index, first, last, float_rows(read, weight, index, first, last, deep)


def _mapped(read: Read, source: Source, spec: ArraySpec) -> np.ndarray:
    """One array where it lies in its file, unless it has to be cast."""
    array = read(source.names[0], None)
    return array if array.dtype == jnp.dtype(spec.dtype) else _read(read, source, spec)


def _read(read: Read, source: Source, spec: ArraySpec) -> np.ndarray:
    """One array in a fresh aligned buffer of the spec's shape and dtype."""
    out = _aligned_empty(spec.shape, jnp.dtype(spec.dtype))
    for index in range(len(source.pieces) if source.stacked else 1):
        target = out[index] if source.stacked else out
        if source.convert is not None:
            target[...] = read_slice(read, source, index)  # casts, rounding to nearest
            continue
        for first, last in _row_blocks(target):
            target[first:last] = read_rows(read, source, index, first, last)
    return out


def _row_blocks(target: np.ndarray) -> Iterator[tuple[int, int]]:
    """Row ranges of about _BLOCK_BYTES: a big tensor never stands in memory twice. A vector is one block."""
    rows = target.shape[0]
    block = max(1, _BLOCK_BYTES * rows // max(1, target.nbytes)) if target.ndim > 1 else rows
    for first in range(0, rows, block):
        yield first, min(first + block, rows)


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + size_bytes].view(dtype).reshape(shape)
