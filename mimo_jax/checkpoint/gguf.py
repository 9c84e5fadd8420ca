"""GGUF files: header, metadata, and one dequantized tensor at a time.

The header is parsed here rather than by `gguf.GGUFReader`, which builds a Python object for every token of the
vocabulary: 7 s against 0.1 s for SmolLM2's 49,152 tokens. Block formats and their dequantization are the `gguf`
package's.

Layout (GGUF specification, version 2 and 3, little-endian):

    "GGUF" | version u32 | tensor count u64 | key count u64 | keys ... | tensor infos ... | padding | data
"""

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from mimo_jax.errors import CheckpointError

# GGUF value type -> struct format; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_LENGTH = struct.Struct("<Q")
_DEQUANTIZED_ROW_VALUES = 65536


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies. `shape` is in row-major order, so a weight is [out, in]."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int  # from the start of the file
    size_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """A parsed header. Tensor data stays on disk until `read_tensor`."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise CheckpointError(f"{self.path}: no general.architecture in its metadata")
        return value


def read_gguf(path: Path) -> GgufFile:
    """Parses the header of `path` and checks that every tensor lies inside the file.

    Raises CheckpointError naming the file for a foreign or truncated file and for an unknown tensor type.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    file_bytes = path.stat().st_size
    if file_bytes == 0:  # which cannot be mapped
        raise CheckpointError(f"{path}: not a GGUF file (it is empty)")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata, infos, data_start = _read_header(_Cursor(data), path)
    except (struct.error, UnicodeDecodeError, MemoryError, OverflowError) as error:
        raise CheckpointError(f"{path}: the GGUF header is damaged or cut short ({error})") from error
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind_id, offset in infos:
        if name in tensors:
            raise CheckpointError(f"{path}: tensor {name} is there twice")
        tensors[name] = tensor = _locate(path, name, shape, kind_id, data_start + offset)
        if tensor.offset + tensor.size_bytes > file_bytes:
            end = tensor.offset + tensor.size_bytes
            raise CheckpointError(f"{path}: truncated, {name} ends at byte {end} and the file has {file_bytes}")
    return GgufFile(path, metadata, tensors)


def read_tensor(file: GgufFile, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
    """Reads one tensor, or its rows [first, last) along the first axis, as a fresh float32 array."""
    if name not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor {name} is missing")
    tensor = file.tensors[name]
    first, last = rows or (0, tensor.shape[0])
    row_bytes = tensor.size_bytes // tensor.shape[0] if len(tensor.shape) > 1 else None
    if row_bytes is None:  # a vector is one row of blocks
        first, last, row_bytes = 0, 1, tensor.size_bytes
    size_bytes = (last - first) * row_bytes
    raw = np.fromfile(file.path, dtype=np.uint8, count=size_bytes, offset=tensor.offset + first * row_bytes)
    if raw.size != size_bytes:
        raise CheckpointError(f"{file.path}: truncated inside {name}")
    shape = (last - first, *tensor.shape[1:]) if len(tensor.shape) > 1 else tensor.shape
    if tensor.kind == gguf.GGMLQuantizationType.F32:
        return raw.view(np.float32).reshape(shape)
    try:
        return gguf.dequantize(raw.reshape(_rows_at_once(tensor, size_bytes), -1), tensor.kind).reshape(shape)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{file.path}: {name} has type {tensor.kind.name}, which gguf cannot dequantize"
        ) from error


def _rows_at_once(tensor: GgufTensor, size_bytes: int) -> int:
    """As how many rows gguf.dequantize should see the bytes of a tensor.

    It works on 16 rows at a time. A row is nothing but blocks one after another, so rows can be merged: 16 short rows
    (SmolLM2's 576 values) cost it twice the time.
    """
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
    blocks = size_bytes // block_bytes
    return math.gcd(blocks, max(1, blocks * block_values // _DEQUANTIZED_ROW_VALUES))


def without_tensors(path: Path) -> bytes:
    """A GGUF file with the same metadata and no tensors: what a tokenizer is read from."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        version, key_count = _read_start(cursor, path)[0::2]
        start = cursor.place
        for _ in range(key_count):
            cursor.string()
            _read_value(cursor, path, cursor.unpack("I")[0])
        keys = data[start : cursor.place]
    return b"GGUF" + struct.pack("<IQQ", version, 0, key_count) + keys


class _Cursor:
    """A place in the file. Reads beyond its end raise struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.place = 0

    def unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.place)
        self.place += struct.calcsize("<" + layout)
        return values

    def string(self) -> str:
        (length,) = _LENGTH.unpack_from(self.data, self.place)
        start = self.place + 8
        self.place = start + length
        if self.place > len(self.data):
            raise struct.error(f"{length} bytes were announced, {len(self.data) - start} are left")
        # Token texts may hold bytes that are no UTF-8 (byte-level vocabularies of some converters): keep them readable.
        return self.data[start : self.place].decode("utf-8", errors="surrogateescape")


def _read_start(cursor: _Cursor, path: Path) -> tuple[int, int, int]:
    """Version, tensor count and key count."""
    if cursor.data[:4] != b"GGUF":
        raise CheckpointError(f"{path}: not a GGUF file (it does not start with the letters GGUF)")
    cursor.place = 4
    (version,) = cursor.unpack("I")
    if version not in (2, 3):
        raise CheckpointError(f"{path}: GGUF version {version}; versions 2 and 3 are read")
    tensor_count, key_count = cursor.unpack("QQ")
    # Every entry takes more than 8 bytes, so larger counts can only be damage: refuse before looping over them.
    if max(tensor_count, key_count) > len(cursor.data) // 8:
        raise CheckpointError(f"{path}: the GGUF header is damaged ({tensor_count} tensors, {key_count} keys)")
    return version, tensor_count, key_count


def _read_header(cursor: _Cursor, path: Path) -> tuple[dict[str, Any], list[Any], int]:
    _, tensor_count, key_count = _read_start(cursor, path)
    metadata = {cursor.string(): _read_value(cursor, path, cursor.unpack("I")[0]) for _ in range(key_count)}
    infos = list(_read_infos(cursor, path, tensor_count))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}; a positive number is needed")
    return metadata, infos, -(-cursor.place // alignment) * alignment


def _read_infos(cursor: _Cursor, path: Path, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    for _ in range(count):
        name = cursor.string()
        (dimensions,) = cursor.unpack("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(f"{path}: tensor {name} has {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are read")
        shape = cursor.unpack(f"{dimensions}Q")[::-1]  # GGUF counts the fastest dimension first
        kind_id, offset = cursor.unpack("IQ")
        yield name, shape, kind_id, offset


def _locate(path: Path, name: str, shape: tuple[int, ...], kind_id: int, offset: int) -> GgufTensor:
    try:
        kind = gguf.GGMLQuantizationType(kind_id)
    except ValueError as error:
        raise CheckpointError(f"{path}: tensor {name} has the unknown type {kind_id}") from error
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % block_values:
        raise CheckpointError(
            f"{path}: {name} has rows of {shape[-1]}, not whole blocks of {block_values} ({kind.name})"
        )
    return GgufTensor(name, shape, kind, offset, math.prod(shape) // block_values * block_bytes)


def _read_value(cursor: _Cursor, path: Path, kind: int) -> Any:
    if kind in _SCALARS:
        return cursor.unpack(_SCALARS[kind])[0]
    if kind == _STRING:
        return cursor.string()
    if kind == _ARRAY:
        item_kind, count = cursor.unpack("IQ")
        if item_kind == _STRING:
            return [cursor.string() for _ in range(count)]
        if item_kind in _SCALARS:
            return list(cursor.unpack(f"{count}{_SCALARS[item_kind]}"))
    raise CheckpointError(f"{path}: metadata value of the unknown type {kind}")
