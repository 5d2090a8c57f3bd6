"""Magnitude-aware linear attention (MALA, RALA) for OpenMMLab.

Importing the package makes its backbones known to mmengine without loading them, so that
``type='MAViT'`` builds from the registries of mmengine, mmdet, mmseg and mmpretrain. The prefixed
name ``type='mala_mm.MAViT'`` needs no import at all. ``mala_mm.ops`` needs nothing but torch.
"""

import logging as _logging

from .version import __version__

__all__ = ['__version__', 'registration_error']

registration_error: Exception | None = None
"""Why mmengine does not know the models, if it does not; ``python -m mala_mm.doctor`` shows it."""

# The operators and the doctor have to work where mmengine or torch are missing or broken, whatever
# the error.
try:
    from . import registry as _registry  # noqa: F401
except Exception as _error:
    registration_error = _error
    _logging.getLogger(__name__).log(
        # Who uses the operators alone has no mmengine, and need not hear of it.
        _logging.INFO if isinstance(_error, ModuleNotFoundError) else _logging.WARNING,
        'mmengine does not know the models of mala_mm (%s: %s); python -m mala_mm.doctor says more',
        type(_error).__name__,
        _error,
    )
