"""The names and shapes of the published checkpoints, and what they are called here."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mala_mm.errors import UserError
from mala_mm.models import FAMILIES

CONTAINERS = ('state_dict', 'model', 'model_ema')
"""Under which keys a file may hold its weights, the first found wins."""

BACKBONE = 'backbone.'
"""How detectors, segmentors and classifiers prefix the names of their backbone."""

_PARAM = r'(?:weight|bias)'
_BATCH_NORM = rf'(?:{_PARAM}|running_mean|running_var|num_batches_tracked)'
_TRUNK = [
    (rf'patch_embed\.proj\.([0369]\.{_PARAM}|(?:1|4|7|10)\.{_BATCH_NORM})', r'stem.\1'),
    (rf'layers\.(\d+)\.blocks\.(\d+)\.(norm[12])\.norm\.({_PARAM})', r'stages.\1.\2.\3.\4'),
    (
        r'layers\.(\d+)\.blocks\.(\d+)\.'
        rf'((?:pos|attn\.(?:qkvo|lepe|proj)|ffn\.(?:fc1|dwconv|fc2))\.{_PARAM})',
        r'stages.\1.\2.\3',
    ),
    (r'layers\.(\d+)\.blocks\.(\d+)\.gamma_([12])', r'stages.\1.\2.gamma\3.weight'),
    (rf'layers\.(\d+)\.downsample\.reduction\.({_PARAM})', r'downsamples.\1.0.\2'),
    (rf'layers\.(\d+)\.downsample\.norm\.({_BATCH_NORM})', r'downsamples.\1.1.\2'),
    (rf'extra_norms\.(\d+)\.norm\.({_PARAM})', r'norm\1.\2'),
]
_TAIL = [
    (rf'proj\.({_PARAM})', r'neck.proj.\1'),
    (rf'norm\.({_BATCH_NORM})', r'neck.norm.\1'),
    (rf'head\.({_PARAM})', r'head.fc.\1'),
]
_ANGLE = r'layers\.(\d+)\.RoPE\.angle'


def _rename(name: str, table: list[tuple[str, str]]) -> str | None:
    for pattern, replacement in table:
        match = re.fullmatch(pattern, name)
        if match:
            return match.expand(replacement)
    return None


def find_weights(
    checkpoint: Mapping, path: str, container: str | None = None
) -> tuple[OrderedDict[str, Tensor], str | None]:
    """Find the weights in the contents of a file.

    Args:
        checkpoint (Mapping): The contents.
        path (str): The file, for messages.
        container (str, optional): The key that holds them. By default the first of ``state_dict``,
            ``model`` and ``model_ema`` that is there, or else the file itself.

    Returns:
        tuple[OrderedDict[str, Tensor], str | None]: The weights, without a ``module.`` prefix, and
        the key that held them.

    Raises:
        UserError: If there are none.
    """
    found = [key for key in CONTAINERS if isinstance(checkpoint.get(key), Mapping)]
    if container is None:
        container = found[0] if found else None
    elif container not in found:
        raise UserError(
            f'Checkpoint {path} has no weights under {container!r}, its keys are '
            f'{", ".join(found) or "no name"}; name one that it has'
        )
    content = checkpoint if container is None else checkpoint[container]
    weights = OrderedDict(
        (name, value)
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, Tensor)
    )
    if not weights:
        raise UserError(
            f'Checkpoint {path} holds no weights, only {sorted(map(str, content))[:8]}; give a '
            f'file with a state dict, bare or under one of {", ".join(CONTAINERS)}'
        )
    weights._metadata = getattr(content, '_metadata', OrderedDict())
    return strip(weights, 'module.', keep_others=True), container


def strip(
    weights: OrderedDict[str, Tensor], prefix: str, keep_others: bool = False
) -> OrderedDict[str, Tensor]:
    """Take a prefix off the names, and off those in torch's notes about the modules.

    Args:
        weights (OrderedDict[str, Tensor]): The weights.
        prefix (str): The prefix, with its dot.
        keep_others (bool): Whether to keep what does not begin with it.
    """
    stripped = OrderedDict(
        (name.removeprefix(prefix), tensor)
        for name, tensor in weights.items()
        if keep_others or name.startswith(prefix)
    )
    if len(stripped) == 0:
        return stripped
    notes = getattr(weights, '_metadata', {})
    # The note about `backbone` becomes the one about the whole, whose name is empty.
    chosen = {name: note for name, note in notes.items() if f'{name}.'.startswith(prefix)}
    stripped._metadata = OrderedDict(
        (f'{name}.'.removeprefix(prefix).removesuffix('.'), note)
        for name, note in (chosen or notes).items()
    )
    return stripped


def is_published(weights: Mapping[str, Tensor]) -> bool:
    """Whether the weights carry the published names, bare or of a detector or segmentor."""
    return any(
        name.startswith(('patch_embed.', 'layers.0.blocks.'))
        for name in (name.removeprefix(BACKBONE) for name in weights)
    )


class Renamed(NamedTuple):
    """Published weights under the names that they have here.

    Attributes:
        weights (OrderedDict[str, Tensor]): Those of a whole model: its backbone under
            ``backbone.``, a classifier's tail under ``neck.`` and ``head.``, a detector's or
            segmentor's heads as they were.
        angles (OrderedDict[str, Tensor]): The rotary angles, which are computed here, under their
            published names.
        sources (dict[str, str]): The published name of each weight.
    """

    weights: OrderedDict[str, Tensor]
    angles: OrderedDict[str, Tensor]
    sources: dict[str, str]


def rename(weights: Mapping[str, Tensor], path: str) -> Renamed:
    """Give published weights the names and shapes that they have here.

    Args:
        weights (Mapping[str, Tensor]): Published weights of a backbone, a classifier, a detector or
            a segmentor.
        path (str): The file they are from, for messages.

    Raises:
        UserError: If a layer scale or the classifier has another form than the published ones.
    """
    dense = any(name.startswith(BACKBONE) for name in weights)
    renamed = Renamed(OrderedDict(), OrderedDict(), {})
    for source, tensor in weights.items():
        is_head = dense and not source.startswith(BACKBONE)
        name = source.removeprefix(BACKBONE)
        if re.fullmatch(_ANGLE, name):
            renamed.angles[source] = tensor
            continue
        target = source
        if not is_head:
            tail = None if dense else _rename(name, _TAIL)
            target = tail or BACKBONE + (_rename(name, _TRUNK) or name)
        if target != source and re.search(r'\.gamma[12]\.weight$', target):
            tensor = _squeeze(tensor, (0, 2, 3), source, '(1, C, 1, 1)', path)
        elif target != source and target == 'head.fc.weight':
            tensor = _squeeze(tensor, (2, 3), source, '(classes, P, 1, 1)', path)
        renamed.weights[target] = tensor
        renamed.sources[target] = source
    return renamed


def _squeeze(tensor: Tensor, dims: tuple[int, ...], name: str, form: str, path: str) -> Tensor:
    if tensor.ndim != 4 or any(tensor.shape[dim] != 1 for dim in dims):
        raise UserError(
            f'{name} in {path} must have the shape {form} of the published models, '
            f'got {tuple(tensor.shape)}'
        )
    return tensor.squeeze(dims)


def check_angles(angles: Mapping[str, Tensor], backbone: nn.Module, path: str) -> None:
    """Check the rotary angles of a file against the definition that is computed here.

    ``10000 ** -linspace(0, 1, d / 4)``, each twice in place.

    Args:
        angles (Mapping[str, Tensor]): Published names to tensors of shape (d / 2,).
        backbone (nn.Module): The model, for the width d of its heads.
        path (str): The file, for messages.

    Raises:
        UserError: If they differ: the model would turn queries and keys by other angles.
    """
    stages = getattr(backbone, 'stages', ())
    for name, angle in angles.items():
        index = int(re.search(_ANGLE, name)[1])
        if index >= len(stages):
            continue  # a stage that the model does not build
        block = stages[index][0]
        n = block.norm1.weight.numel() // block.attn.num_heads // 4
        theta = 10000.0 ** -torch.linspace(0, 1, n, dtype=torch.float64)
        expected = theta.repeat_interleave(2)
        # A rounding of the exponent grows by ln(10000) = 9.2; the power and the rounding of the
        # result add some of their own.
        rtol = 16 * torch.finfo(angle.dtype).eps if angle.is_floating_point() else 0.0
        if angle.shape != expected.shape or not torch.allclose(
            angle.double(), expected, rtol=rtol, atol=0.0
        ):
            raise UserError(
                f'{name} in {path} is not 10000 ** -linspace(0, 1, {n}), each twice, as these '
                f'models define it (shape {tuple(angle.shape)}, expected {tuple(expected.shape)}); '
                'the file is of another model'
            )


def measure(weights: Mapping[str, Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Read the channels and the depth of each stage off a backbone's shapes (names as here)."""
    dims, depths = {}, {}
    for name, tensor in weights.items():
        match = re.match(r'stages\.(\d+)\.(\d+)\.', name)
        if match:
            stage, block = int(match[1]), int(match[2])
            depths[stage] = max(depths.get(stage, 0), block + 1)
            if name.endswith('.norm1.weight'):
                dims[stage] = tensor.numel()
    stages = sorted(depths)
    return tuple(dims.get(i, 0) for i in stages), tuple(depths[i] for i in stages)


def family_of(weights: Mapping[str, Tensor]) -> str | None:
    """Tell the family by the width of a classifier's projection, its only trace in the shapes."""
    width = weights['neck.proj.weight'].shape[0] if 'neck.proj.weight' in weights else None
    found = (name for name, cls in FAMILIES.items() if width in cls.tail_widths.values())
    return next(found, None)
