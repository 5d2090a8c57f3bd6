"""The layers of the backbones."""

from .block import Block
from .ffn import ConvFFN
from .mixer import AttentionMixer
from .norm import LayerNorm2d
from .pointwise import PointwiseConv2d
from .stem import ConvStem

__all__ = [
    'AttentionMixer',
    'Block',
    'ConvFFN',
    'ConvStem',
    'LayerNorm2d',
    'PointwiseConv2d',
]
