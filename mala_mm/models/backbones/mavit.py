"""MAViT, the Magnitude-Aware Vision Transformer."""

from mala_mm.registry import register_backbone

from .pyramid import AttentionPyramid


@register_backbone
class MAViT(AttentionPyramid):
    """Magnitude-Aware Vision Transformer, with MALA in its early stages.

    `Rectifying Magnitude Neglect in Linear Attention <https://arxiv.org/abs/2507.00698>`_
    (ICCV 2025). For the arguments see :class:`AttentionPyramid`.

    Examples:
        >>> import torch
        >>> from mala_mm.models import MAViT
        >>> backbone = MAViT('tiny').eval()
        >>> [tuple(x.shape) for x in backbone(torch.rand(1, 3, 75, 100))]
        [(1, 64, 19, 25), (1, 128, 10, 13), (1, 256, 5, 7), (1, 512, 3, 4)]
    """

    default_attn_types = ('mala', 'mala', 'softmax', 'softmax')
    tail_widths = dict(tiny=2048, small=2048, base=2048, large=2560)
