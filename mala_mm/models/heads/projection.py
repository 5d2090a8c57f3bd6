"""The classifier tail of MAViT and RAVLT."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from mmengine.model import BaseModule
from torch import Tensor, nn

from mala_mm.registry import MODELS


@MODELS.register_module()
class ProjectionNeck(BaseModule):
    """Projection and pooling in front of the linear layer of a classifier.

    ``Conv1x1 -> norm -> SiLU -> global average pooling``. A neck in mmpretrain's terms:
    ``LinearClsHead`` on top of it completes the classifier tail of both families.

    Args:
        in_channels (int): Channels of the last stage.
        out_channels (int): Width of the projection. Those of the published models are the
            ``tail_widths`` of :class:`MAViT` and :class:`RAVLT`.
        norm_cfg (dict): Norm layer, ``dict(type='BN')`` or ``dict(type='SyncBN')``.
        init_cfg (dict | list[dict], optional): mmengine's initialisation config.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        norm_cfg: dict = dict(type='BN'),  # noqa: B006, never changed
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        if init_cfg is None:
            init_cfg = [
                dict(type='TruncNormal', layer='Conv2d', std=0.02, bias=0.0),
                dict(type='Constant', layer='_BatchNorm', val=1.0, bias=0.0),
            ]
        super().__init__(init_cfg=init_cfg)
        self.proj = nn.Conv2d(in_channels, out_channels, 1)
        self.norm = build_norm_layer(norm_cfg, out_channels)[1]

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor]:
        """Pool the last of the given maps.

        Args:
            inputs (Sequence[Tensor]): Maps of a backbone, the last of shape (B, in_channels, H, W).

        Returns:
            tuple[Tensor]: One tensor of shape (B, out_channels).
        """
        x = F.silu(self.norm(self.proj(inputs[-1])))
        return (x.mean(dim=(-2, -1)),)
