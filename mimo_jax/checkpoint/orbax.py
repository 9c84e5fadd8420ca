"""Arrays of a converted model in Orbax's form: a folder an array, plain bytes, read straight into device shards."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax import Array

from mimo_jax.errors import CheckpointError

# An array is stored in pieces of this size at most, so that a shard of it is read without the rest.
_PIECE_BYTES = 64 << 20


def save_arrays(folder: Path, arrays: Mapping[str, Array]) -> None:
    """Writes a new folder. Names are kept; each is one path component."""
    args = {name: ocp.SaveArgs(chunk_byte_size=_PIECE_BYTES) for name in arrays}
    with _checkpointer() as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(dict(arrays), save_args=args))


def restore_arrays(folder: Path, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Reads those arrays, cast to the given dtypes, onto the given shardings; without one, as NumPy arrays.

    Raises CheckpointError naming the folder when an array is not there or has another shape.
    """
    wanted = dict(shapes)
    restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
    args = ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args, partial_restore=True)
    try:
        with _checkpointer() as checkpointer:
            return checkpointer.restore(folder.absolute(), args=args)
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _checkpointer() -> Any:
    # Compressed weights would be 40 % smaller and twice as slow to read.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False))
