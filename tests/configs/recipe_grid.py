"""The grid that ``configs/`` has to hold: the published recipes, typed again for the tests."""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mmengine.config import Config
from mmengine.registry import DefaultScope

from mala_mm.models import ARCHS, FAMILIES

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
SIZES = {name[0]: name for name in ARCHS}  # as in the names of configs


@dataclass(frozen=True)
class Recipe:
    """One row of the table of recipes."""

    name: str  # of the file, with {} for the backbone
    task: str  # folder of the configs
    scope: str  # OpenMMLab library
    sizes: str
    batch: int  # over 8 devices
    lr: float
    weight_decay: float
    spared: frozenset[str]  # kinds of parameters without weight decay
    loss_scale: float | str | None  # under AMP
    length: int  # epochs, or iterations for segmentation


NORMS, NOTHING = frozenset({'norm'}), frozenset()
RECIPES = {
    r.name: r
    for r in (
        Recipe(
            'retinanet_{}_fpn_amp-1x_coco',
            *('det', 'mmdet', 'tsbl', 16, 1e-4, 1e-4, NOTHING, 512.0, 12),
        ),
        Recipe(
            'mask-rcnn_{}_fpn_amp-1x_coco',
            *('det', 'mmdet', 'tsbl', 16, 1e-4, 0.05, NORMS, 'dynamic', 12),
        ),
        Recipe(
            'mask-rcnn_{}_fpn_amp-ms-crop-3x_coco',
            *('det', 'mmdet', 'sbl', 16, 1e-4, 0.05, NORMS, 'dynamic', 36),
        ),
        Recipe(
            'cascade-mask-rcnn_{}_fpn_amp-ms-crop-3x_coco',
            *('det', 'mmdet', 'sbl', 16, 1e-4, 0.05, NORMS, 'dynamic', 36),
        ),
        Recipe(
            'fpn_{}_8xb2-80k_ade20k-512x512',
            *('seg', 'mmseg', 'tsbl', 16, 1e-4, 1e-4, NOTHING, None, 80_000),
        ),
        Recipe(
            'upernet_{}_8xb2-amp-160k_ade20k-512x512',
            *('seg', 'mmseg', 'tsbl', 16, 6e-5, 0.01, NORMS, 'dynamic', 160_000),
        ),
        Recipe(
            '{}_8xb128_in1k',
            *('cls', 'mmpretrain', 'tsbl', 1024, 1e-3, 0.05, NORMS | {'bias'}, None, 300),
        ),
    )
}


@dataclass(frozen=True)
class Entry:
    """One config file."""

    recipe: Recipe
    family: str
    size: str

    @property
    def file(self) -> str:
        """Path below ``configs/``."""
        name = self.recipe.name.format(f'{self.family}-{self.size}')
        return f'{self.recipe.task}/{self.family}/{name}.py'

    @property
    def lr(self) -> float:
        """RAVLT's detection rates are the paper's, MAViT's those of its released configs."""
        if self.recipe.task != 'det' or self.family == 'ravlt':
            return self.recipe.lr
        return 2e-4 if self.size == 'l' and self.recipe.length == 36 else 4e-4

    def load(self) -> Config:
        """A copy that the caller may change."""
        return copy.deepcopy(_load(self.file))

    def __str__(self) -> str:
        return Path(self.file).stem


@cache
def _load(file: str) -> Config:
    return Config.fromfile(CONFIGS / file)


GRID = [
    Entry(recipe, family, size)
    for recipe in RECIPES.values()
    for family in FAMILIES
    for size in recipe.sizes
]


def scope_of(cfg: Config):
    """A context in which names without prefix mean the config's own library."""
    importlib.import_module(f'{cfg.default_scope}.utils').register_all_modules(False)
    return DefaultScope.overwrite_default_scope(cfg.default_scope)


def to_cpu(cfg: Config) -> Config:
    """Mixed precision off: its wrapper asks for a GPU."""
    cfg.optim_wrapper.type = 'OptimWrapper'
    cfg.optim_wrapper.pop('loss_scale', None)
    return cfg
