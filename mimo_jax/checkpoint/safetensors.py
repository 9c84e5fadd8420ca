"""Hugging Face model folders: config.json and safetensors shards, one tensor at a time.

The header of a shard (u64 length, then JSON of name -> dtype, shape, offsets) is read here and the data with plain
file reads: the library maps the file instead, and mapped pages count as this process's memory until the mapping is
closed.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mimo_jax.errors import CheckpointError

_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "U8": np.uint8,
    "I8": np.int8,
}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies in a shard."""

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # from the start of the file


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError naming the file if it is missing or no object."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is needed, this is a {type(value).__name__}")
    return value


def read_index(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder, through the index if there is one.

    Refuses, naming file and tensor: a shard that is missing, shorter than its header says, or without a tensor that
    the index promises; a tensor in two shards. Files that the index does not name are ignored.
    """
    index_path = folder / _INDEX
    if not index_path.is_file():
        if not (folder / _SINGLE).is_file():
            raise CheckpointError(f"{folder}: neither {_INDEX} nor {_SINGLE} is there")
        return _read_shard(folder / _SINGLE)
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index_path}: no weight_map from tensor names to file names")
    tensors: dict[str, StoredTensor] = {}
    for file_name in sorted(set(weight_map.values())):
        if Path(file_name).name != file_name:
            raise CheckpointError(f"{index_path}: shard {file_name!r} is not a plain file name")
        if not (folder / file_name).is_file():
            lost = sorted(name for name, file in weight_map.items() if file == file_name)
            raise CheckpointError(
                f"{folder / file_name}: shard is missing, with {lost[0]} and {len(lost) - 1} more tensors"
            )
        for name, tensor in _read_shard(folder / file_name).items():
            if name in tensors:
                raise CheckpointError(f"{folder}: {name} is in {tensors[name].file.name} and in {file_name}")
            tensors[name] = tensor
    for name, file_name in weight_map.items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise CheckpointError(f"{folder / file_name}: {name} is missing, the index says it is here")
    return tensors


def read_tensor(tensor: StoredTensor, rows: tuple[int, int] | None = None) -> np.ndarray:
    """A fresh array of the stored dtype: the whole tensor, or its rows [first, last) alone."""
    first, last = rows or (0, tensor.shape[0] if tensor.shape else 1)
    row_items = math.prod(tensor.shape[1:])
    count = (last - first) * row_items
    offset = tensor.offset + first * row_items * tensor.dtype.itemsize
    data = np.fromfile(tensor.file, dtype=np.uint8, count=count * tensor.dtype.itemsize, offset=offset)
    if data.size != count * tensor.dtype.itemsize:
        raise CheckpointError(f"{tensor.file}: truncated inside {tensor.name}")
    return data.view(tensor.dtype).reshape((last - first, *tensor.shape[1:]) if tensor.shape else ())


def _read_shard(path: Path) -> dict[str, StoredTensor]:
    if not path.is_file():
        raise CheckpointError(f"{path}: shard is missing")
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else file_bytes
        if header_bytes > min(file_bytes - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path}: the safetensors header is damaged or cut short ({file_bytes} bytes in all)")
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw)
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        return {name: _stored(path, name, entry, 8 + header_bytes, file_bytes) for name, entry in entries}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: the safetensors header is damaged ({error!r})") from error


def _stored(path: Path, name: str, entry: dict[str, Any], data_start: int, file_bytes: int) -> StoredTensor:
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(f"{path}: {name} has dtype {entry['dtype']}; known are {', '.join(_DTYPES)}")
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    shape = tuple(int(size) for size in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    if min(shape, default=0) < 0 or begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{path}: {name} is {shape} {dtype} but takes bytes {begin} to {end}")
    if data_start + end > file_bytes:
        raise CheckpointError(
            f"{path}: truncated, {name} ends at byte {data_start + end} and the file has {file_bytes}"
        )
    return StoredTensor(name, path, dtype, shape, data_start + begin)
