"""Backbones, their layers and heads."""

from .backbones import ARCHS, FAMILIES, RAVLT, MAViT
from .heads import ProjectionNeck

__all__ = ['ARCHS', 'FAMILIES', 'MAViT', 'ProjectionNeck', 'RAVLT']
