"""Files and folders that appear whole or not at all. Needs the standard library only."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(
    path: str | os.PathLike, verify: Callable[[Path], object] | None = None
) -> Iterator[Path]:
    """Let a file that is written inside take the place of another in one step.

    What a kill or a full disk interrupts leaves ``path`` as it was. The part lies in the same
    folder, so that renaming it is atomic; file and folder have reached the disk in the end, so that
    a power cut finds one or the other. Its writer holds a lock on it, by which :func:`remove_parts`
    tells parts in use from stale ones.

    Args:
        path (str | os.PathLike): The file to make or replace.
        verify (Callable[[Path], object], optional): Called with the complete part before it takes
            its place; what it raises keeps ``path`` as it was. Read the file back in it.

    Yields:
        Path: The empty part, for the block to fill. It has the mode that any new file gets.

    Raises:
        OSError: If the file cannot be written.
    """
    path = Path(path)
    part = _part_of(path)
    lock = os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    try:
        _lock(lock)
        yield part
        _sync(part)
        if verify is not None:
            verify(part)
        os.replace(part, path)
        _sync_names(path.parent)
    finally:
        part.unlink(missing_ok=True)
        os.close(lock)


@contextmanager
def replacing_folder(path: str | os.PathLike) -> Iterator[Path]:
    """Let a folder that is filled inside take the place of another, as :func:`replacing` does.

    The folder that was there moves aside first, so that for a moment there may be none.

    Args:
        path (str | os.PathLike): The folder to make or replace.

    Yields:
        Path: The empty part, for the block to fill.

    Raises:
        OSError: If the folder cannot be written.
    """
    path = Path(path)
    part = _part_of(path)
    old = part.with_suffix('.old')
    part.mkdir()
    lock = os.open(part, os.O_RDONLY)
    try:
        _lock(lock)
        yield part
        if path.exists():
            path.rename(old)
        part.rename(path)
        _sync_names(path.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        os.close(lock)
    shutil.rmtree(old, ignore_errors=True)


def write_bytes(path: str | os.PathLike, content: bytes) -> None:
    """Write a file through :func:`replacing`.

    Args:
        path (str | os.PathLike): The file to make or replace.
        content (bytes): What it shall hold.

    Raises:
        OSError: If the file cannot be written.
    """
    with replacing(path) as part:
        part.write_bytes(content)


def remove_parts(folder: str | os.PathLike, name: str = '*') -> list[Path]:
    """Remove the parts that killed processes left, and none that is being written.

    Args:
        folder (str | os.PathLike): Where to look; it need not exist.
        name (str): The pattern of the files that the parts were to become. Defaults to all.

    Returns:
        list[Path]: What was removed.
    """
    removed = []
    for part in Path(folder).glob(f'.{name}.????????.part'):
        with suppress(OSError):  # gone meanwhile, in use, or not ours to remove
            lock = os.open(part, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(part) if part.is_dir() else part.unlink()
                removed.append(part)
            finally:
                os.close(lock)
    return removed


def _part_of(path: Path) -> Path:
    return path.with_name(f'.{path.name}.{secrets.token_hex(4)}.part')


def _lock(descriptor: int) -> None:
    with suppress(OSError):  # some network file systems know no locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_names(folder: Path) -> None:
    with suppress(OSError):  # some network file systems refuse; the file is in its place already
        _sync(folder)
