"""The backbones MAViT and RAVLT."""

from .archs import ARCHS
from .mavit import MAViT
from .pyramid import AttentionPyramid
from .ravlt import RAVLT

FAMILIES: dict[str, type[AttentionPyramid]] = dict(mavit=MAViT, ravlt=RAVLT)

__all__ = ['ARCHS', 'FAMILIES', 'AttentionPyramid', 'MAViT', 'RAVLT']
