"""Attention operators over two-dimensional feature maps. Needs torch only."""

from .dispatch import (
    BACKENDS,
    MALA_FORMS,
    choose_backend,
    gated_attention,
    linear_attention,
    mala_attention,
    rala_attention,
    softmax_attention,
)
from .rotary import apply_rotary, rotary_frequencies, rotary_tables

__all__ = [
    'BACKENDS',
    'MALA_FORMS',
    'apply_rotary',
    'choose_backend',
    'gated_attention',
    'linear_attention',
    'mala_attention',
    'rala_attention',
    'rotary_frequencies',
    'rotary_tables',
    'softmax_attention',
]
