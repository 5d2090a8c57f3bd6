"""The convolutional stem, stride 4."""

from mmcv.cnn import build_norm_layer
from mmengine.model import Sequential
from torch import nn


class ConvStem(Sequential):
    """Four 3x3 convolutions with norms, from the image to the first stage at stride 4.

    ``conv/2 -> C/2, conv -> C/2, conv -> C/2`` with norm and GELU each, then ``conv/2 -> C`` with
    norm; biases everywhere.

    Args:
        in_channels (int): Channels of the image.
        embed_dims (int): Width C of the first stage.
        norm_cfg (dict): Norm layer, e.g. ``dict(type='BN')``.
    """

    def __init__(self, in_channels: int, embed_dims: int, norm_cfg: dict) -> None:
        hidden = embed_dims // 2
        layers: list[nn.Module] = []
        for inputs, outputs, stride in (
            (in_channels, hidden, 2),
            (hidden, hidden, 1),
            (hidden, hidden, 1),
            (hidden, embed_dims, 2),
        ):
            layers.append(nn.Conv2d(inputs, outputs, 3, stride, padding=1))
            layers.append(build_norm_layer(norm_cfg, outputs)[1])
            layers.append(nn.GELU())
        super().__init__(*layers[:-1])
