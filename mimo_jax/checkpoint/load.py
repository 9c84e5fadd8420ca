"""Streaming a checkpoint into device arrays, one parameter at a time.

Host memory stays at the finished weights plus one tensor: a parameter is put on its device as soon as it is read, and
on the CPU the device takes over the host buffer instead of copying it (buffers are aligned for that).
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from tqdm import tqdm

from mimo_jax.checkpoint.checkpoint import Checkpoint, walk
from mimo_jax.families.source import Source
from mimo_jax.params import ArraySpec, Params, param_specs
from sharding import Rules, array_sharding

_BLOCK_BYTES = 16 << 20
_ALIGNMENT_BYTES = 64  # what XLA's CPU client needs in order to use a host buffer in place


def load_params(checkpoint: Checkpoint, dtype: Any, mesh: Mesh, rules: Rules, *, progress: bool = False) -> Params:
    """Reads all weights into `Params` of arrays with `dtype` (norms, sinks and router: float32), placed by `rules`."""
    specs = param_specs(checkpoint.config, dtype)
    pairs = list(walk(checkpoint.sources, specs))
    total = sum(spec.size_bytes for _, spec in pairs)
    arrays: list[Array] = []
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=not progress) as bar:
        for source, spec in pairs:
            sharding = array_sharding(spec.shape, spec.axes, rules, mesh)
            arrays.append(jax.device_put(_read(checkpoint, source, spec), sharding, may_alias=True))
            bar.update(spec.size_bytes)
    return jax.tree.unflatten(jax.tree.structure(specs), arrays)


def _read(checkpoint: Checkpoint, source: Source, spec: ArraySpec) -> np.ndarray:
    """One parameter in a fresh aligned buffer of the spec's shape and dtype."""
    out = _aligned_empty(spec.shape, jnp.dtype(spec.dtype))
    for index, name in enumerate(source.names):
        target = out[index] if source.stacked else out
        if source.convert is not None:
            target[...] = source.convert(checkpoint.read(name, source.rows))  # casts, rounding to nearest
            continue
        start = source.rows[0] if source.rows else 0
        for first, last in _row_blocks(target):
            target[first:last] = checkpoint.read(name, (start + first, start + last))
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
