"""Optimizer wrappers and their constructors."""

from .cpu_amp import CPUAmpOptimWrapper
from .layer_decay import LayerDecayOptimizerConstructor

__all__ = ['CPUAmpOptimWrapper', 'LayerDecayOptimizerConstructor']
