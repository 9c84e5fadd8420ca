"""Folders that are there whole or not at all."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mimo_jax.errors import CheckpointError


@contextmanager
def new_folder(folder: Path, size_bytes: int = 0) -> Iterator[Path]:
    """Yields an empty folder to write into. It gets its name at the end; on an error it goes away.

    One process at a time writes a folder. What a killed one left, `.NAME.part` beside it, is cleared by the next.
    Raises CheckpointError when `folder` is there, is being written, cannot be made, or when its disk has no room for
    `size_bytes`.
    """
    folder = Path(os.path.abspath(folder))
    _refuse_existing(folder)
    part = folder.with_name(f".{folder.name}.part")
    lock = _lock(part, folder)
    try:
        _clear(part)
        free_bytes = shutil.disk_usage(part).free
        if free_bytes < size_bytes:
            raise CheckpointError(f"{folder}: needs {size_bytes:,} bytes; its disk has {free_bytes:,} left")
        yield part
        _refuse_existing(folder)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _refuse_existing(folder: Path) -> None:
    if os.path.lexists(folder):  # a link to nowhere too
        raise CheckpointError(f"{folder}: is there already")


def _lock(part: Path, folder: Path) -> int:
    """Makes the part folder and returns it open and locked: until it is closed, nobody else gets here."""
    try:
        part.mkdir(parents=True, exist_ok=True)
        lock = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        raise CheckpointError(f"{folder}: cannot be written: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        own = part.exists() and os.path.samestat(os.fstat(lock), os.lstat(part))
        if own and os.path.lexists(folder):  # whoever had the lock has finished meanwhile
            shutil.rmtree(part)
        _refuse_existing(folder)
        if not own:
            raise BlockingIOError
    except BaseException as error:
        os.close(lock)
        if isinstance(error, BlockingIOError | FileNotFoundError):
            raise CheckpointError(f"{folder}: is being written by another process") from error
        raise
    return lock


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
