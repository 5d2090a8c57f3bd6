"""Loading checkpoints into models, with an account of what fitted and a refusal of what did not."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmengine.logging import print_log
from mmengine.model import BaseTTAModel, is_model_wrapper, update_init_info
from torch import Tensor, nn

from mala_mm.errors import UserError
from mala_mm.models import ARCHS, FAMILIES
from mala_mm.registry import WEIGHT_INITIALIZERS

from . import names
from .files import load_checkpoint, non_finite


@dataclass(frozen=True)
class LoadReport:
    """What became of the weights of a file and of the tensors of a model.

    Attributes:
        loaded (tuple[str, ...]): Names that the model took from the file.
        missing (tuple[str, ...]): Names of the model that keep their initial values. BatchNorm's
            counters, which nothing here reads, are not among them.
        unexpected (tuple[str, ...]): Names in the file that the model has no place for.
        mismatched (tuple[str, ...]): Names outside the backbone whose shapes differ; they keep
            their initial values.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]


def load_into(
    model: nn.Module,
    path: str | os.PathLike,
    prefix: str | None = None,
    other_heads: bool = False,
    map_location: Any = 'cpu',
) -> LoadReport:
    """Load a checkpoint into a model, whole or backbone, and log what did and did not match.

    The file may be one of this package or one with the published names, of a backbone, a
    classifier, a detector or a segmentor.

    Args:
        model (nn.Module): The model; a wrapper such as DistributedDataParallel is looked through.
        path (str | os.PathLike): The file or URL.
        prefix (str, optional): Take only the names in the file that begin with it, without it. A
            backbone finds ``backbone.`` by itself.
        other_heads (bool): Whether tensors outside the backbone may differ in shape, as those for
            another number of classes do. They keep their initial values then.
        map_location: Where the tensors of the file go first, as in ``torch.load``.

    Returns:
        LoadReport: The account.

    Raises:
        UserError: If the file cannot be read, if it matches nothing of the backbone, or if shapes
            differ.
    """
    path = os.fspath(path)
    checkpoint = load_checkpoint(path, map_location)
    model = unwrap(model)
    weights, report = match(model, checkpoint, path, prefix, other_heads)
    model.load_state_dict(weights, strict=False)
    return report


@WEIGHT_INITIALIZERS.register_module()
class Pretrained:
    """mmengine's initialiser of this name, through :func:`load_into`.

    Our backbones take it for ``init_cfg=dict(type='Pretrained', ...)``; any other module can name
    it as ``type='mala_mm.Pretrained'``.

    Args:
        checkpoint (str): The file or URL.
        prefix (str, optional): As in :func:`load_into`.
        map_location (str): As in :func:`load_into`.
    """

    def __init__(
        self, checkpoint: str, prefix: str | None = None, map_location: str = 'cpu'
    ) -> None:
        self.checkpoint = checkpoint
        self.options = dict(prefix=prefix, map_location=map_location)

    def __call__(self, module: nn.Module) -> None:
        """Load the file into a module.

        Raises:
            UserError: If it does not fit.
        """
        load_into(module, self.checkpoint, **self.options)
        if hasattr(module, '_params_init_info'):
            update_init_info(module, init_info=f'Pretrained: load from {self.checkpoint}')


def match(
    model: nn.Module,
    checkpoint: Mapping,
    path: str,
    prefix: str | None = None,
    other_heads: bool = False,
) -> tuple[OrderedDict[str, Tensor], LoadReport]:
    """Find the weights for a model in the contents of a file; arguments as in :func:`load_into`.

    Returns:
        tuple[OrderedDict[str, Tensor], LoadReport]: Weights that ``load_state_dict`` takes with
        ``strict=False``, and the account, which has been logged.
    """
    target = model.state_dict()
    model_prefix = names.BACKBONE if any(n.startswith(names.BACKBONE) for n in target) else ''
    backbone = model.backbone if model_prefix else model
    weights, angles = _read(backbone, checkpoint, path, prefix)
    heads = _outside_backbone(weights)
    weights = _align(weights, model_prefix)

    _check_arch(backbone, weights, model_prefix, path)
    names.check_angles(angles or {}, backbone, path)
    mismatched = [
        name
        for name, tensor in weights.items()
        if name in target and tensor.shape != target[name].shape
    ]
    refused = [n for n in mismatched if n.startswith(model_prefix) or not other_heads]
    if refused:
        name = refused[0]
        raise UserError(
            f'{len(refused)} tensors in {path} differ in shape from the model, the first '
            f'{name} with {tuple(weights[name].shape)} where the model has '
            f'{tuple(target[name].shape)}; use the config that the file was trained with'
        )
    for name in mismatched:
        del weights[name]
    report = LoadReport(
        loaded=tuple(name for name in weights if name in target),
        missing=tuple(
            name
            for name in target
            if name not in weights
            and name not in mismatched
            and not name.endswith('num_batches_tracked')
        ),
        unexpected=tuple(name for name in weights if name not in target),
        mismatched=tuple(mismatched),
    )
    if not any(name.startswith(model_prefix) for name in report.loaded):
        raise UserError(
            f'{path} holds nothing for the backbone {type(backbone).__name__}: its names begin '
            f'with {", ".join(list(weights)[:3])}, those of the model with '
            f'{", ".join([n for n in target if n.startswith(model_prefix)][:3])}; give a '
            'checkpoint of this backbone'
        )
    damaged = non_finite({name: weights[name] for name in report.loaded})
    if damaged:
        raise UserError(
            f'{path} holds values that are not finite, the first in {damaged[0]} '
            f'({len(damaged)} of {len(report.loaded)} tensors); give an earlier checkpoint'
        )
    _log(model, backbone, model_prefix, path, angles is not None, heads, report)
    return weights, report


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside of wrappers for distributed training and test-time augmentation."""
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    return model


def _read(
    backbone: nn.Module, checkpoint: Mapping, path: str, prefix: str | None
) -> tuple[OrderedDict[str, Tensor], OrderedDict[str, Tensor] | None]:
    """Return the weights under our names, and the angles of a published file."""
    weights, _ = names.find_weights(checkpoint, path)
    if prefix is not None:
        prefix = prefix.removesuffix('.') + '.'
        chosen = names.strip(weights, prefix)
        if not chosen:
            raise UserError(
                f'No name in {path} begins with {prefix!r}, they begin with '
                f'{", ".join(list(weights)[:3])}; leave the prefix out or correct it'
            )
        weights = chosen
    if names.is_published(weights):
        weights, angles, _ = names.rename(weights, path)
        _check_family(weights, backbone, path)
        return weights, angles
    return weights, None


def _outside_backbone(weights: Mapping[str, Tensor]) -> set[str]:
    """Return the names in a file of a whole model that are not its backbone's."""
    outside = {name for name in weights if not name.startswith(names.BACKBONE)}
    return outside if len(outside) < len(weights) else set()


def _check_family(weights: Mapping[str, Tensor], backbone: nn.Module, path: str) -> None:
    """Warn if a published classifier's tail is that of the other family."""
    family, attn_types = names.family_of(weights), getattr(backbone, 'attn_types', ())
    operator = None if family is None else FAMILIES[family].default_attn_types[0]
    if operator is not None and operator not in attn_types:
        message = (
            f'{path} is a {family} by its classifier and was trained with {operator}, the model is '
            f'a {type(backbone).__name__} with {", ".join(attn_types)}: set its type to match, '
            'unless this is meant.'
        )
        print_log(message, logger='current', level=logging.WARNING)
        warnings.warn(message, stacklevel=2)


def _align(weights: OrderedDict[str, Tensor], model_prefix: str) -> OrderedDict[str, Tensor]:
    """Give the backbone's names the prefix that they have in the model."""
    prefixed = any(name.startswith(names.BACKBONE) for name in weights)
    if prefixed and not model_prefix:
        return names.strip(weights, names.BACKBONE, keep_others=True)
    if model_prefix and not prefixed and any(n.startswith('stages.') for n in weights):
        aligned = OrderedDict((model_prefix + name, tensor) for name, tensor in weights.items())
        aligned._metadata = OrderedDict(
            ((model_prefix + name).removesuffix('.'), note)
            for name, note in getattr(weights, '_metadata', {}).items()
        )
        return aligned
    return weights


def _check_arch(
    backbone: nn.Module, weights: Mapping[str, Tensor], model_prefix: str, path: str
) -> None:
    """Refuse a file of another size by name, rather than by the first tensor that differs."""
    dims, depths = names.measure(names.strip(weights, model_prefix))
    model_dims, model_depths = names.measure(backbone.state_dict())
    shared = min(len(dims), len(model_dims))  # stages that the model does not build do not matter
    if dims[:shared] == model_dims[:shared] and depths[:shared] == model_depths[:shared]:
        return
    raise UserError(
        f'{path} looks like {_arch_name(dims, depths)}, the model is '
        f'{_arch_name(model_dims, model_depths)}; set arch to that of the file or give '
        'the file for this arch'
    )


def _arch_name(dims: tuple[int, ...], depths: tuple[int, ...]) -> str:
    description = f'embed_dims {dims}, depths {depths}'
    for name, arch in ARCHS.items():
        if arch['embed_dims'][: len(dims)] == dims and arch['depths'][: len(depths)] == depths:
            return f'{name} ({description})'
    return f'a custom arch ({description})'


def _log(
    model: nn.Module,
    backbone: nn.Module,
    model_prefix: str,
    path: str,
    published: bool,
    heads: set[str],
    report: LoadReport,
) -> None:
    """Log the account, as a warning if anything is missing that a checkpoint should bring."""
    built = len(getattr(backbone, 'stages', ()))
    returned = getattr(backbone, 'out_indices', ())

    def expected_unexpected(name: str) -> bool:
        if name in heads:
            return not model_prefix  # a backbone leaves the heads of a whole model aside
        name = name.removeprefix(model_prefix)
        stage = re.match(r'(?:norm|stages\.|downsamples\.)(\d+)\.', name)
        if stage is None:
            return False
        index = int(stage[1]) + name.startswith('downsamples.')
        return index not in returned if name.startswith('norm') else index >= built

    def expected_missing(name: str) -> bool:
        return re.match(re.escape(model_prefix) + r'norm\d\.', name) is not None

    level = logging.INFO
    lines = [
        f'{path}{" (published names)" if published else ""} -> {type(model).__name__}: '
        f'{len(report.loaded)} tensors loaded, {len(report.missing)} missing, '
        f'{len(report.unexpected)} unexpected, {len(report.mismatched)} of another shape.'
    ]
    if published:
        lines.append(
            'The file does not say which attention it was trained with; '
            f'the model runs {", ".join(getattr(backbone, "attn_types", ()))}.'
        )
    for title, listed, is_expected in (
        ('missing, as in every classifier; these output norms keep their initial values',
         [n for n in report.missing if expected_missing(n)], True),
        ('MISSING in the file, these keep their initial values',
         [n for n in report.missing if not expected_missing(n)], False),
        ('left aside, this model has no use for them',
         [n for n in report.unexpected if expected_unexpected(n)], True),
        ('UNEXPECTED in the file, not used',
         [n for n in report.unexpected if not expected_unexpected(n)], False),
        ('OF ANOTHER SHAPE, these keep their initial values', report.mismatched, False),
    ):  # fmt: skip
        if listed:
            lines.append(f'{title}: {", ".join(_modules(listed) if is_expected else listed)}')
            level = level if is_expected else logging.WARNING
    print_log('\n  '.join(lines), logger='current', level=level)


def _modules(listed: list[str]) -> list[str]:
    """Sum names up by module, as in ``stages.3 (40)``."""
    counts = Counter(re.match(r'(?:backbone\.)?\w+(?:\.\d+)?', name)[0] for name in listed)
    return [f'{module} ({count})' for module, count in counts.items()]
