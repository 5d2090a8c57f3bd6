"""Backbones, their layers and heads."""

from .backbones import RAVLT, MAViT
from .heads import ProjectionNeck

__all__ = ['MAViT', 'ProjectionNeck', 'RAVLT']
