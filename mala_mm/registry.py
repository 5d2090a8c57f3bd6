"""The registries of mala_mm, children of mmengine's root registries.

A prefixed name such as ``type='mala_mm.MAViT'`` imports this module by itself, from any config.
"""

from collections.abc import Callable
from typing import Any

from mmengine.registry import DATASETS as MMENGINE_DATASETS
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS as MMENGINE_OPTIM_WRAPPER_CONSTRUCTORS
from mmengine.registry import OPTIM_WRAPPERS as MMENGINE_OPTIM_WRAPPERS
from mmengine.registry import WEIGHT_INITIALIZERS as MMENGINE_WEIGHT_INITIALIZERS
from mmengine.registry import Registry

from .compat import allow_mmengine_types, name_packages

allow_mmengine_types()
name_packages()

MODELS = Registry('model', parent=MMENGINE_MODELS, scope='mala_mm', locations=['mala_mm.models'])
DATASETS = Registry(
    'dataset',
    parent=MMENGINE_DATASETS,
    scope='mala_mm',
    locations=['mala_mm.data.imagenet_v2'],
)
HOOKS = Registry('hook', parent=MMENGINE_HOOKS, scope='mala_mm', locations=['mala_mm.engine.hooks'])
OPTIM_WRAPPERS = Registry(
    'optim_wrapper',
    parent=MMENGINE_OPTIM_WRAPPERS,
    scope='mala_mm',
    locations=['mala_mm.engine.optimizers'],
)
OPTIM_WRAPPER_CONSTRUCTORS = Registry(
    'optimizer wrapper constructor',
    parent=MMENGINE_OPTIM_WRAPPER_CONSTRUCTORS,
    scope='mala_mm',
    locations=['mala_mm.engine.optimizers'],
)
WEIGHT_INITIALIZERS = Registry(
    'weight initializer',
    parent=MMENGINE_WEIGHT_INITIALIZERS,
    scope='mala_mm',
    locations=['mala_mm.checkpoint'],
)


def _stand_in(name: str) -> Callable:
    """Make a function that loads the models when it is called, and builds one by its name."""

    def build(*args: Any, **kwargs: Any) -> Any:
        return MODELS.get(name)(*args, **kwargs)

    build.__name__ = build.__qualname__ = name
    return build


# A bare name is looked up in a library's own registry and then in mmengine's root, the only place
# that mmdet, mmseg and mmpretrain share, and which looks nowhere for what it does not hold.
_STAND_INS = {name: _stand_in(name) for name in ('MAViT', 'RAVLT')}
for _name, _build in _STAND_INS.items():
    MMENGINE_MODELS.register_module(name=_name, module=_build)


def register_backbone(cls: type) -> type:
    """Register a backbone as ``mala_mm.Name`` and, for every OpenMMLab library, as ``Name``."""
    name = cls.__name__
    is_stand_in = MMENGINE_MODELS.module_dict.get(name, cls) is _STAND_INS.get(name)
    MODELS.register_module(module=cls)
    MMENGINE_MODELS.register_module(module=cls, force=is_stand_in)
    return cls
