"""Arrays of a converted model in Orbax's form: a folder an array, with the array's plain bytes in one file.

Orbax writes them, and restores them whatever the mesh. They are read here by mapping the files: no array is copied that
can be used where it lies, a shard is read without the rest, and the second that Orbax takes to start is saved.
"""

import json
import logging
import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jax import Array

from mimo_jax.errors import CheckpointError


def save_arrays(folder: Path, arrays: Mapping[str, Array]) -> None:
    """Writes a new folder. Names are kept; each is one path component."""
    import orbax.checkpoint as ocp  # half a second and more, which only writing needs

    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # Orbax warns of each checkpoint that is written without OCDBT
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)) as checkpointer:
            checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(dict(arrays)))
    finally:
        logger.setLevel(level)


def map_array(folder: Path, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The array of that type and shape, read-only, as it lies in its file: its bytes are read when they are used.

    Raises CheckpointError naming the folder when it is not there in that form.
    """
    place = folder / name
    try:
        about = json.loads((place / ".zarray").read_text(encoding="utf-8"))
        (file,) = (entry for entry in place.iterdir() if entry.name != ".zarray")
        form = {"chunks": list(shape), "shape": list(shape), "order": "C", "compressor": None, "filters": None}
        wrong = [key for key, value in form.items() if about.get(key) != value]
        if wrong:
            raise ValueError(f"{wrong[0]} is {about.get(wrong[0])}; {form[wrong[0]]} is needed")
        with file.open("rb") as opened:
            bytes_ = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(bytes_, np.uint8).view(dtype).reshape(shape)
    except (ValueError, OSError, AttributeError) as error:
        raise CheckpointError(f"{place}: {error}") from error
