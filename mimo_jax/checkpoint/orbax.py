"""Arrays of a converted model in Orbax's form: a folder an array, with the array's plain bytes in one file.

Orbax writes them, and restores them whatever the mesh. They are read here by mapping the files: no array is copied that
can be used where it lies, a shard is read without the rest, and the second that Orbax takes to start is saved.
"""

import ctypes
import importlib
import json
import logging
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
from jax import Array

from mimo_jax.errors import CheckpointError


def save_arrays(folder: Path, arrays: Mapping[str, Array]) -> None:
    """Writes a new folder. Names are kept; each is one path component.

    Orbax cannot stop halfway: it works in a thread of its own, which an interrupt waits for. Raises CheckpointError.
    """
    importlib.import_module("orbax.checkpoint")  # sets its own log level
    with _silence("absl", "asyncio"), ThreadPoolExecutor(1) as thread:
        thread.submit(_save, folder.absolute(), dict(arrays)).result()


def _save(folder: Path, arrays: dict[str, Array]) -> None:
    import orbax.checkpoint as ocp  # half a second and more, which only writing needs

    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)) as checkpointer:
            checkpointer.save(folder, args=ocp.args.PyTreeSave(arrays))
    except (ValueError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: cannot be written: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Without the places in the source that follow."""
    return str(error).splitlines()[0].split(" [source locations=")[0] if str(error) else repr(error)


@contextmanager
def _silence(*names: str) -> Iterator[None]:
    """Orbax warns of each checkpoint without OCDBT, and logs the traceback of each array that it could not write."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def map_array(place: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The array in folder `place`, read-only, as it lies in its file: its bytes are read when they are used.

    Raises CheckpointError naming the folder when it is not there in that form.
    """
    try:
        about = json.loads((place / ".zarray").read_text(encoding="utf-8"))
        form = {"zarr_format": 2, "dtype": _zarr_name(dtype), "chunks": list(shape), "shape": list(shape)}
        form |= {"order": "C", "dimension_separator": ".", "compressor": None, "filters": None}
        wrong = [key for key, value in form.items() if about.get(key) != value]
        if wrong:
            raise ValueError(f"{wrong[0]} is {about.get(wrong[0])}; {form[wrong[0]]} is needed")
        return _map_file(place / ".".join("0" * len(shape))).view(dtype).reshape(shape)
    except (ValueError, OSError, AttributeError) as error:
        raise CheckpointError(f"{place}: {error}") from error


def _zarr_name(dtype: np.dtype) -> str:
    return dtype.name if dtype.isbuiltin == 2 else dtype.str  # 2: a type that NumPy itself does not have


def _map_file(file: Path) -> np.ndarray:
    """A file's bytes, mapped for as long as somebody refers to them.

    Python's `mmap` keeps a file descriptor for each file (until 3.13 and its `trackfd=False`), and a large model has
    more arrays than a process may have open files.
    """
    libc = _libc()
    with file.open("rb") as opened:
        size_bytes = os.fstat(opened.fileno()).st_size
        address = libc.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_PRIVATE, opened.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
    owner = (ctypes.c_uint8 * size_bytes).from_address(address)
    weakref.finalize(owner, libc.munmap, address, size_bytes).atexit = False  # devices may still use it then
    mapped = np.frombuffer(memoryview(owner), np.uint8)
    mapped.flags.writeable = False
    return mapped


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
