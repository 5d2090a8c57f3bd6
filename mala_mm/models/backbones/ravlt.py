"""RAVLT, the Rank-Augmented Vision Linear Transformer."""

from mala_mm.registry import register_backbone

from .archs import ARCHS
from .pyramid import AttentionPyramid


@register_backbone
class RAVLT(AttentionPyramid):
    """Rank-Augmented Vision Linear Transformer, with RALA in its early stages.

    `Breaking the Low-Rank Dilemma of Linear Attention <https://arxiv.org/abs/2411.07635>`_
    (CVPR 2025). For the arguments see :class:`AttentionPyramid`.
    """

    default_attn_types = ('rala', 'rala', 'softmax', 'softmax')
    tail_widths = dict.fromkeys(ARCHS, 1024)
