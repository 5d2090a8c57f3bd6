"""The convolutional stem, stride 4."""

from mmcv.cnn import build_norm_layer
from mmengine.model import Sequential
from torch import Tensor, nn

from .inference import bands, can_convolve_all, convolve_all


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

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, in_channels, H, W) to (B, C, ceil(H / 4), ceil(W / 4))."""
        if not can_convolve_all(self, x):
            return super().forward(x)
        batch, _, height, width = x.shape
        size = -(-height // 4), -(-width // 4)
        elements = 4 * self[0].out_channels * size[0] * size[1]
        out = None
        # A band's edges see zeros in place of the rows beyond: two rows of the result are lost.
        for images, rows, with_halo, inside in bands(batch, size[0], elements, halo=2):
            part = x[images, :, 4 * with_halo.start : 4 * with_halo.stop]
            part = convolve_all(self, part)[:, :, inside]
            if out is None:
                out = part.new_empty(batch, *size, part.shape[1]).permute(0, 3, 1, 2)
            out[images, :, rows] = part
        return out
