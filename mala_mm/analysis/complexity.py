"""Parameters and multiply-adds of a model, counted from its shapes without computing anything.

The model runs on the meta device, which knows shapes but holds no numbers, under
:class:`torch.utils.flop_counter.FlopCounterMode`. Attention is counted by formula instead, since a
tracer sees different matrix products, or none, depending on the backend that computes it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from mmcv.cnn.utils.flops_counter import get_modules_mapping
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mala_mm.errors import UserError
from mala_mm.models.backbones import AttentionPyramid
from mala_mm.models.layers import AttentionMixer
from mala_mm.ops import build_operator


def attention_macs(attn_type: str, num_tokens: int, num_heads: int, head_dim: int) -> int:
    """Multiply-adds of one attention operator on one image, whatever backend computes it.

    The matrix products alone: ``phi``, softmax, rotation, sums and scalings are not counted, as
    norms and activations are not. Projections, position convolution and gate belong to the mixer.

    Args:
        attn_type (str): The name of a registered operator, with its default options.
        num_tokens (int): Number of tokens ``N = H * W``.
        num_heads (int): Number of heads.
        head_dim (int): Width ``d`` of a head.

    Returns:
        int: For example ``N d (2 d + 1)`` per head for MALA, ``2 N^2 d`` for softmax attention.

    Raises:
        ValueError: If ``attn_type`` is unknown.
    """
    with torch.device('meta'):
        return build_operator(attn_type, num_heads, head_dim).macs(num_tokens)


@dataclass
class Part:
    """What one part of a model costs; multiply-adds for one image.

    Attributes:
        name (str): Where the part stands in the model, e.g. ``'backbone.stage1'``.
        params (int): Number of parameters, buffers left out.
        layers (int): Multiply-adds of convolutions and linear layers.
        attention (int): Multiply-adds of the attention operators as configured.
        attention_linear (int): The same with linear attention in every stage.
        mmcv (int): What :func:`mmcv.cnn.get_model_complexity_info` counts, the papers' figures:
            modules it knows (biases, norms, ReLU and pooling too), but no function call, hence no
            attention; SyncBN, which it does not know, is left out.
    """

    name: str
    params: int = 0
    layers: int = 0
    attention: int = 0
    attention_linear: int = 0
    mmcv: int = 0

    @property
    def macs(self) -> int:
        """Everything, with the attention operators as configured."""
        return self.layers + self.attention

    @property
    def macs_linear(self) -> int:
        """Everything, with linear attention in every stage."""
        return self.layers + self.attention_linear


@dataclass(frozen=True)
class Complexity:
    """Parameters and multiply-adds of a model, by part.

    Attributes:
        shape (tuple[int, int]): Height and width of the image.
        attn_types (tuple[str, ...]): The backbone's operators, stage by stage; empty for a
            backbone that is not ours.
        parts (tuple[Part, ...]): The parts in the order in which they run.
    """

    shape: tuple[int, int]
    attn_types: tuple[str, ...]
    parts: tuple[Part, ...]

    @property
    def total(self) -> Part:
        """The sum over all parts."""
        counts = [field.name for field in fields(Part) if field.name != 'name']
        return Part('total', **{key: sum(getattr(p, key) for p in self.parts) for key in counts})


def build_on_meta(cfg: Config) -> nn.Module:
    """Build the model of a config where it takes no memory, on the meta device, if it can be.

    Args:
        cfg (Config): A config with a ``model``, or a backbone fragment with a ``backbone``.

    Returns:
        nn.Module: The model, without data preprocessor.

    Raises:
        UserError: If the config has neither, or values that the model refuses.
    """
    model = cfg.get('model') or cfg.get('backbone')
    if model is None:
        raise UserError(
            f'{cfg.filename} has neither model nor backbone, only {sorted(cfg)}; name a config '
            'that has one'
        )
    model = copy.deepcopy(model)
    model.pop('data_preprocessor', None)
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mala_mm')):
        try:
            with torch.device('meta'):
                return MODELS.build(model)
        except RuntimeError:
            # Some backbones of other packages read numbers off tensors while they are built.
            return MODELS.build(model)
        except ValueError as error:
            raise UserError(
                f'The model of {cfg.filename} cannot be built: {error}; correct the config'
            ) from error


def count_complexity(model: nn.Module, shape: tuple[int, int]) -> Complexity:
    """Count a backbone, classifier, detector or segmentor at inference.

    One multiply-add counts once, the field's "FLOPs". Counted are convolutions, linear layers and
    matrix products; norms, activations, biases, interpolation, pooling and RoIAlign are not.
    Auxiliary heads, which run in training only, add parameters but no multiply-adds. RoI heads
    see as many proposals, and mask heads as many detections, as ``test_cfg`` lets through (1000
    and 100 by mmdet's defaults), in every stage of a cascade.

    Args:
        model (nn.Module): A bare backbone, or a model of mmpretrain, mmdet or mmseg. It is left
            as it was.
        shape (tuple[int, int]): Height and width of the image.

    Returns:
        Complexity: The counts by part.

    Raises:
        UserError: If the model is of another kind or the shape is not positive.
    """
    if len(shape) != 2 or min(shape) < 1:
        raise UserError(f'shape must be a positive height and width, got {tuple(shape)}')
    model = _copy_to_meta(model)
    backbone = getattr(model, 'backbone', model)
    parts = []
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        for name, modules in _split(model):
            parts.append(part := Part(name))
            _watch(part, modules, counter, getattr(backbone, 'default_attn_types', ()))
        _run(model, torch.empty(1, 3, *shape, device='meta'))
    return Complexity(tuple(shape), getattr(backbone, 'attn_types', ()), tuple(parts))


def _copy_to_meta(model: nn.Module) -> nn.Module:
    """Copy all of a model but the weights."""
    memo: dict[int, Tensor] = {id(x): x.to('meta') for x in model.buffers()}
    for x in model.parameters():
        memo[id(x)] = nn.Parameter(x.detach().to('meta'), requires_grad=x.requires_grad)
    model = copy.deepcopy(model, memo)
    model.eval()  # which does not return the model in every package
    return model


def _split(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Divide a model into named groups of modules that run one after the other."""
    if not hasattr(model, 'backbone'):
        yield from _split_backbone(model, '')
        return
    for name, child in model.named_children():
        if name == 'backbone':
            yield from _split_backbone(child, 'backbone.')
        elif name == 'roi_head':
            for head in ('bbox_head', 'mask_head'):
                if hasattr(child, head):
                    yield f'roi_head.{head}', _as_list(getattr(child, head))
        elif any(True for _ in child.parameters()):
            yield name, _as_list(child)


def _split_backbone(backbone: nn.Module, prefix: str) -> Iterator[tuple[str, list[nn.Module]]]:
    """Count a stage with the downsampling that leads into it and the norm of its output."""
    if not isinstance(backbone, AttentionPyramid):
        yield prefix.rstrip('.') or 'backbone', [backbone]
        return
    yield f'{prefix}stem', [backbone.stem]
    for i, stage in enumerate(backbone.stages):
        modules = [backbone.downsamples[i - 1]] if i > 0 else []
        modules.append(stage)
        if (norm := getattr(backbone, f'norm{i}', None)) is not None:
            modules.append(norm)
        yield f'{prefix}stage{i + 1}', modules


def _as_list(module: nn.Module) -> list[nn.Module]:
    """Return the heads of a cascade, or the one head."""
    return list(module) if isinstance(module, nn.ModuleList) else [module]


def _watch(
    part: Part, modules: list[nn.Module], counter: FlopCounterMode, linear: tuple[str, ...]
) -> None:
    """Let modules add to a part what they cost whenever they run."""

    def enter(*_) -> None:
        part.layers -= counter.get_total_flops() // 2

    def leave(*_) -> None:
        part.layers += counter.get_total_flops() // 2

    for module in modules:
        part.params += sum(p.numel() for p in module.parameters())
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        for child in module.modules():
            if isinstance(child, AttentionMixer):
                child.forward = _Formula(part, child, linear[0])
            _watch_with_mmcv(part, child)


def _watch_with_mmcv(part: Part, module: nn.Module) -> None:
    """Let mmcv's hook for this type of module, if it has one, add to a part."""
    # The published LayerNorm is a wrapper; ours and PointwiseConv2d are children of modules that
    # mmcv knows.
    kind = next((k for k in (nn.LayerNorm, nn.Conv2d) if isinstance(module, k)), type(module))
    if kind not in (mapping := get_modules_mapping()):
        return

    def count(*args) -> None:
        module.__flops__ = 0
        mapping[kind](*args)
        part.mmcv += module.__flops__

    module.register_forward_hook(count)


class _Formula:
    """Stands in for the forward of a mixer: runs its layers, counts its operator by formula."""

    def __init__(self, part: Part, mixer: AttentionMixer, linear_type: str) -> None:
        self.part, self.mixer, self.linear_type = part, mixer, linear_type

    def __call__(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        channels, height, width = x.shape[1:]
        heads = self.mixer.num_heads
        tokens = height * width
        self.part.attention += self.mixer.operator.macs(tokens)
        self.part.attention_linear += attention_macs(
            self.linear_type, tokens, heads, channels // heads
        )
        for layer in (self.mixer.qkvo, self.mixer.lepe, self.mixer.proj):
            layer(x.new_empty(1, layer.in_channels, height, width))
        return x


def _run(model: nn.Module, image: Tensor) -> None:
    """Run what inference runs, up to the raw outputs of the heads."""
    if not hasattr(model, 'backbone'):
        model(image)
        return
    heads = ('head', 'bbox_head', 'rpn_head', 'decode_head')
    heads = [head for name in heads if (head := getattr(model, name, None)) is not None]
    if len(heads) != 1 or not hasattr(model, 'extract_feat'):
        raise UserError(
            f'{type(model).__name__} cannot be counted; name a backbone, an ImageClassifier, a '
            'single-stage or two-stage detector or an EncoderDecoder'
        )
    features = model.extract_feat(image)
    heads[0](features)
    if hasattr(model, 'roi_head'):
        roi, test_cfg = model.roi_head, model.test_cfg
        _run_roi_heads(roi.bbox_head, roi.bbox_roi_extractor, test_cfg.rpn.max_per_img)
        if roi.with_mask:
            _run_roi_heads(roi.mask_head, roi.mask_roi_extractor, test_cfg.rcnn.max_per_img)


def _run_roi_heads(head: nn.Module, extractor: nn.Module, num_rois: int) -> None:
    """Feed every head of a cascade with regions that RoIAlign would have cut out."""
    for stage_head, stage_extractor in zip(_as_list(head), _as_list(extractor)):
        size = stage_extractor.roi_layers[0].output_size
        stage_head(torch.empty(num_rois, stage_extractor.out_channels, *size, device='meta'))
