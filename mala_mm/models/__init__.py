"""Backbones, their layers and heads."""

from .backbones import RAVLT, MAViT

__all__ = ['MAViT', 'RAVLT']
