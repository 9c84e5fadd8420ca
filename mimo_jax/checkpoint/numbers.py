"""The weight formats in NumPy, for the loader: widening rows of a matrix and quantising them."""

from typing import Any

import numpy as np

from pallas_kernels.formats import FP4_VALUES, MXFP4_GROUP, Fp8Block, Int8, MxFp4

_LARGEST = 127


def dequantise(weight: Any) -> np.ndarray:
    """An array, or a format of arrays, [.., out, in] -> float32."""
    if isinstance(weight, Fp8Block):
        return _scaled(weight.values, weight.scale, *weight.block)
    if isinstance(weight, Int8):
        return _scaled(weight.values, weight.scale, 1, weight.group)
    if isinstance(weight, MxFp4):
        halves = np.stack([weight.packed & 15, weight.packed >> 4], axis=-1)
        groups = np.array(FP4_VALUES, np.float32)[halves].reshape(*weight.scale.shape, MXFP4_GROUP)
        wide = np.ldexp(groups, weight.scale[..., None].astype(np.int32) - 127)
        return wide.reshape(*weight.packed.shape[:-1], -1)
    return np.asarray(weight, np.float32)


def quantise(weight: np.ndarray, group: int) -> Int8:
    """float32 [.., out, in] -> Int8: symmetric, rounded to nearest. The largest of a group becomes 127 or -127."""
    columns = weight.shape[-1]
    starts = np.arange(0, columns, group)
    largest = np.maximum.reduceat(np.abs(weight), starts, axis=-1)
    scale = (np.where(largest > 0, largest, _LARGEST) / _LARGEST).astype(np.float32)  # rows of zeros: 1
    # A scale that underflowed to nothing would make infinities of numbers that are next to nothing themselves.
    scale = np.maximum(scale, np.finfo(np.float32).tiny)
    steps = np.rint(weight / np.repeat(scale, group, axis=-1)[..., :columns])
    return Int8(np.clip(steps, -_LARGEST, _LARGEST).astype(np.int8), scale, group)


def _scaled(values: np.ndarray, scale: np.ndarray, rows: int, columns: int) -> np.ndarray:
    wide = scale.astype(np.float32)
    if rows > 1:
        wide = np.repeat(wide, rows, axis=-2)[..., : values.shape[-2], :]
    wide = np.repeat(wide, columns, axis=-1)[..., : values.shape[-1]] if wide.shape[-1] > 1 else wide
    return values.astype(np.float32) * wide
