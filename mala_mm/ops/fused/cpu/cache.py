"""Keeps compiled libraries for their user, and loads none that somebody else could write.

Loading a library runs code in it. So the folder has to be the user's own and closed to others, and
the file has to be, byte for byte, what was compiled here: its size and digest stand in its name's
companion. Code that is cut short would kill the process as soon as a missing page is touched.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from mala_mm.files import remove_parts, write_bytes


class CacheError(OSError):
    """The cache folder cannot be trusted."""


def folder() -> Path:
    """Where compiled kernels are kept: ``mala_mm/kernels`` in ``XDG_CACHE_HOME`` or ~/.cache."""
    root = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    return Path(root) / 'mala_mm' / 'kernels'


def load(name: str, make: Callable[[], bytes]) -> ctypes.CDLL:
    """Load a library, made first if it is not there or not what was made.

    Args:
        name (str): Of the file; libraries of the same name are the same.
        make (Callable[[], bytes]): Compiles the library and returns its content.

    Returns:
        ctypes.CDLL: The library.

    Raises:
        CacheError: If others than the user could write to the folder.
        OSError: If it cannot be written or loaded.
    """
    place = folder()
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_private(place)
    file, seal = place / name, place / f'{name}.sha256'
    if not _is_sealed(file, seal):
        remove_parts(place)
        content = make()
        # First the library: a kill in between leaves a seal that does not fit, or none.
        write_bytes(file, content)
        write_bytes(seal, _seal(content))
    return ctypes.CDLL(str(file))


def _check_private(place: Path) -> None:
    status = os.lstat(place)
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(f'{place} is no folder; remove it')
    if status.st_uid != os.geteuid():
        raise CacheError(
            f'{place} belongs to another user (uid {status.st_uid}); set XDG_CACHE_HOME to a '
            'folder of your own'
        )
    if status.st_mode & 0o022:
        raise CacheError(f'others may write to {place}; empty it, then `chmod 700` it')


def _is_sealed(file: Path, seal: Path) -> bool:
    try:
        for path in (file, seal):
            status = os.lstat(path)
            own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if not own or status.st_mode & 0o022:
                return False
        return seal.read_bytes() == _seal(file.read_bytes())
    except OSError:
        return False


def _seal(content: bytes) -> bytes:
    return f'{len(content)} {hashlib.sha256(content).hexdigest()}\n'.encode()
