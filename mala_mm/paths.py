"""Where the configs and tools lie that belong to this package."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_INSTALLED = _PACKAGE / '.mim' / 'configs'

ROOT: Path = (_INSTALLED if _INSTALLED.exists() else _PACKAGE.parent / 'configs').resolve().parent
"""The folder of ``configs/`` and ``tools/``: the checkout, or ``mala_mm/.mim`` in a wheel."""
