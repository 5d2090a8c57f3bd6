"""Magnitude-aware linear attention (MALA, RALA) for OpenMMLab.

Importing the package registers its models, so that ``type='MAViT'`` builds from the registries of
mmengine, mmdet, mmseg and mmpretrain. The prefixed name ``type='mala_mm.MAViT'`` needs no import
at all. ``mala_mm.ops`` needs nothing but torch.
"""

import importlib.util as _importlib_util

from .version import __version__

__all__ = ['__version__']

# The operators and the doctor have to work where mmengine or mmcv are missing.
if all(_importlib_util.find_spec(name) for name in ('torch', 'mmengine', 'mmcv')):
    try:
        from . import registry as _registry

        _registry.MODELS.import_from_location()
    except ImportError:
        # A broken installation: `python -m mala_mm.doctor` names the cause, and the first use of
        # `mala_mm.models` raises the original error.
        pass
