"""The backbones for timm: ``import mala_mm.timm`` makes ``timm.create_model`` know them.

    import timm
    import mala_mm.timm

    model = timm.create_model('mavit_tiny', num_classes=10)
    maps = timm.create_model('mavit_tiny', features_only=True)(images)

Names are ``mavit_tiny`` to ``ravlt_large``. ``pretrained=True`` takes the published weights from
the folder of weights, ``checkpoint_path`` a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    register_model,
)
from torch import Tensor, nn

from mala_mm.checkpoint import load_into
from mala_mm.models import ARCHS, FAMILIES, ProjectionNeck


def _stages(indices: int | Sequence[int] | None) -> list[int]:
    """Return the stages that timm asks for: all, the last so many, or those of a list."""
    if indices is None:
        return [0, 1, 2, 3]
    if isinstance(indices, int):
        return list(range(4 - indices, 4))
    return [range(4)[i] for i in indices]


class PyramidForTimm(nn.Module):
    """A classifier with timm's methods around one of our backbones.

    The names of its weights are those of this package's classifiers, ``backbone.``, ``neck.`` and
    ``head.fc.``.

    Args:
        family (str): ``'mavit'`` or ``'ravlt'``.
        arch (str): The size.
        in_chans (int): Channels of the image.
        num_classes (int): Classes; 0 for pooled features.
        global_pool (str): ``'avg'``, or ``''`` for no pooling.
        drop_rate (float): Dropout before the classifier.
        **options: Arguments of the backbone, such as ``drop_path_rate`` and ``attn_types``.
    """

    def __init__(
        self,
        family: str,
        arch: str,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = 'avg',
        drop_rate: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        cls = FAMILIES[family]
        options = {key: value for key, value in options.items() if value is not None}
        self.backbone = cls(arch, in_channels=in_chans, output_norm=False, **options)
        self.backbone.init_weights()
        dims = self.backbone.embed_dims
        self.num_features, self.head_hidden_size = dims[-1], cls.tail_widths[arch]
        self.feature_info = [
            dict(num_chs=dim, reduction=4 * 2**i, module=f'backbone.stages.{i}')
            for i, dim in enumerate(dims)
        ]
        self.neck = ProjectionNeck(dims[-1], self.head_hidden_size)
        self.neck.init_weights()
        self.drop_rate = drop_rate
        self.head = nn.ModuleDict()
        self.reset_classifier(num_classes, global_pool)

    def get_classifier(self) -> nn.Module:
        """Return the last layer."""
        return self.head['fc']

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the last layer.

        Args:
            num_classes (int): Classes; 0 for none.
            global_pool (str, optional): As in the constructor.
        """
        if global_pool not in (None, '', 'avg'):
            raise ValueError(f"global_pool must be 'avg' or '', got {global_pool!r}")
        self.num_classes = num_classes
        self.global_pool = (
            getattr(self, 'global_pool', 'avg') if global_pool is None else global_pool
        )
        fc = nn.Linear(self.head_hidden_size, num_classes) if num_classes else nn.Identity()
        if num_classes:
            nn.init.trunc_normal_(fc.weight, std=0.02)
            nn.init.zeros_(fc.bias)
        self.head['fc'] = fc

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass.

        Args:
            enable (bool): Whether to.
        """
        for stage in self.backbone.stages:
            for block in stage:
                block.with_cp = enable

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last map, (B, C, ceil(H / 32), ceil(W / 32)).

        Args:
            x (Tensor): Images of shape (B, in_chans, H, W).
        """
        return self.backbone(x)[-1]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits, or what comes before the classifier.

        Args:
            x (Tensor): The last map.
            pre_logits (bool): Whether to stop before the classifier.
        """
        if self.global_pool == '':
            return F.silu(self.neck.norm(self.neck.proj(x)))
        (x,) = self.neck((x,))
        x = F.dropout(x, self.drop_rate, self.training)
        return x if pre_logits else self.head['fc'](x)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (B, num_classes).

        Args:
            x (Tensor): Images of shape (B, in_chans, H, W).
        """
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return the maps of stages, as timm asks for them.

        Args:
            x (Tensor): Images of shape (B, in_chans, H, W).
            indices (int | Sequence[int], optional): Stages, or how many of the last; all by
                default.
            norm (bool): Not used: the stages of a classifier have no output norms.
            stop_early (bool): Not used: see ``out_indices``.
            output_fmt (str): ``'NCHW'``.
            intermediates_only (bool): Whether to leave the last map out of the answer.
        """
        if output_fmt != 'NCHW':
            raise ValueError(f"output_fmt must be 'NCHW', got {output_fmt!r}")
        maps = self.backbone(x)
        chosen = [maps[i] for i in _stages(indices)]
        return chosen if intermediates_only else (maps[-1], chosen)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Leave the classifier out, and return the chosen stages.

        Args:
            indices (int | Sequence[int]): As in :meth:`forward_intermediates`.
            prune_norm (bool): Not used.
            prune_head (bool): Whether to remove the classifier.
        """
        if prune_head:
            self.neck = nn.Identity()
            self.reset_classifier(0, '')
        return _stages(indices)


default_cfgs = generate_default_cfgs(
    {
        f'{family}_{arch}': dict(
            input_size=(3, 224, 224),
            fixed_input_size=False,
            pool_size=(7, 7),
            crop_pct=0.875,
            interpolation='bicubic',
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
            num_classes=1000,
            first_conv='backbone.stem.0',
            classifier='head.fc',
        )
        for family in FAMILIES
        for arch in ARCHS
    }
)


def _entry(family: str, arch: str) -> Callable[..., nn.Module]:
    def build(pretrained: bool = False, **options: Any) -> nn.Module:
        model = build_model_with_cfg(
            partial(PyramidForTimm, family, arch),
            f'{family}_{arch}',
            pretrained=False,
            feature_cfg=dict(feature_cls='getter', out_indices=(0, 1, 2, 3)),
            **options,
        )
        if pretrained:
            name = f'{family}-{arch}'
            if options.get('features_only'):
                load_into(model.model.backbone, name)
            else:
                load_into(model, name, other_heads=True)
        return model

    build.__name__ = build.__qualname__ = f'{family}_{arch}'
    build.__module__ = __name__
    build.__doc__ = f'Build {FAMILIES[family].__name__}-{arch}, for ``timm.create_model``.'
    return build


for _family in FAMILIES:
    for _arch in ARCHS:
        register_model(_entry(_family, _arch))
