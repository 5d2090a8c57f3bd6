"""Attention operators over two-dimensional feature maps. Needs torch only."""

from . import operators
from .causal import CausalState, causal_attention, causal_step, empty_state, masked_attention
from .fused.dispatch import BACKENDS, choose_backend, gated_attention
from .fused.library import MALA_FORMS
from .operators.linear import linear_attention
from .operators.mala import mala_attention
from .operators.rala import rala_attention
from .operators.softmax import softmax_attention
from .registry import OPERATORS, Operator, build_operator, get_operator, register_operator
from .rotary import apply_rotary, rotary_frequencies, rotary_tables

__all__ = [
    'BACKENDS',
    'CausalState',
    'MALA_FORMS',
    'OPERATORS',
    'Operator',
    'apply_rotary',
    'build_operator',
    'causal_attention',
    'causal_step',
    'choose_backend',
    'empty_state',
    'gated_attention',
    'get_operator',
    'linear_attention',
    'mala_attention',
    'masked_attention',
    'operators',
    'rala_attention',
    'register_operator',
    'rotary_frequencies',
    'rotary_tables',
    'softmax_attention',
]
