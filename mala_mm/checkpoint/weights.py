"""The published weights: what their authors offer, and by which names they are found here.

Nothing is downloaded. Where a checkpoint may stand, a name such as ``mavit-tiny`` stands for
the file of that name in the folder of weights.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from mala_mm.errors import UserError
from mala_mm.models import ARCHS, FAMILIES

FOLDER_VARIABLE = 'MALA_MM_WEIGHTS'
SUFFIXES = ('.pth', '.safetensors')


@dataclass(frozen=True)
class Weights:
    """An ImageNet-1K classifier that its authors publish.

    Attributes:
        name (str): By which it is found here.
        family (str): ``'mavit'`` or ``'ravlt'``.
        arch (str): The size.
        page (str): Where its authors publish it, as their paper says.
        parameters (int): Counted from the definition, with 1000 classes.
        file (str, optional): Name of the published file; None where it is not known here.
        size (int, optional): Its bytes; None where they are not known here.
        sha256 (str, optional): Its digest; None where it is not known here.
    """

    name: str
    family: str
    arch: str
    page: str
    parameters: int
    file: str | None = None
    size: int | None = None
    sha256: str | None = None


_PAGES = dict(mavit='https://github.com/qhfan/MALA', ravlt='https://github.com/qhfan/RALA')
_PARAMETERS = dict(
    mavit=(16449128, 27142568, 49792648, 97766088),
    ravlt=(14897768, 25591208, 48241288, 95242440),
)
PUBLISHED: dict[str, Weights] = {
    f'{family}-{arch}': Weights(f'{family}-{arch}', family, arch, _PAGES[family], count)
    for family in FAMILIES
    for arch, count in zip(ARCHS, _PARAMETERS[family])
}
"""The eight models, by name."""


def weights_folder() -> Path:
    """Return the folder of weights: ``MALA_MM_WEIGHTS``, or ``mala_mm/weights`` in the cache."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return Path(given).expanduser()
    cache = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    return Path(cache).expanduser() / 'mala_mm' / 'weights'


def resolve(path: str) -> str:
    """Return the file that a name of published weights stands for, or a path as it is.

    Args:
        path (str): A name of :data:`PUBLISHED`, a path or a URL. A file of the name of a model in
            the working directory comes first.

    Raises:
        UserError: If the folder of weights has no file for the name; it says where to get it.
    """
    if os.path.exists(path) or os.sep in path or '.' in path:
        return path
    known = PUBLISHED.get(path)
    if known is None:
        close = difflib.get_close_matches(path, PUBLISHED, n=1, cutoff=0.8)
        if close:
            raise UserError(f'checkpoint {path} does not exist; did you mean {close[0]}?')
        return path
    folder = weights_folder()
    for suffix in SUFFIXES:
        file = folder / f'{known.name}{suffix}'
        if file.is_file():
            return str(file)
    raise UserError(
        f'There are no weights {path} in {folder}; download the ImageNet-1K classifier of '
        f'{FAMILIES[known.family].__name__}-{known.arch} from {known.page} and put it there as '
        f'{known.name}.pth ({FOLDER_VARIABLE} names another folder)'
    )


def table() -> str:
    """Return the table of ``docs/weights.md``, in Markdown."""
    rows = [
        '| name here | published file | size | digest | parameters | source page |',
        '|---|---|---|---|---|---|',
    ]
    for w in PUBLISHED.values():
        size = f'{w.size / 1e6:.0f} MB' if w.size else 'not known'
        rows.append(
            f'| `{w.name}` | {w.file or "not known"} | {size} | {w.sha256 or "not known"} '
            f'| {w.parameters:,} | <{w.page}> |'
        )
    return '\n'.join(rows)
