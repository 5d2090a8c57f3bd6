"""Finds names of metrics that no evaluator of a config would return.

A hook that monitors one would find out after its first epoch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from mmengine.config import Config

from mala_mm.data.annotations import shown
from mala_mm.errors import UserError

# What each evaluator calls its figures by default, and what stands before them.
COCO_ITEMS = ('mAP', 'mAP_50', 'mAP_75', 'mAP_s', 'mAP_m', 'mAP_l')
PROPOSAL_ITEMS = ('AR@100', 'AR@300', 'AR@1000', 'AR_s@1000', 'AR_m@1000', 'AR_l@1000')
CHANGING = ('metric_items', 'classwise', 'thrs', 'format_only', 'proposal_nums')  # the names
IOU_METRICS = dict(
    mIoU=('aAcc', 'mIoU', 'mAcc'),
    mDice=('aAcc', 'mDice', 'mAcc'),
    mFscore=('aAcc', 'mFscore', 'mPrecision', 'mRecall'),
)


def check_monitored(cfg: Config) -> None:
    """Refuse hooks and schedulers that follow a metric which is never computed.

    Args:
        cfg (Config): The config of a run. Evaluators other than those of the recipes, and options
            that change what these return, may return anything.

    Raises:
        UserError: If a metric is not among those of ``val_evaluator``.
    """
    for path, name in _monitored(cfg):
        if cfg.get('val_evaluator') is None:
            raise UserError(
                f'{path} is {shown(name)}, but there is no val_evaluator to compute it; give one, '
                'or None here'
            )
        known = _metrics(cfg.val_evaluator)
        if name != 'auto' and known is not None and name not in known:
            raise UserError(f'{path} is {shown(name)}, {not_computed(name, known)}')


def not_computed(name: str, known: list[str]) -> str:
    """Return the end of the sentence for a metric that no evaluator returns.

    Args:
        name (str): The metric.
        known (list[str]): What the evaluators return.
    """
    tail = {metric.rpartition('/')[2]: metric for metric in known}
    close = difflib.get_close_matches(name.rpartition('/')[2], tail, n=1, cutoff=0.5)
    advice = f'did you mean {tail[close[0]]}?' if close else 'choose one of these'
    return f'but the metrics are {", ".join(known) or "none"}; {advice}'


def _monitored(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield the metrics that a config names, with their places."""
    best = ((cfg.get('default_hooks') or {}).get('checkpoint') or {}).get('save_best')
    for name in best if isinstance(best, (list, tuple)) else [best]:
        if name is not None:
            yield 'default_hooks.checkpoint.save_best', name
    for key in ('custom_hooks', 'param_scheduler'):
        parts = cfg.get(key) or []
        for i, part in enumerate(parts if isinstance(parts, (list, tuple)) else [parts]):
            if isinstance(part, Mapping) and isinstance(part.get('monitor'), str):
                yield f'{key}.{i}.monitor', part['monitor']


def _metrics(evaluators: Any) -> list[str] | None:
    """All that evaluators return, or None where it cannot be told."""
    found: list[str] = []
    for cfg in evaluators if isinstance(evaluators, (list, tuple)) else [evaluators]:
        names = _names(cfg)
        if names is None:
            return None
        found += names
    return found


def _names(cfg: Mapping[str, Any]) -> list[str] | None:
    kind = str(cfg.get('type')).rpartition('.')[2]
    prefix = cfg.get('prefix')
    if any(cfg.get(key) for key in CHANGING):
        return None
    if kind == 'CocoMetric':
        metrics = cfg.get('metric', 'bbox')
        items = []
        for metric in [metrics] if isinstance(metrics, str) else metrics:
            proposal = metric in ('proposal', 'proposal_fast')
            items += PROPOSAL_ITEMS if proposal else [f'{metric}_{item}' for item in COCO_ITEMS]
        prefix = prefix or 'coco'
    elif kind == 'IoUMetric':
        metrics = cfg.get('iou_metrics', ['mIoU'])
        items = list(dict.fromkeys(item for metric in metrics for item in IOU_METRICS[metric]))
    elif kind == 'Accuracy':
        topk = cfg.get('topk', 1)
        items = [f'top{k}' for k in (topk if isinstance(topk, (list, tuple)) else [topk])]
        prefix = prefix or 'accuracy'
    else:
        return None
    return [f'{prefix}/{item}' if prefix else item for item in items]
