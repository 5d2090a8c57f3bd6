"""Checks of data sets before anything is built: wrong paths and class lists end in one sentence.

They understand the data sets of mmdet (COCO format), mmseg and mmpretrain and their wrappers, and
let anything else, and data behind a remote storage backend, pass.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from mmengine.logging import print_log

from mala_mm.errors import UserError

from .annotations import Finding
from .coco import CocoSummary, missing_files, summarize_coco, validate_coco
from .datasets import Dataset, is_are, leaves, literal, require_folder, some
from .folders import check_classification, check_segmentation, class_folders

__all__ = [
    'Finding',
    'check_dataset',
    'check_evaluator',
    'check_num_classes',
    'coco_files',
    'validate_coco',
]

HEADS = ('bbox_head', 'mask_head', 'decode_head', 'auxiliary_head', 'head')
# Heads whose classes are not the data set's: objectness, and semantic side tasks.
FOREIGN_HEADS = ('rpn_head', 'semantic_head')


def check_dataset(
    dataset_cfg: Mapping[str, Any], scope: str | None = None, limit: int | None = 64
) -> None:
    """Check that a data set is there and fits its configuration.

    Args:
        dataset_cfg: the ``dataset`` of a data loader; wrappers (RepeatDataset, ConcatDataset,
            MultiImageMixDataset, ...) are looked into.
        scope: where a bare type name is looked up first; the config's ``default_scope``.
        limit: number of label maps that are read, evenly spread; None reads all of them, and the
            images of mmseg and mmpretrain too.

    Raises:
        UserError: data root, annotation file, folder, image or label missing; annotation file not
            readable, or with faults that training would break on; classes other than the configured
            ones; label values out of range.
    """
    for cfg in leaves(dataset_cfg):
        dataset = Dataset(cfg, scope)
        if dataset.cls is None or dataset.remote:
            continue
        if dataset.root and not os.path.isdir(dataset.root):
            raise UserError(
                f'The data root {dataset.root} does not exist; put the data set there or name its '
                'folder (--data-root, or data_root in the config)'
            )
        if dataset.family == 'coco':
            _check_coco(dataset, masks=any(_values(dataset_cfg, 'with_mask')))
        elif dataset.family == 'seg':
            check_segmentation(dataset, limit)
        elif dataset.family == 'cls':
            check_classification(dataset, limit)


def check_num_classes(
    model_cfg: Mapping[str, Any], dataset_cfg: Mapping[str, Any], scope: str | None = None
) -> None:
    """Check that the heads predict as many classes as the data set has.

    Args:
        model_cfg: the config's ``model``.
        dataset_cfg: the ``dataset`` of a data loader.
        scope: as for :func:`check_dataset`.

    Raises:
        UserError: some ``num_classes`` differs; all that differ are named.
    """
    for cfg in leaves(dataset_cfg):
        dataset = Dataset(cfg, scope)
        if dataset.cls is None:
            continue
        names, source = dataset.classes, 'its metainfo'
        if names is None and not dataset.remote:
            if dataset.family == 'coco' and dataset.ann_file:
                names, source = summarize_coco(dataset.ann_file).categories, dataset.ann_file
            elif dataset.family == 'cls' and not dataset.ann_file:
                names, source = class_folders(dataset), dataset.images
        if names is None:
            continue
        heads = [(path, n) for path, n in _num_classes(model_cfg) if n != len(names)]
        if heads:
            found = ', '.join(f'{path}.num_classes is {n}' for path, n in heads)
            raise UserError(
                f'{found}, but the data set {dataset.name} has {len(names)} classes '
                f'({some(names)}; from {source}); set num_classes={len(names)} or correct the '
                "data set's classes"
            )


def coco_files(dataset_cfg: Mapping[str, Any], scope: str | None = None) -> list[tuple[str, str]]:
    """(annotation file, image folder) of each data set in COCO format."""
    datasets = [Dataset(cfg, scope) for cfg in leaves(dataset_cfg)]
    return [(d.ann_file, d.images) for d in datasets if d.family == 'coco' and not d.remote]


def check_evaluator(evaluator_cfg: Any) -> None:
    """Check the annotation files that COCO metrics evaluate against.

    Args:
        evaluator_cfg: the config's ``val_evaluator`` or ``test_evaluator``.

    Raises:
        UserError: a file is not readable, or has faults that the evaluation would break on.
    """
    for cfg in evaluator_cfg if isinstance(evaluator_cfg, (list, tuple)) else [evaluator_cfg]:
        path = cfg.get('ann_file') if isinstance(cfg, Mapping) else None
        if not path or 'CocoMetric' not in str(cfg.get('type')) or cfg.get('format_only'):
            continue
        if '://' in path or (cfg.get('backend_args') or {}).get('backend', 'local') != 'local':
            continue
        metric = cfg.get('metric', 'bbox')
        summary = summarize_coco(path)
        _refuse_faults(path, summary, masks=metric == 'segm' or 'segm' in metric)
        if summary.without_iscrowd:
            raise UserError(
                f'{summary.without_iscrowd} in {path} has no iscrowd, which the evaluation needs; '
                'add iscrowd=0 to each annotation that is no crowd'
            )
        short = [f for f in summary.findings if f.kind == 'short-polygon']
        if short and 'segm' in metric:
            raise UserError(
                f'{path} has outlines that the evaluation cannot read, the first: {short[0]}; '
                'fix or remove them'
            )


def _refuse_faults(path: str, summary: CocoSummary, masks: bool, empty: bool = False) -> None:
    """Refuses faults that mmdet breaks on, and logs those that it copes with."""
    broken = [finding for finding in summary.findings if not finding.tolerated]
    if broken:
        raise UserError(
            f'The annotation file {path} has {len(broken)} '
            f'fault{"s" if len(broken) > 1 else ""}, the first is {broken[0]}; '
            '`python tools/check_dataset.py` lists all'
        )
    if summary.num_annotations == 0 and not empty:
        raise UserError(f'The annotation file {path} has no annotations; correct ann_file')
    if masks and summary.without_outline:
        raise UserError(
            f'{summary.num_annotations - summary.outlined} of {summary.num_annotations} '
            f'annotations in {path} have no segmentation, the first is {summary.without_outline}; '
            'add outlines, or train without masks (with_mask=False and no mask_head)'
        )
    counts = Counter(finding.kind for finding in summary.findings)
    if counts:
        listed = ', '.join(f'{count} {kind}' for kind, count in counts.items())
        text = f'{path}: {listed}; such annotations are left out or used as they are.'
        print_log(text, 'current', logging.WARNING)


def _values(node: Any, key: str) -> Iterator[Any]:
    if isinstance(node, Mapping):
        if key in node:
            yield node[key]
        node = list(node.values())
    for child in node if isinstance(node, (list, tuple)) else ():
        yield from _values(child, key)


def _check_coco(dataset: Dataset, masks: bool) -> None:
    if not dataset.ann_file:
        raise UserError(f'The data set {dataset.name} has no ann_file; name its annotation file')
    summary = summarize_coco(dataset.ann_file)
    _refuse_faults(dataset.ann_file, summary, masks, empty=bool(dataset.option('test_mode')))
    smallest = (dataset.option('filter_cfg') or {}).get('min_size', 0)
    if smallest > summary.largest and not dataset.option('test_mode'):
        raise UserError(
            f'No image of {dataset.ann_file} is left: filter_cfg.min_size is {smallest}, and the '
            f'shorter side of the largest image is {summary.largest}; lower it'
        )
    require_folder(dataset.images, 'image')
    missing = missing_files(dataset.images, summary.file_names)
    if missing:
        raise UserError(
            f'{len(missing)} of {len(summary.file_names)} images of {dataset.ann_file} are not in '
            f'{dataset.images}, the first is {missing[0]}; fetch them or correct data_prefix'
        )
    names = dataset.classes
    if names is None:
        return
    absent = [name for name in names if name not in summary.categories]
    extra = [name for name in summary.categories if name not in names]
    subset = (dataset.cfg.get('metainfo') or {}).get('subset', False)
    if absent or (extra and not subset):
        remedy = f'set metainfo=dict(classes={literal(summary.categories)}) in the data set'
        if absent:
            wrong = f'{some(absent)} {is_are(absent)} not in the file'
        else:
            wrong = f'{some(extra)} {is_are(extra)} not configured and would be dropped'
            remedy += ' or, to drop them on purpose, metainfo=dict(classes=..., subset=True)'
        raise UserError(
            f'The configuration has {len(names)} classes and {dataset.ann_file} has '
            f'{len(summary.categories)} categories: {wrong}; {remedy}'
        )


def _num_classes(cfg: Any, path: str = 'model', inside: bool = False) -> Iterator[tuple[str, int]]:
    """(path, num_classes) of every head that predicts the data set's classes."""
    if isinstance(cfg, Mapping):
        if inside and isinstance(cfg.get('num_classes'), int):
            yield path, cfg['num_classes']
            return
        for key, value in cfg.items():
            if key not in FOREIGN_HEADS:
                yield from _num_classes(value, f'{path}.{key}', inside or key in HEADS)
    elif isinstance(cfg, (list, tuple)):
        for i, part in enumerate(cfg):
            yield from _num_classes(part, f'{path}[{i}]', inside)
