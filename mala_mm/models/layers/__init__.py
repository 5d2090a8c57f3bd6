from .block import Block
from .ffn import ConvFFN
from .mixer import ATTENTION_TYPES, AttentionMixer
from .norm import LayerNorm2d
from .stem import ConvStem

__all__ = ['ATTENTION_TYPES', 'AttentionMixer', 'Block', 'ConvFFN', 'ConvStem', 'LayerNorm2d']
