"""The text of a config for a data set: short, and with a reason beside each number."""

from __future__ import annotations

import os
import pprint
import textwrap
from typing import Any

from mmengine.config import Config

from ..drawing import palette
from .fitting import Schedule, fit_anchors, samples_per_image
from .recipes import Recipe
from .sources import Source, Split

MOST_COLOURS = 30  # of more classes the libraries choose the colours


def write_config(
    source: Source,
    recipe: Recipe,
    base: Config,
    schedule: Schedule,
    size: int | None = None,
    init: str | None = None,
    command: str = '',
) -> str:
    """Return a config that inherits from a recipe and says what is different.

    Args:
        source (Source): The data.
        recipe (Recipe): What is trained, and
        base (Config): what it says.
        schedule (Schedule): How long and how fast.
        size (int, optional): Pixels: of the longer side in detection, of the crop in segmentation
            and classification.
        init (str, optional): A checkpoint that the backbone starts from.
        command (str): What the config was written by.
    """
    write = dict(det=_detection, seg=_segmentation, cls=_classification)[recipe.task.folder]
    parts = [
        _head(source, recipe, command),
        _names(source),
        _lengths(source, schedule),
        write(source, recipe, base, schedule, size, init),
        _schedule(schedule, base),
    ]
    return '\n'.join(part.strip('\n') + '\n' for part in parts)


def _head(source: Source, recipe: Recipe, command: str) -> str:
    what = (
        f'{recipe.name} on {source.train.count} images of {len(source.classes)} classes, '
        f'{source.val.count} held out. Written by'
    )
    lines = textwrap.wrap(what, 97) + textwrap.wrap(
        command, 95, break_long_words=False, break_on_hyphens=False, subsequent_indent='    '
    )
    return '\n'.join(f'# {line}' for line in lines) + f'\n_base_ = {recipe.base!r}\n'


def _assign(name: str, value: Any) -> str:
    text = pprint.pformat(value, width=96 - len(name), compact=True)
    return f'{name} = ' + textwrap.indent(text, ' ' * (len(name) + 3)).lstrip() + '\n'


def _names(source: Source) -> str:
    text = _assign('classes', tuple(source.classes))
    if len(source.classes) <= MOST_COLOURS:
        text += _assign('palette', palette(len(source.classes)))
        return text + 'metainfo = dict(classes=classes, palette=palette)\n'
    return text + 'metainfo = dict(classes=classes)\n'


def _lengths(source: Source, schedule: Schedule) -> str:
    times = f'{schedule.epochs:.0f}' if schedule.epochs >= 3 else f'{schedule.epochs:.1f}'
    return (
        f'batch_size = {schedule.batch_size}\n'
        f'max_iters = {schedule.max_iters}  # each image is seen {times} times\n'
        f'interval = {schedule.interval}  # of evaluations and checkpoints\n'
    )


def _backbone(schedule: Schedule, init: str | None) -> str:
    entries = []
    if schedule.short:
        entries.append('drop_path_rate=0.0')
    if init is not None:
        entries.append(f"init_cfg=dict(type='Pretrained', checkpoint={init!r})")
    return f'dict({", ".join(entries)})'


def _path(split: Split) -> str:
    """Return an annotation file as the config writes it: beside it, or wherever it lies."""
    if split.ann_file and not os.path.isabs(split.ann_file):
        return repr('{{ fileDirname }}/' + split.ann_file)
    return repr(split.ann_file)


def _dataset(split: Split, pipeline: str, options: str) -> str:
    prefix = repr(split.prefix)
    if not isinstance(split.prefix, str):
        prefix = f'dict({", ".join(f"{key}={value!r}" for key, value in split.prefix.items())})'
    ann_file = f'        ann_file={_path(split)},\n' if split.ann_file else ''
    return (
        f'dict(\n{options}        data_root={split.root!r},\n{ann_file}'
        f'        data_prefix={prefix},\n        metainfo=metainfo,\n'
        f'        pipeline={pipeline},\n    )'
    )


def _loaders(source: Source, options: str) -> str:
    return f"""train_dataloader = dict(
    batch_size=batch_size,
    sampler=dict(_delete_=True, type='InfiniteSampler', shuffle=True),
    dataset={_dataset(source.train, 'train_pipeline', options)},
)
val_dataloader = dict(
    batch_size=1,
    dataset={_dataset(source.val, 'test_pipeline', options)},
)
test_dataloader = val_dataloader
"""


def _anchors(source: Source, scale: tuple[int, int], octaves: int) -> tuple[str, str]:
    """Return the scale of the anchors and the reason for it, as text."""
    strides = (4, 8, 16, 32, 64) if octaves == 1 else (8, 16, 32, 64, 128)
    anchors = fit_anchors(source.boxes, source.frames, scale, strides, octaves)
    reason = f'    # {anchors.covered:.0%} of the boxes meet an anchor with an IoU of 0.5.\n'
    return f'{anchors.scale:g}', reason


def _retinanet(source: Source, scale: tuple[int, int]) -> str:
    anchors, reason = _anchors(source, scale, octaves=3)
    return f"""{reason}    bbox_head=dict(
        num_classes=len(classes),
        anchor_generator=dict(octave_base_scale={anchors}),
    ),
"""


def _two_stages(source: Source, scale: tuple[int, int], cascade: bool) -> str:
    anchors, reason = _anchors(source, scale, octaves=1)
    number = samples_per_image(source.objects)
    box_head, sampler = 'dict(num_classes=len(classes))', f'dict(sampler=dict(num={number}))'
    if cascade:  # lists, which a config replaces as a whole
        old = '_base_.model'
        box_head = f'[dict(head, num_classes=len(classes)) for head in {old}.roi_head.bbox_head]'
        sampler = (
            f'[\n            dict(stage, sampler=dict(stage.sampler, num={number}))\n'
            f'            for stage in {old}.train_cfg.rcnn\n        ]'
        )
    masks = '        mask_head=dict(num_classes=len(classes)),\n'
    if not source.outlined:
        masks = """        # The annotations have no outlines.
        mask_head=None,
        mask_roi_extractor=None,
"""
    return f"""{reason}    rpn_head=dict(anchor_generator=dict(scales=[{anchors}])),
    roi_head=dict(
        bbox_head={box_head},
{masks}    ),
    # Regions per image, for up to {int(source.objects.max())} objects.
    train_cfg=dict(rcnn={sampler}),
"""


def _detection(
    source: Source,
    recipe: Recipe,
    base: Config,
    schedule: Schedule,
    size: int | None,
    init: str | None,
) -> str:
    scale = (1333, 800) if size is None else (size, size)
    retina = recipe.form == 'retinanet'
    if retina:
        heads = _retinanet(source, scale)
    else:
        heads = _two_stages(source, scale, recipe.form == 'cascade')
    masks = source.outlined and not retina
    smaller, larger = (tuple(round(side * factor) for side in scale) for factor in (0.8, 1.2))
    metric = "['bbox', 'segm']" if masks else "'bbox'"
    return f"""
model = dict(
    backbone={_backbone(schedule, init)},
{heads})

load = dict(type='LoadAnnotations', with_bbox=True, with_mask={masks})
train_pipeline = [
    dict(type='LoadImageFromFile'),
    load,
    dict(type='RandomChoiceResize', scales=[{smaller}, {scale}, {larger}], keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale={scale}, keep_ratio=True),
    load,
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
{_loaders(source, '')}val_evaluator = dict(ann_file={_path(source.val)}, metric={metric})
test_evaluator = val_evaluator
"""


def _segmentation(
    source: Source,
    recipe: Recipe,
    base: Config,
    schedule: Schedule,
    size: int | None,
    init: str | None,
) -> str:
    size = size or recipe.task.size
    heads = ['decode_head']
    if base.model.get('auxiliary_head'):
        heads.append('auxiliary_head')
    lines = ''.join(f'    {head}=dict(num_classes=len(classes)),\n' for head in heads)
    reduced = source.options['reduce_zero_label']
    options = "        type='BaseSegDataset',\n" + ''.join(
        f'        {key}={value!r},\n' for key, value in source.options.items()
    )
    return f"""
crop_size = ({size}, {size})
data_preprocessor = dict(size=crop_size)
model = dict(
    data_preprocessor=data_preprocessor,
    backbone={_backbone(schedule, init)},
{lines})

load = dict(type='LoadAnnotations', reduce_zero_label={reduced})
train_pipeline = [
    dict(type='LoadImageFromFile'),
    load,
    dict(
        type='RandomResize', scale=({4 * size}, {size}), ratio_range=(0.5, 2.0), keep_ratio=True
    ),
    dict(type='RandomCrop', crop_size=crop_size, cat_max_ratio=0.75),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=({4 * size}, {size}), keep_ratio=True),
    load,
    dict(type='PackSegInputs'),
]
{_loaders(source, options)}"""


def _classification(
    source: Source,
    recipe: Recipe,
    base: Config,
    schedule: Schedule,
    size: int | None,
    init: str | None,
) -> str:
    size = size or recipe.task.size
    topk = (1, 5) if len(source.classes) > 5 else (1,)
    options = "        _delete_=True,\n        type='CustomDataset',\n"
    # Mixtures of images need more time than a short training has.
    augments = '    train_cfg=None,\n' if schedule.short else ''
    return f"""
model = dict(
    backbone={_backbone(schedule, init)},
    head=dict(num_classes=len(classes), topk={topk}),
{augments})
data_preprocessor = dict(num_classes=len(classes))

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomResizedCrop', scale={size}, crop_ratio_range=(0.3, 1.0)),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='ResizeEdge', scale={round(size * 256 / 224)}, edge='short'),
    dict(type='CenterCrop', crop_size={size}),
    dict(type='PackInputs'),
]
{_loaders(source, options)}val_evaluator = dict(topk={topk})
test_evaluator = val_evaluator
"""


def _schedule(schedule: Schedule, base: Config) -> str:
    reason = '' if schedule.short else "  # the recipe's, scaled by the root of the batch"
    # A dict takes the place of mmseg's None on request alone.
    unset = 'clip_grad' in base.optim_wrapper and base.optim_wrapper.clip_grad is None
    clip = '_delete_=True, ' if unset else ''
    warmup = ''
    if schedule.warmup:
        warmup = (
            "    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, "
            f'end={schedule.warmup}),\n'
        )
    return f"""
train_cfg = dict(
    _delete_=True, type='IterBasedTrainLoop', max_iters=max_iters, val_interval=interval
)
optim_wrapper = dict(optimizer=dict(lr={schedule.lr:g}), clip_grad=dict({clip}max_norm=10)){reason}
param_scheduler = [
{warmup}    dict(
        type='CosineAnnealingLR',
        by_epoch=False,
        begin={schedule.warmup},
        end=max_iters,
        eta_min={schedule.lr / 100:g},
    ),
]
default_hooks = dict(
    logger=dict(interval=10, log_metric_by_epoch=False),
    checkpoint=dict(by_epoch=False, interval=interval, max_keep_ckpts=1),
)
log_processor = dict(by_epoch=False)
auto_scale_lr = dict(base_batch_size=batch_size)
"""
