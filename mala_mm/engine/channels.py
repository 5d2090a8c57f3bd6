"""Finds necks and heads that do not take the maps of the backbone, before anything is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mmengine.registry as registries

from mala_mm.data.annotations import shown
from mala_mm.errors import UserError
from mala_mm.models.backbones import AttentionPyramid


def check_channels(model: Mapping[str, Any]) -> None:
    """Refuse necks and heads that do not take the maps of a backbone of this package.

    Args:
        model (Mapping): The config's ``model``; those with other backbones pass.

    Raises:
        UserError: If channels, levels or strides differ.
    """
    if 'backbone' not in model and isinstance(model.get('module'), Mapping):
        model = model['module']  # of test-time augmentation
    backbone = model.get('backbone')
    if not isinstance(backbone, Mapping):
        return
    cls = backbone.get('type')
    cls = registries.MODELS.get(cls) if isinstance(cls, str) else cls
    if not (isinstance(cls, type) and issubclass(cls, AttentionPyramid)):
        return
    try:
        dims, indices = cls.output_channels(
            backbone.get('arch', 'tiny'), backbone.get('out_indices')
        )
    except (TypeError, ValueError) as error:
        raise UserError(
            f'The config does not fit model.backbone ({cls.__name__}): {error}'
        ) from None
    preprocessor = model.get('data_preprocessor')
    mean = preprocessor.get('mean') if isinstance(preprocessor, Mapping) else None
    if mean is not None and backbone.get('in_channels', 3) != len(mean):
        raise UserError(
            f'model.backbone.in_channels is {shown(backbone.get("in_channels", 3))}, but '
            f'model.data_preprocessor.mean is of {len(mean)} channels; make them equal'
        )
    strides = [4 * 2**i for i in indices]
    levels, source = dims, 'model.backbone returns'
    neck = model.get('neck')
    if isinstance(neck, Mapping) and 'in_channels' in neck:
        pyramid = isinstance(neck['in_channels'], Sequence) or neck.get('type') == 'FPN'
        wanted = dims if pyramid else dims[-1]
        _require_equal('model.neck.in_channels', neck['in_channels'], wanted, source)
        if isinstance(neck.get('out_channels'), int):
            count = neck.get('num_outs', len(dims))
            if isinstance(count, int) and count < len(dims):
                raise UserError(
                    f'model.neck.num_outs is {count}, fewer than the {len(dims)} maps of the '
                    f'backbone; set at least {len(dims)}'
                )
            levels = [neck['out_channels']] * (count if pyramid else 1)
            source = 'model.neck returns'
    elif isinstance(neck, (Mapping, list, tuple)):
        return  # a neck whose output this cannot tell
    _check_heads(model, levels, strides, source)


def _require_equal(path: str, value: Any, wanted: Any, source: str) -> None:
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = list(value)
    if value != wanted:
        raise UserError(f'{path} is {shown(value)}, but {source} {wanted}; set {path}={wanted}')


def _check_heads(
    model: Mapping[str, Any], levels: list[int], strides: list[int], source: str
) -> None:
    for name in ('rpn_head', 'bbox_head'):  # of detectors: the same channels at each level
        head = model.get(name)
        if not isinstance(head, Mapping):
            continue
        if 'in_channels' in head:
            _require_equal(f'model.{name}.in_channels', head['in_channels'], levels[0], source)
        anchors = head.get('anchor_generator')
        given = anchors.get('strides') if isinstance(anchors, Mapping) else None
        if isinstance(given, (list, tuple)) and len(given) != len(levels):
            raise UserError(
                f'model.{name}.anchor_generator.strides has {len(given)} entries, but {source} '
                f'{len(levels)} maps; give one stride per map'
            )
    roi_head = model.get('roi_head')
    if isinstance(roi_head, Mapping):
        _check_roi_head(roi_head, levels, strides, source)
    for name in ('decode_head', 'auxiliary_head'):  # of segmentors: some of the levels
        heads = model.get(name)
        several = isinstance(heads, (list, tuple))
        for i, head in enumerate(heads if several else [heads]):
            if isinstance(head, Mapping) and 'in_channels' in head:
                path = f'model.{name}.{i}' if several else f'model.{name}'
                _check_segmentation_head(path, head, levels, source)
    head = model.get('head')  # of classifiers: the last level
    if isinstance(head, Mapping) and 'in_channels' in head:
        _require_equal('model.head.in_channels', head['in_channels'], levels[-1], source)


def _check_roi_head(
    roi_head: Mapping[str, Any], levels: list[int], strides: list[int], source: str
) -> None:
    for part in ('bbox', 'mask'):
        extractor = roi_head.get(f'{part}_roi_extractor')
        if not isinstance(extractor, Mapping):
            continue
        path = f'model.roi_head.{part}_roi_extractor'
        if 'out_channels' in extractor:
            _require_equal(f'{path}.out_channels', extractor['out_channels'], levels[0], source)
        if 'featmap_strides' in extractor:
            found, given = 'the backbone has the strides', extractor['featmap_strides']
            _require_equal(f'{path}.featmap_strides', given, strides, found)
        heads = roi_head.get(f'{part}_head')
        several = isinstance(heads, (list, tuple))
        for i, head in enumerate(heads if several else [heads]):
            if isinstance(head, Mapping) and 'in_channels' in head:
                name = f'model.roi_head.{part}_head{f".{i}" if several else ""}.in_channels'
                _require_equal(name, head['in_channels'], levels[0], source)


def _check_segmentation_head(
    path: str, head: Mapping[str, Any], levels: list[int], source: str
) -> None:
    index = head.get('in_index', -1)
    indices = index if isinstance(index, (list, tuple)) else [index]
    wrong = [i for i in indices if not (type(i) is int and -len(levels) <= i < len(levels))]
    if wrong:
        raise UserError(
            f'{path}.in_index has {shown(wrong[0])}, but {source} {len(levels)} maps; choose from '
            f'0 to {len(levels) - 1}'
        )
    chosen = [levels[i] for i in indices]
    single = not isinstance(index, (list, tuple))
    _require_equal(
        f'{path}.in_channels', head['in_channels'], chosen[0] if single else chosen, source
    )
