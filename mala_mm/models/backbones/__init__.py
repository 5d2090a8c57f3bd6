from .mavit import MAViT
from .pyramid import AttentionPyramid
from .ravlt import RAVLT

__all__ = ['AttentionPyramid', 'MAViT', 'RAVLT']
