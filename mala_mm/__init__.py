"""Magnitude-aware linear attention (MALA, RALA) for OpenMMLab.

Importing the package registers its models, so that ``type='MAViT'`` builds from the registries of
mmengine, mmdet, mmseg and mmpretrain. The prefixed name ``type='mala_mm.MAViT'`` needs no import
at all. ``mala_mm.ops`` needs nothing but torch.
"""

from importlib import import_module as _import_module

from .version import __version__

__all__ = ['__version__']

# The operators and the doctor have to work where mmcv, mmengine or torch are missing or broken,
# whatever the error: `python -m mala_mm.doctor` names it, and so does the first use of the models.
try:
    _import_module('mmcv.cnn')
except Exception:
    pass
else:
    from . import registry as _registry

    _registry.MODELS.import_from_location()
