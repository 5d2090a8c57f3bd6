"""Backbones, their layers and heads."""

from .backbones import MAViT, RAVLT

__all__ = ['MAViT', 'RAVLT']
