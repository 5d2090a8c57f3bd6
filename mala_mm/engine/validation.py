"""Finds mistakes in the values of a config before anything is built from it."""

from __future__ import annotations

import difflib
import importlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mmengine.registry as registries
from mmengine.config import Config
from mmengine.registry import Registry, init_default_scope
from mmengine.runner import Priority

from mala_mm.data.annotations import shown
from mala_mm.errors import UserError
from mala_mm.models.backbones.arguments import check_norm_cfg

from .channels import check_channels
from .monitored import IOU_METRICS, check_monitored


class _Kind(NamedTuple):
    """A kind of value: what is accepted, and how a sentence calls it."""

    accepts: Callable[[Any], bool]
    wanted: str


def _integer(low: int, *others: Any) -> Callable[[Any], bool]:
    return lambda v: v in others or (type(v) is int and v >= low)


def _number(low: float, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda v: (
        type(v) in (int, float) and low <= v <= high and math.isfinite(v)  # NaN compares false
    )


def _sequence(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, (list, tuple)) and all(map(accepts, v))


def _is_component(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get('type'), (str, type))


def _is_priority(value: Any) -> bool:
    return _integer(0)(value) or (isinstance(value, str) and value.upper() in Priority.__members__)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ''


LEVELS = ('DEBUG', 'INFO', 'WARNING', 'ERROR', 'CRITICAL')
START_METHODS = ('fork', 'spawn', 'forkserver')
PRIORITIES = tuple(Priority.__members__)
NMS_TYPES = ('nms', 'soft_nms', 'nms_quadri', 'nms_rotated')
POSITIVE = _Kind(_integer(1), 'a positive integer')
POSITIVE_OR_NONE = _Kind(_integer(1, None), 'a positive integer or None')
NATURAL = _Kind(_integer(0), 'an integer from 0 on')
PERIOD = _Kind(_integer(1, -1), 'a positive integer, or -1 for never')
MAPPING = _Kind(lambda v: isinstance(v, Mapping), 'a dict')
MAPPING_OR_NONE = _Kind(lambda v: v is None or isinstance(v, Mapping), 'a dict or None')
COMPONENT = _Kind(_is_component, 'a dict with a type')
COMPONENTS = _Kind(_sequence(_is_component), 'a list of dicts with a type each')
ONE_OR_MORE = _Kind(
    lambda v: v is None or _is_component(v) or _sequence(_is_component)(v),
    'a dict with a type, or a list of them',
)
HOOK = _Kind(lambda v: v is None or _is_component(v), 'a dict with a type, or None')
TEXT = _Kind(_is_text, 'a text')
TEXT_OR_NONE = _Kind(lambda v: v is None or _is_text(v), 'a text or None')
FLAG = _Kind(lambda v: isinstance(v, bool), 'True or False')
RATE = _Kind(_number(0), 'a number from 0 on')
ABOVE_ZERO = _Kind(lambda v: _number(0)(v) and v > 0, 'a positive number')
SIZE = _Kind(
    lambda v: _integer(1)(v) or (_sequence(_integer(1))(v) and len(v) == 2),
    'a positive integer, or two of them',
)
PRIORITY = _Kind(_is_priority, f'a number or one of {", ".join(PRIORITIES)}')
INDICES = _Kind(
    lambda v: _integer(1, None)(v) or _sequence(_integer(0))(v),
    'a positive integer or a list of indices',
)

# Every value whose path matches has to be of the kind. `*` stands for a name or a part of one,
# `**` for any number of names.
VALUES: tuple[tuple[str, _Kind], ...] = (
    ('model', COMPONENT),
    ('model.backbone', COMPONENT),
    ('model.backbone.in_channels', POSITIVE),
    ('model.test_cfg.mode', _Kind(lambda v: v in ('slide', 'whole'), "'slide' or 'whole'")),
    ('work_dir', TEXT),
    ('load_from', TEXT_OR_NONE),
    ('resume', FLAG),
    ('default_scope', TEXT),
    ('log_level', _Kind(lambda v: v in LEVELS, f'one of {", ".join(LEVELS)}')),
    ('default_hooks', MAPPING_OR_NONE),
    ('default_hooks.*', HOOK),
    ('custom_hooks', COMPONENTS),
    ('env_cfg', MAPPING),
    (
        'env_cfg.mp_cfg.mp_start_method',
        _Kind(lambda v: v in START_METHODS, f'one of {", ".join(START_METHODS)}'),
    ),
    ('randomness', MAPPING),
    ('randomness.seed', _Kind(_integer(0, None), 'an integer from 0 on, or None')),
    ('param_scheduler', ONE_OR_MORE),
    ('visualizer', HOOK),
    ('visualizer.vis_backends', COMPONENTS),
    ('*_evaluator', ONE_OR_MORE),
    (
        '*_evaluator.iou_metrics',
        _Kind(_sequence(IOU_METRICS.__contains__), f'some of {tuple(IOU_METRICS)}'),
    ),
    ('*_dataloader', MAPPING_OR_NONE),
    ('*_dataloader.dataset', COMPONENT),
    ('*_dataloader.sampler', HOOK),
    ('*_dataloader.batch_sampler', HOOK),
    ('*_dataloader.collate_fn', HOOK),
    ('*_dataloader.batch_size', POSITIVE),
    ('*_dataloader.num_workers', NATURAL),
    ('*_dataloader.prefetch_factor', POSITIVE_OR_NONE),
    ('*_dataloader.**.pipeline', COMPONENTS),
    ('*_dataloader.**.ann_file', TEXT),
    ('*_dataloader.**.data_root', TEXT_OR_NONE),
    (
        '*_dataloader.**.data_prefix',
        _Kind(lambda v: isinstance(v, (str, Mapping)), 'a dict of folders'),
    ),
    ('*_dataloader.**.metainfo', MAPPING_OR_NONE),
    (
        '*_dataloader.**.metainfo.classes',
        _Kind(lambda v: _is_text(v) or _sequence(_is_text)(v), 'a tuple of names'),
    ),
    ('*_dataloader.**.filter_cfg', MAPPING_OR_NONE),
    ('*_dataloader.**.crop_size', SIZE),
    (
        '*_dataloader.**.indices',
        _Kind(
            lambda v: v is None or _integer(1)(v) or _sequence(_integer(0))(v),
            'a positive integer or a list of indices',
        ),
    ),
    ('train_cfg', MAPPING_OR_NONE),
    ('val_cfg', MAPPING_OR_NONE),
    ('test_cfg', MAPPING_OR_NONE),
    ('train_cfg.max_epochs', POSITIVE),
    ('train_cfg.max_iters', POSITIVE),
    ('train_cfg.val_interval', POSITIVE),
    ('train_cfg.val_begin', NATURAL),
    ('default_hooks.checkpoint.interval', PERIOD),
    ('default_hooks.checkpoint.max_keep_ckpts', PERIOD),
    ('default_hooks.logger.interval', POSITIVE),
    (
        'default_hooks.*.priority',
        PRIORITY,
    ),
    ('default_hooks.visualization.interval', POSITIVE),
    ('optim_wrapper', MAPPING_OR_NONE),
    ('optim_wrapper.optimizer', COMPONENT),
    ('optim_wrapper.optimizer.lr', RATE),
    ('optim_wrapper.optimizer.weight_decay', RATE),
    ('optim_wrapper.optimizer.betas', _Kind(_sequence(_number(0, 1)), 'two numbers from 0 to 1')),
    ('optim_wrapper.optimizer.momentum', RATE),
    ('optim_wrapper.accumulative_counts', POSITIVE),
    ('optim_wrapper.clip_grad', MAPPING_OR_NONE),
    ('optim_wrapper.clip_grad.max_norm', ABOVE_ZERO),
    ('optim_wrapper.paramwise_cfg', MAPPING_OR_NONE),
    ('auto_scale_lr.base_batch_size', POSITIVE),
    ('param_scheduler.**.begin', NATURAL),
    ('param_scheduler.**.end', POSITIVE),
    ('param_scheduler.**.T_max', POSITIVE),
    ('param_scheduler.**.milestones', _Kind(_sequence(_integer(0)), 'a list of integers')),
    ('model.**.num_classes', POSITIVE),
    ('model.**.loss_weight', _Kind(_number(-math.inf), 'a number')),
    ('model.data_preprocessor.pad_size_divisor', POSITIVE),
    (
        'model.data_preprocessor.std',
        _Kind(
            lambda v: v is None or _sequence(ABOVE_ZERO.accepts)(v), 'a list of positive numbers'
        ),
    ),
    (
        'model.data_preprocessor.mean',
        _Kind(
            lambda v: v is None or (_sequence(_number(-math.inf))(v) and len(v) in (1, 3)),
            'a list of 1 or 3 numbers, or None',
        ),
    ),
    ('model.**.norm_cfg', MAPPING_OR_NONE),
    (
        'model.**.topk',
        _Kind(_sequence(_integer(1)), 'a tuple of positive integers'),
    ),
    ('model.**.dropout_ratio', _Kind(_number(0, 1), 'a number from 0 to 1')),
    ('model.**.channels', POSITIVE),
    ('**.type', _Kind(lambda v: v is None or isinstance(v, str) or callable(v), 'a name')),
    ('model.**.out_channels', POSITIVE),
    (
        'model.**.nms.type',
        _Kind(lambda v: not isinstance(v, str) or v in NMS_TYPES, f'one of {", ".join(NMS_TYPES)}'),
    ),
    (
        'default_hooks.checkpoint.save_best',
        _Kind(lambda v: v is None or _is_text(v) or _sequence(_is_text)(v), 'a name, or a list'),
    ),
)

# Where which registry is asked.
REGISTRIES = (
    ('optim_wrapper', 'OPTIM_WRAPPERS'),
    ('optim_wrapper.optimizer', 'OPTIMIZERS'),
    ('default_hooks.*', 'HOOKS'),
    ('custom_hooks.*', 'HOOKS'),
    ('param_scheduler', 'PARAM_SCHEDULERS'),
    ('param_scheduler.*', 'PARAM_SCHEDULERS'),
    ('*_dataloader.**.pipeline.*', 'TRANSFORMS'),
    ('*_dataloader.**.dataset', 'DATASETS'),
    ('*_dataloader.sampler', 'DATA_SAMPLERS'),
    ('*_dataloader.batch_sampler', 'DATA_SAMPLERS'),
    ('*_dataloader.collate_fn', 'FUNCTIONS'),
    ('*_evaluator', 'METRICS'),
    ('*_evaluator.*', 'METRICS'),
    ('train_cfg', 'LOOPS'),
    ('val_cfg', 'LOOPS'),
    ('test_cfg', 'LOOPS'),
    ('visualizer', 'VISUALIZERS'),
    ('visualizer.vis_backends.*', 'VISBACKENDS'),
    ('model', 'MODELS'),
    ('model.data_preprocessor', 'MODELS'),
    ('model.backbone', 'MODELS'),
    ('model.neck', 'MODELS'),
    ('model.*head', 'MODELS'),
)


def check_values(cfg: Config) -> None:
    """Refuse values of the wrong kind, unknown types, and channels that do not fit each other.

    Args:
        cfg (Config): The config of a run.

    Raises:
        UserError: The first mistake that is found.
    """
    nodes = list(_walk(cfg._cfg_dict))
    for pattern, kind in VALUES:
        for path, value in _matching(nodes, pattern):
            if not kind.accepts(value):
                raise UserError(f'{path} must be {kind.wanted}, got {shown(value)}')
    _check_work_dir(cfg.get('work_dir'))
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    for pattern, name in REGISTRIES:
        for path, value in _matching(nodes, pattern):
            if _is_component(value):
                _check_type(path, value['type'], name, cfg.get('default_scope'))
    for path, value in _matching(nodes, 'model.**.norm_cfg'):
        if value is not None:
            try:
                check_norm_cfg(value)
            except ValueError as error:
                raise UserError(f'{path.removesuffix("norm_cfg")}{error}') from None
    _check_loops(cfg)
    constructor = cfg.get('optim_wrapper', {}).get('constructor')
    if constructor is not None:
        name = 'OPTIM_WRAPPER_CONSTRUCTORS'
        _check_type('optim_wrapper', constructor, name, cfg.get('default_scope'), 'constructor')
    check_channels(cfg.get('model') or {})
    check_monitored(cfg)
    _check_topk(cfg)


def _walk(node: Any, path: str = '') -> Iterator[tuple[str, Any]]:
    """All values of a config with their dotted paths."""
    if path:
        yield path, node
    items: Any = ()
    if isinstance(node, Mapping):
        items = node.items()
    elif isinstance(node, (list, tuple)):
        items = enumerate(node)
    for key, child in items:
        yield from _walk(child, f'{path}.{key}' if path else str(key))


def _matching(nodes: list[tuple[str, Any]], pattern: str) -> Iterator[tuple[str, Any]]:
    parts = re.escape(pattern).replace(r'\*\*\.', r'(?:[^.]+\.)*').replace(r'\*', '[^.]*')
    matches = re.compile(parts).fullmatch
    return (node for node in nodes if matches(node[0]))


def _check_work_dir(work_dir: str | None) -> None:
    if work_dir is None:
        return
    folder = Path(work_dir).expanduser().absolute()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if not existing.is_dir():
        raise UserError(
            f'The work dir {work_dir} cannot be made, because {existing} is a file; name another '
            'folder (--work-dir)'
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f'The work dir {work_dir} cannot be written, because {existing} belongs to somebody '
            'else; name another folder (--work-dir)'
        )


def _check_loops(cfg: Config) -> None:
    """mmengine wants all parts of a loop, or none."""
    for parts in (
        ('train_dataloader', 'train_cfg', 'optim_wrapper'),
        ('val_dataloader', 'val_cfg', 'val_evaluator'),
        ('test_dataloader', 'test_cfg', 'test_evaluator'),
    ):
        absent = [part for part in parts if cfg.get(part) is None]
        if 0 < len(absent) < len(parts):
            given = ' and '.join(part for part in parts if part not in absent)
            raise UserError(
                f'{" and ".join(absent)} must not be None where {given} '
                f'{"is" if len(absent) == 2 else "are"} given; give all three, or none'
            )


def _check_topk(cfg: Config) -> None:
    """Refuse an accuracy among more classes than there are, which fails after an epoch."""
    count = ((cfg.get('model') or {}).get('head') or {}).get('num_classes')
    for key in ('val_evaluator', 'test_evaluator'):
        metrics = cfg.get(key) or []
        for metric in metrics if isinstance(metrics, (list, tuple)) else [metrics]:
            topk = metric.get('topk', ())
            topk = topk if isinstance(topk, (list, tuple)) else [topk]
            most = max((k for k in topk if isinstance(k, int)), default=0)
            if isinstance(count, int) and most > count:
                raise UserError(
                    f'{key}.topk has {most}, but model.head.num_classes is {count}; give numbers '
                    'up to it'
                )


def _check_type(
    path: str, kind: Any, registry_name: str, scope: str | None, key: str = 'type'
) -> None:
    if not isinstance(kind, str):
        return
    registry = getattr(registries, registry_name)
    if scope:
        importlib.import_module(f'{scope}.registry')
    local = registry.children.get(scope, registry)
    if local.get(kind) is None:
        raise UserError(
            f'{path}.{key} is {shown(kind)}, which is not in the {local.scope}::{local.name} '
            f'registry; {similar_types(kind, local)}'
        )


def similar_types(kind: str, registry: Registry) -> str:
    """Advice for a type that a registry does not know: what it knows that is like it.

    Args:
        kind (str): The type.
        registry (Registry): Where it was looked up.
    """
    known: dict[str, None] = {}
    node: Registry | None = registry
    while node is not None:
        known |= dict.fromkeys(node.module_dict)
        node = node.parent
    close = difflib.get_close_matches(kind.rsplit('.', 1)[-1], known, n=2)
    return f'did you mean {" or ".join(close)}?' if close else 'correct the type in the config'
