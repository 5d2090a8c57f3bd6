"""The pyramid that MAViT and RAVLT share."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from mmcv.cnn import build_norm_layer, fuse_conv_bn
from mmengine.logging import print_log
from mmengine.model import BaseModule, ModuleList, PretrainedInit, Sequential
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mala_mm.registry import WEIGHT_INITIALIZERS

from ..layers import Block, ConvStem, LayerNorm2d, inference
from .archs import ARCHS
from .arguments import (
    check_norm_cfg,
    check_rate,
    is_integer,
    parse_arch,
    parse_attn_cfg,
    parse_attn_types,
    parse_out_indices,
    require,
)


def _in_groups(stage: nn.Module, x: Tensor) -> Tensor:
    """Take so many images through a stage that a block's maps stay in the cache, at inference."""
    batch, channels, height, width = x.shape
    if x.device.type != 'cpu' or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return stage(x)
    images = max(1, inference.BAND_ELEMENTS // (4 * channels * height * width))
    if images >= batch:
        return stage(x)
    return torch.cat([stage(part) for part in x.split(images)])


def _downsample(layers: Sequential, x: Tensor) -> Tensor:
    if inference.can_convolve_all(layers, x):
        return inference.convolve_all(layers, x)
    return layers(x)


class AttentionPyramid(BaseModule):
    """A four-stage vision transformer, strides 4 to 32, with an attention operator per stage.

    The base of :class:`MAViT` and :class:`RAVLT`, which only name their linear attention, and the
    widths of their classifiers' projection (``tail_widths``, by size). The
    published models are hybrids: linear attention in stages 1 and 2, where the maps are large,
    softmax attention in stages 3 and 4. Weights do not depend on that choice, so a checkpoint
    loads into the wrong one without an error. State dicts therefore note it, and loading one into
    a model with other operators warns.

    Args:
        arch (str | dict): ``'tiny'``, ``'small'``, ``'base'``, ``'large'`` or a dict with
            ``embed_dims``, ``depths``, ``num_heads`` (one number per stage) and, optionally,
            ``mlp_ratio`` (default 3.5), ``drop_path_rate`` (default 0) and
            ``layer_scale_init_values`` (one per stage, default 1).
        in_channels (int): Channels of the image.
        attn_types (Sequence[str], optional): The operator of each stage, by its registered name:
            one of :data:`mala_mm.ops.OPERATORS`.
            Defaults to the published assignment.
        attn_cfg (dict | Sequence[dict], optional): Options of the operators, see their classes in
            :mod:`mala_mm.ops.operators`. One dict serves all stages, and each operator takes the
            options that it has; or one dict per stage, all of whose options its operator must have.
        out_indices (Sequence[int]): Stages whose maps are returned. Stages after the last of them
            are not built.
        frozen_stages (int): Stop the training of the stem (0) and of the first n stages with the
            downsampling that leads into them (n). -1 freezes nothing. Output norms, which
            pretrained classifiers do not have, stay trainable.
        drop_path_rate (float, optional): Rate of the last block; it rises linearly from 0 over all
            blocks. Defaults to that of ``arch``.
        norm_cfg (dict): Norm of the stem and of the downsampling, ``dict(type='BN')`` or
            ``dict(type='SyncBN')``.
        norm_eval (bool): Whether to keep those norms (SyncBN too) in evaluation mode.
        output_norm (bool): Whether each returned map passes a LayerNorm of its own, as dense
            prediction wants it. The published classifiers have none.
        with_cp (bool): Whether to recompute blocks in the backward pass, to save memory.
        deploy (bool): For inference alone: call :meth:`deploy` before the first image.
        init_cfg (dict | list[dict], optional): mmengine's initialisation config.
            ``dict(type='Pretrained', checkpoint=...)`` takes this package's files and those with
            the published names, see :func:`mala_mm.checkpoint.load_into`, once ``init_weights()``
            is called, as mmengine's runner does.
        pretrained (str, optional): The same file, loaded at once.

    Raises:
        TypeError: If ``arch`` is neither a name nor a dict.
        ValueError: If an argument names an unknown arch, operator, stage or norm, or a number is
            out of its range.
    """

    arch_zoo = {key: arch for name, arch in ARCHS.items() for key in (name[0], name)}
    default_attn_types = ('linear', 'linear', 'softmax', 'softmax')

    def __init__(
        self,
        arch: str | dict = 'tiny',
        in_channels: int = 3,
        attn_types: Sequence[str] | None = None,
        attn_cfg: dict | None = None,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        frozen_stages: int = -1,
        drop_path_rate: float | None = None,
        norm_cfg: dict = dict(type='BN'),  # noqa: B006, never changed
        norm_eval: bool = False,
        output_norm: bool = True,
        with_cp: bool = False,
        deploy: bool = False,
        init_cfg: dict | list[dict] | None = None,
        pretrained: str | None = None,
    ) -> None:
        if pretrained is not None:
            if init_cfg is not None:
                raise ValueError('give pretrained or init_cfg, not both')
            init_cfg = dict(type='Pretrained', checkpoint=pretrained)
        if init_cfg is None:
            init_cfg = [
                dict(type='TruncNormal', layer='Conv2d', std=0.02, bias=0.0),
                dict(type='Constant', layer=['LayerNorm', '_BatchNorm'], val=1.0, bias=0.0),
            ]
        super().__init__(init_cfg=init_cfg)
        arch = parse_arch(arch, self.arch_zoo)
        self.embed_dims, self.depths = arch['embed_dims'], arch['depths']
        num_stages = len(self.depths)
        self.attn_types = parse_attn_types(attn_types, self.default_attn_types, num_stages)
        self.out_indices = parse_out_indices(out_indices, num_stages)
        frozen = is_integer(frozen_stages, -1, num_stages)
        require(frozen, 'frozen_stages', f'an int from -1 to {num_stages}', frozen_stages)
        require(is_integer(in_channels, 1), 'in_channels', 'a positive int', in_channels)
        flags = dict(norm_eval=norm_eval, output_norm=output_norm, with_cp=with_cp)
        for name, flag in flags.items():
            require(isinstance(flag, bool), name, 'True or False', flag)
        attn_cfgs = parse_attn_cfg(attn_cfg, self.attn_types)
        check_norm_cfg(norm_cfg)
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self._deploy_first, self._deployed = deploy, False
        if drop_path_rate is None:
            drop_path_rate = arch['drop_path_rate']
        check_rate(drop_path_rate)
        last_block = max(sum(self.depths) - 1, 1)
        drop_path_rates = [drop_path_rate * i / last_block for i in range(sum(self.depths))]

        self.stem = ConvStem(in_channels, self.embed_dims[0], norm_cfg)
        self.downsamples = ModuleList()
        self.stages = ModuleList()
        for i in range(max(self.out_indices) + 1):
            dims, depth = self.embed_dims[i], self.depths[i]
            if i > 0:
                self.downsamples.append(
                    Sequential(
                        nn.Conv2d(self.embed_dims[i - 1], dims, 3, stride=2, padding=1),
                        build_norm_layer(norm_cfg, dims)[1],
                    )
                )
            first = sum(self.depths[:i])
            self.stages.append(
                Sequential(
                    *[
                        Block(
                            dims,
                            arch['num_heads'][i],
                            int(arch['mlp_ratio'] * dims),
                            self.attn_types[i],
                            attn_cfgs[i],
                            drop_path_rate=rate,
                            layer_scale_init_value=arch['layer_scale_init_values'][i],
                            with_cp=with_cp,
                        )
                        for rate in drop_path_rates[first : first + depth]
                    ]
                )
            )
            if output_norm and i in self.out_indices:
                self.add_module(f'norm{i}', LayerNorm2d(dims))
        self._freeze_stages()
        self._to_be_loaded = bool(self._pretrained_configs())
        if pretrained is not None:
            self._load_pretrained()

    @classmethod
    def output_channels(
        cls, arch: str | dict = 'tiny', out_indices: Sequence[int] | None = None
    ) -> tuple[list[int], tuple[int, ...]]:
        """Return the channels of the returned maps and the stages they are of, without building.

        Args:
            arch (str | dict): As in the constructor.
            out_indices (Sequence[int], optional): As in the constructor, (0, 1, 2, 3) by default.
        """
        dims = parse_arch(arch, cls.arch_zoo)['embed_dims']
        indices = parse_out_indices((0, 1, 2, 3) if out_indices is None else out_indices, len(dims))
        return [dims[i] for i in indices], indices

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute the feature maps of an image batch.

        Args:
            x (Tensor): Images of shape (B, in_channels, H, W), any H and W. In training mode the
                norms need more than one pixel in the last stage, or a batch of two.

        Returns:
            tuple[Tensor, ...]: For each stage i of ``out_indices`` a map of shape
            (B, embed_dims[i], ceil(H / 2^(i+2)), ceil(W / 2^(i+2))), contiguous.

        Raises:
            RuntimeError: In the exporter of ``torch.onnx`` that traces (``dynamo=False``).
        """
        if torch.onnx.is_in_onnx_export() and not torch.compiler.is_exporting():
            raise RuntimeError(
                'the exporter of torch.onnx that traces is wrong at other sizes of image, in '
                'silence: use torch.onnx.export(..., dynamo=True) or tools/export.py'
            )
        if isinstance(x, torch.fx.Proxy):
            raise TypeError(
                f'torch.fx cannot trace {type(self).__name__}, whose path depends on the size of '
                'the image; use torch.export.export, or out_indices for the maps of other stages'
            )
        if self._to_be_loaded:
            self._to_be_loaded = False
            (cfg, *_) = self._pretrained_configs()
            warnings.warn(
                f'init_cfg names {cfg["checkpoint"]}, which was not loaded: call init_weights() '
                'before, or build with pretrained=FILE.',
                stacklevel=2,
            )
        if self._deploy_first and not self._deployed:
            self.deploy()
        # Token-major memory: LayerNorm, 1x1 convolutions and attention then need no copies.
        x = x.contiguous(memory_format=torch.channels_last)
        x = self.stem(x)
        outs = []
        for i, stage in enumerate(self.stages):
            if i > 0:
                x = _downsample(self.downsamples[i - 1], x)
            x = _in_groups(stage, x)
            if i in self.out_indices:
                norm = getattr(self, f'norm{i}', None)
                out = x if norm is None else norm(x)
                # Heads may hold compiled operators that read plain memory: mmcv's RoIAlign takes
                # a channels_last map without complaint and returns wrong features.
                outs.append(out.contiguous())
        return tuple(outs)

    def deploy(self) -> AttentionPyramid:
        """Fold norms and layer scales into the convolutions before them, for inference.

        The same outputs up to rounding, with fewer operations. The weights have other values and
        partly no names of their own afterwards: load a checkpoint before, and save none.

        Returns:
            AttentionPyramid: The backbone itself, in evaluation mode.

        Raises:
            RuntimeError: In training mode.
        """
        if self.training:
            raise RuntimeError(
                'a backbone in training mode cannot be deployed: call eval() before, and set no '
                'deploy=True in a config for training'
            )
        if not self._deployed:
            fuse_conv_bn(self.stem)
            fuse_conv_bn(self.downsamples)
            for block in (block for stage in self.stages for block in stage):
                block.deploy()
            self._deployed = True
        return self

    def init_weights(self) -> None:
        """Initialise the weights from ``init_cfg``.

        Raises:
            mala_mm.errors.UserError: If a ``Pretrained`` file does not fit.
        """
        pretrained = self._pretrained_configs()
        load_after = not self.is_init
        others = [cfg for cfg in self._init_configs() if cfg not in pretrained]
        self.init_cfg, init_cfg = others, self.init_cfg
        super().init_weights()
        self.init_cfg = init_cfg
        if load_after:
            self._load_pretrained()

    def _init_configs(self) -> list[dict]:
        return [self.init_cfg] if isinstance(self.init_cfg, dict) else list(self.init_cfg or ())

    def _pretrained_configs(self) -> list[dict]:
        kinds = ('Pretrained', PretrainedInit)
        return [cfg for cfg in self._init_configs() if cfg['type'] in kinds]

    def _load_pretrained(self) -> None:
        for cfg in self._pretrained_configs():
            WEIGHT_INITIALIZERS.build({**cfg, 'type': 'mala_mm.Pretrained'})(self)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, '_metadata'):
            note = dict(family=type(self).__name__, attn_types=list(self.attn_types))
            destination._metadata[prefix[:-1]].update(note)

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, local_metadata: dict, *args: Any
    ) -> None:
        if self._deployed:
            raise RuntimeError(
                'a deployed backbone takes no checkpoint: load it before deploy(), into a new model'
            )
        self._to_be_loaded = False
        trained, built = local_metadata.get('attn_types'), len(self.stages)
        if trained is not None and tuple(trained[:built]) != self.attn_types[:built]:
            message = (
                f'These weights are of a {local_metadata.get("family")} with attention '
                f'{", ".join(trained)}, the model is a {type(self).__name__} with '
                f'{", ".join(self.attn_types)}: they load, but its outputs are not those that '
                'they were trained for. Set type or attn_types to match, unless this is meant.'
            )
            print_log(message, logger='current', level=logging.WARNING)
            warnings.warn(message, stacklevel=2)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _frozen_modules(self) -> list[nn.Module]:
        if self.frozen_stages < 0:
            return []
        return [
            self.stem,
            *self.stages[: self.frozen_stages],
            *self.downsamples[: max(self.frozen_stages - 1, 0)],
        ]

    def _freeze_stages(self) -> None:
        for module in self._frozen_modules():
            module.eval()
            module.requires_grad_(False)

    def train(self, mode: bool = True) -> AttentionPyramid:
        """Set the mode; frozen stages, and norms if ``norm_eval``, stay in evaluation mode."""
        if mode and self._deployed:
            raise RuntimeError('a deployed backbone cannot be trained: build a new one')
        super().train(mode)
        if mode:
            self._freeze_stages()
            if self.norm_eval:
                for module in self.modules():
                    if isinstance(module, _BatchNorm):
                        module.eval()
        return self
