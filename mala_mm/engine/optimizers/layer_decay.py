"""Learning rates that decay from the head of a model towards its image."""

from __future__ import annotations

from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from torch import nn

from mala_mm.models.backbones.pyramid import AttentionPyramid
from mala_mm.registry import OPTIM_WRAPPER_CONSTRUCTORS


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayOptimizerConstructor(DefaultOptimWrapperConstructor):
    r"""Layer-wise learning-rate decay for MAViT and RAVLT.

    The parameters of layer :math:`l` of :math:`L` learn with
    :math:`lr \cdot r^{L - l}`, where :math:`r` is ``decay_rate``. Layer 0 is the stem; each block
    (``'layer_wise'``) or each stage (``'stage_wise'``) is a layer of its own, with the
    downsampling that leads into it; whatever a pretrained classifier does not hold (output norms,
    neck, heads) is layer :math:`L` and learns with the full rate.

    The scheme is that of BEiT (https://arxiv.org/abs/2106.08254) and ConvNeXt
    (https://arxiv.org/abs/2201.03545). In contrast to mmdet's and mmseg's
    ``LearningRateDecayOptimizerConstructor``, the number of layers is read off the backbone, and
    weight decay follows the usual keys of ``paramwise_cfg`` (``norm_decay_mult``,
    ``bias_decay_mult``, ``flat_decay_mult``, ``custom_keys``); an ``lr_mult`` of theirs multiplies
    the decayed rate.

    Args:
        optim_wrapper_cfg (dict): Config of the optimizer wrapper and its optimizer.
        paramwise_cfg (dict): mmengine's keys, and

            - ``decay_rate`` (float): The factor from one layer to the one below, in (0, 1].
            - ``decay_type`` (str): ``'layer_wise'`` (default) or ``'stage_wise'``.

    Examples:
        >>> optim_wrapper = dict(
        >>>     type='OptimWrapper',
        >>>     optimizer=dict(type='AdamW', lr=1e-4, weight_decay=0.05),
        >>>     constructor='mala_mm.LayerDecayOptimizerConstructor',
        >>>     paramwise_cfg=dict(decay_rate=0.9, norm_decay_mult=0.0))

    Raises:
        ValueError: If ``decay_rate`` or ``decay_type`` is missing or unknown, ``num_layers`` is
            given, or the model holds no MAViT or RAVLT.
    """

    decay_types = ('layer_wise', 'stage_wise')

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None) -> None:
        super().__init__(optim_wrapper_cfg, paramwise_cfg)
        self.decay_rate = self.paramwise_cfg.get('decay_rate')
        self.decay_type = self.paramwise_cfg.get('decay_type', 'layer_wise')
        if not isinstance(self.decay_rate, (int, float)) or not 0 < self.decay_rate <= 1:
            raise ValueError(f'paramwise_cfg needs a decay_rate in (0, 1], got {self.decay_rate!r}')
        if self.decay_type not in self.decay_types:
            raise ValueError(
                f'decay_type must be one of {self.decay_types}, got {self.decay_type!r}'
            )
        if 'num_layers' in self.paramwise_cfg:
            raise ValueError('paramwise_cfg takes no num_layers: it is read off the backbone')

    def add_params(
        self,
        params: list[dict],
        module: nn.Module,
        prefix: str = '',
        is_dcn_module: int | float | None = None,
    ) -> None:
        """Add a group for each combination of learning rate and weight decay.

        Args:
            params (list[dict]): The groups, changed in place.
            module (nn.Module): The model, or for mmengine's recursion a part of it.
            prefix (str): The part's name.
            is_dcn_module (int | float, optional): Passed on to mmengine.
        """
        super().add_params(params, module, prefix, is_dcn_module)
        if prefix:
            return
        scales = self._learning_rate_scales(module)
        groups: dict[str, dict] = {}
        for group in params:  # one parameter each
            (param,) = group.pop('params')
            lr_scale = scales.get(param, 1.0)
            group['lr'] = group.get('lr', self.base_lr) * lr_scale
            group['lr_scale'] = lr_scale
            key = str(sorted(group.items()))
            groups.setdefault(key, dict(group, params=[]))['params'].append(param)
        params[:] = groups.values()
        print_log(
            f'{self.decay_type} learning-rate decay {self.decay_rate}: {len(params)} parameter '
            f'groups, scales {min(scales.values()):.3g} to 1',
            logger='current',
        )

    def _learning_rate_scales(self, model: nn.Module) -> dict[nn.Parameter, float]:
        backbones = [m for m in model.modules() if isinstance(m, AttentionPyramid)]
        if not backbones:
            raise ValueError(
                'LayerDecayOptimizerConstructor needs a model with a MAViT or RAVLT, got '
                f'{type(model).__name__}'
            )
        scales = {}
        for backbone in backbones:
            layers = self._layers(backbone)
            for depth, modules in enumerate(layers):
                scale = self.decay_rate ** (len(layers) - depth)
                for module in modules:
                    scales.update(dict.fromkeys(module.parameters(), scale))
        return scales

    def _layers(self, backbone: AttentionPyramid) -> list[list[nn.Module]]:
        layers: list[list[nn.Module]] = [[backbone.stem]]
        for stage, blocks in enumerate(backbone.stages):
            entry = [backbone.downsamples[stage - 1]] if stage > 0 else []
            if self.decay_type == 'stage_wise':
                layers.append([*entry, *blocks])
            else:
                first, *rest = blocks
                layers.append([*entry, first])
                layers.extend([block] for block in rest)
        return layers
