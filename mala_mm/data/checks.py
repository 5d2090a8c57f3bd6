"""Checks of data sets before anything is built: wrong paths and class lists end in one sentence.

They understand the data sets of mmdet (COCO format), mmseg and mmpretrain and their wrappers, and
let anything else, and data behind a remote storage backend, pass.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mala_mm.errors import UserError

from .coco import Finding, missing_files, summarize_coco, validate_coco

__all__ = ['Finding', 'check_dataset', 'check_num_classes', 'coco_files', 'validate_coco']

SCOPES = ('mmdet', 'mmseg', 'mmpretrain')
HEADS = ('bbox_head', 'mask_head', 'decode_head', 'auxiliary_head', 'head')
# Heads whose classes are not the data set's: objectness, and semantic side tasks.
FOREIGN_HEADS = ('rpn_head', 'semantic_head')
IMAGE_SUFFIXES = ('.jpg', '.jpeg', '.png', '.ppm', '.bmp', '.pgm', '.tif')
IGNORE = 255


def check_dataset(
    dataset_cfg: Mapping[str, Any], scope: str | None = None, limit: int | None = 64
) -> None:
    """Checks that a data set is there and fits its configuration.

    Args:
        dataset_cfg: the ``dataset`` of a data loader; wrappers (RepeatDataset, ConcatDataset,
            MultiImageMixDataset, ...) are looked into.
        scope: where a bare type name is looked up first; the config's ``default_scope``.
        limit: number of label maps that are read, evenly spread; None reads all.

    Raises:
        UserError: data root, annotation file, folder, image or label missing; annotation file not
            readable; classes other than the configured ones; label values out of range.
    """
    for cfg in _leaves(dataset_cfg):
        dataset = _Dataset(cfg, scope)
        if dataset.cls is None or dataset.remote:
            continue
        if dataset.root and not os.path.isdir(dataset.root):
            raise UserError(
                f'The data root {dataset.root} does not exist; put the data set there or name its '
                'folder (--data-root, or data_root in the config).'
            )
        if dataset.family == 'coco':
            _check_coco(dataset)
        elif dataset.family == 'seg':
            _check_seg(dataset, limit)
        elif dataset.family == 'cls':
            _check_cls(dataset)


def check_num_classes(
    model_cfg: Mapping[str, Any], dataset_cfg: Mapping[str, Any], scope: str | None = None
) -> None:
    """Checks that the heads predict as many classes as the data set has.

    Args:
        model_cfg: the config's ``model``.
        dataset_cfg: the ``dataset`` of a data loader.
        scope: as for :func:`check_dataset`.

    Raises:
        UserError: some ``num_classes`` differs; all that differ are named.
    """
    for cfg in _leaves(dataset_cfg):
        dataset = _Dataset(cfg, scope)
        if dataset.cls is None:
            continue
        names, source = dataset.classes, 'its metainfo'
        if names is None and not dataset.remote:
            if dataset.family == 'coco' and dataset.ann_file:
                names, source = summarize_coco(dataset.ann_file).categories, dataset.ann_file
            elif dataset.family == 'cls' and not dataset.ann_file:
                names, source = _class_folders(dataset), dataset.images
        if names is None:
            continue
        heads = [(path, n) for path, n in _num_classes(model_cfg) if n != len(names)]
        if heads:
            found = ', '.join(f'{path}.num_classes is {n}' for path, n in heads)
            raise UserError(
                f'{found}, but the data set {dataset.name} has {len(names)} classes '
                f'({_some(names)}; from {source}); set num_classes={len(names)} or correct the '
                "data set's classes."
            )


def coco_files(dataset_cfg: Mapping[str, Any], scope: str | None = None) -> list[tuple[str, str]]:
    """(annotation file, image folder) of each data set in COCO format."""
    datasets = [_Dataset(cfg, scope) for cfg in _leaves(dataset_cfg)]
    return [(d.ann_file, d.images) for d in datasets if d.family == 'coco' and not d.remote]


class _Dataset:
    """What the checks read off a data set's configuration, with the class's defaults filled in."""

    def __init__(self, cfg: Mapping[str, Any], scope: str | None) -> None:
        self.cfg = cfg
        self.name = cfg['type'] if isinstance(cfg['type'], str) else cfg['type'].__name__
        self.cls = _resolve(cfg['type'], scope)
        lineage = self.cls.__mro__ if self.cls else ()
        self.family = None
        for base in lineage:
            package = base.__module__.split('.')[0]
            self.family = {
                ('mmdet', 'CocoDataset'): 'coco',
                ('mmseg', 'BaseSegDataset'): 'seg',
                ('mmpretrain', 'CustomDataset'): 'cls',
            }.get((package, base.__name__), self.family)
        backend = self.option('backend_args') or {}
        self.root = os.path.expanduser(self.option('data_root') or '')
        self.remote = '://' in self.root or backend.get('backend', 'local') != 'local'
        prefix = self.option('data_prefix') or {}
        if isinstance(prefix, str):
            prefix = dict(img_path=prefix)
        ann_file, split = self.option('ann_file') or '', self.option('split')
        if self.family == 'cls' and split:  # mmpretrain's ImageNet
            prefix = prefix if prefix.get('img_path') else dict(img_path=split)
            if not ann_file and os.path.isfile(os.path.join(self.root, 'meta', f'{split}.txt')):
                ann_file = os.path.join('meta', f'{split}.txt')
        self.ann_file = os.path.join(self.root, ann_file) if ann_file else ''
        image_prefix = prefix.get('img_path', prefix.get('img')) or ''
        self.images = os.path.join(self.root, image_prefix)
        labels = prefix.get('seg_map_path')
        self.labels = os.path.join(self.root, labels) if labels else None

    def option(self, name: str) -> Any:
        """The configured value, or the default in the constructor that defines it."""
        if name in self.cfg:
            return self.cfg[name]
        for base in self.cls.__mro__ if self.cls else ():
            parameter = inspect.signature(base.__init__).parameters.get(name)
            if parameter is not None and parameter.default is not inspect.Parameter.empty:
                return parameter.default
        return None

    @property
    def default_classes(self) -> tuple[str, ...] | None:
        names = getattr(self.cls, 'METAINFO', {}).get('classes')
        return None if names is None else tuple(names)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names from the configuration or the data set's class; None if neither has any."""
        names = (self.cfg.get('metainfo') or {}).get('classes', self.cfg.get('classes'))
        if names is None:
            return self.default_classes
        if isinstance(names, str):
            if not os.path.isfile(names):
                raise UserError(
                    f'The classes of {self.name} are the text {names!r}, which is no file with '
                    f'one name per line; write a tuple, such as classes=({names!r},).'
                )
            names = [line.strip() for line in Path(names).read_text().splitlines() if line.strip()]
        return tuple(names)


def _leaves(cfg: Mapping[str, Any] | Sequence) -> Iterator[Mapping[str, Any]]:
    """The data sets inside wrappers."""
    if isinstance(cfg, (list, tuple)):
        for part in cfg:
            yield from _leaves(part)
    elif 'datasets' in cfg:
        yield from _leaves(cfg['datasets'])
    elif 'dataset' in cfg:
        yield from _leaves(cfg['dataset'])
    elif 'type' in cfg:
        yield cfg


def _resolve(kind: str | type, scope: str | None) -> type | None:
    """The class of a data set type, or None if nothing knows it (building will complain)."""
    if isinstance(kind, type):
        return kind
    from mmengine.registry import DATASETS, DefaultScope

    current = DefaultScope.get_current_instance()
    scopes = [scope, current.scope_name if current else None, *SCOPES]
    names = [kind] if '.' in kind else [f'{s}.{kind}' for s in dict.fromkeys(scopes) if s]
    for name in names:
        found = DATASETS.get(name)
        if found is not None:
            return found
    return None


def _check_coco(dataset: _Dataset) -> None:
    if not dataset.ann_file:
        raise UserError(f'The data set {dataset.name} has no ann_file; name its annotation file.')
    summary = summarize_coco(dataset.ann_file)
    _require_folder(dataset.images, 'image')
    missing = missing_files(dataset.images, summary.file_names)
    if missing:
        raise UserError(
            f'{len(missing)} of {len(summary.file_names)} images of {dataset.ann_file} are not in '
            f'{dataset.images}, the first is {missing[0]}; fetch them or correct data_prefix.'
        )
    names = dataset.classes
    if names is None:
        return
    absent = [name for name in names if name not in summary.categories]
    extra = [name for name in summary.categories if name not in names]
    subset = (dataset.cfg.get('metainfo') or {}).get('subset', False)
    if absent or (extra and not subset):
        remedy = f'set metainfo=dict(classes={_literal(summary.categories)}) in the data set'
        if absent:
            wrong = f'{_some(absent)} {_is_are(absent)} not in the file'
        else:
            wrong = f'{_some(extra)} {_is_are(extra)} not configured and would be dropped'
            remedy += ' or, to drop them on purpose, metainfo=dict(classes=..., subset=True)'
        raise UserError(
            f'The configuration has {len(names)} classes and {dataset.ann_file} has '
            f'{len(summary.categories)} categories: {wrong}; {remedy}.'
        )


def _check_seg(dataset: _Dataset, limit: int | None) -> None:
    _require_folder(dataset.images, 'image')
    if dataset.labels is None:
        return  # a test set without labels
    _require_folder(dataset.labels, 'label')
    image_suffix, label_suffix = dataset.option('img_suffix'), dataset.option('seg_map_suffix')
    if dataset.ann_file and not os.path.isdir(dataset.ann_file):
        if not os.path.isfile(dataset.ann_file):
            raise UserError(
                f'The list of images {dataset.ann_file} does not exist; put it there or correct '
                'ann_file.'
            )
        stems = [s.strip() for s in Path(dataset.ann_file).read_text().splitlines() if s.strip()]
        missing = missing_files(dataset.images, [stem + image_suffix for stem in stems])
        if missing:
            raise UserError(
                f'{len(missing)} of {len(stems)} images of {dataset.ann_file} are not in '
                f'{dataset.images}, the first is {missing[0]}; fetch them or fix the list.'
            )
    else:
        paths = sorted(Path(dataset.images).rglob(f'*{image_suffix}'))
        stems = [str(p.relative_to(dataset.images))[: -len(image_suffix)] for p in paths]
    if not stems:
        raise UserError(
            f'There are no images *{image_suffix} in {dataset.images}; put them there or correct '
            'data_prefix and img_suffix.'
        )
    missing = missing_files(dataset.labels, [stem + label_suffix for stem in stems])
    if missing:
        raise UserError(
            f'{len(missing)} of {len(stems)} images have no label map in {dataset.labels}, the '
            f'first is {missing[0]}; add them or take the images out.'
        )
    names = dataset.classes
    if names is None:
        return
    fixed = dataset.default_classes
    foreign = [name for name in names if fixed and name not in fixed]
    if foreign:
        raise UserError(
            f'{dataset.name} has {len(fixed)} classes of its own and {_some(foreign)} '
            f"{_is_are(foreign)} not among them; use type='mmseg.BaseSegDataset' with "
            'reduce_zero_label and suffixes set for other classes.'
        )
    # With a choice of its classes, the files still hold the labels of all of them.
    count = len(fixed or names)
    step = 1 if limit is None else max(1, -(-len(stems) // limit))
    for stem in stems[::step]:
        _check_label_map(Path(dataset.labels) / (stem + label_suffix), count, dataset)


def _check_label_map(path: Path, count: int, dataset: _Dataset) -> None:
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as file:
            labels = np.asarray(file)
    except (UnidentifiedImageError, OSError) as error:
        raise UserError(f'The label map {path} cannot be read ({error}); write it again.') from None
    if labels.ndim != 2:
        raise UserError(
            f'The label map {path} has {labels.shape[2]} channels; save it with one channel that '
            'holds the class index.'
        )
    reduced = bool(dataset.option('reduce_zero_label'))
    highest = count if reduced else count - 1
    values = np.unique(labels)
    wrong = [
        int(v) for v in values if v > highest and v not in (IGNORE, dataset.option('ignore_index'))
    ]
    if wrong:
        raise UserError(
            f'The label map {path} has the value {wrong[0]}, but {dataset.name} with {count} '
            f'classes and reduce_zero_label={reduced} allows 0 to {highest} and {IGNORE}; correct '
            'the label maps, metainfo.classes or reduce_zero_label.'
        )


def _check_cls(dataset: _Dataset) -> None:
    _require_folder(dataset.images, 'image')
    names = dataset.classes
    if dataset.ann_file:
        _check_cls_list(dataset, names)
        return
    if dataset.option('with_label') is False or dataset.cfg.get('split') == 'test':
        return
    folders = _class_folders(dataset)
    if names is not None and len(names) != len(folders):
        raise UserError(
            f'The configuration of {dataset.name} has {len(names)} classes and {dataset.images} '
            f'has {len(folders)} class folders ({_some(folders)}); set '
            f'metainfo=dict(classes={_literal(folders)}) or correct data_root.'
        )
    if names is not None and set(names) == set(folders) and list(names) != list(folders):
        raise UserError(
            f'The classes of {dataset.name} are listed as {_some(names)}, but labels follow the '
            f'sorted folders of {dataset.images}; set metainfo=dict(classes={_literal(folders)}).'
        )
    for folder in folders:
        files = (f for _, _, fs in os.walk(os.path.join(dataset.images, folder)) for f in fs)
        if not any(name.lower().endswith(IMAGE_SUFFIXES) for name in files):
            raise UserError(
                f'The class folder {os.path.join(dataset.images, folder)} holds no image; fill '
                'or remove it.'
            )


def _check_cls_list(dataset: _Dataset, names: tuple[str, ...] | None) -> None:
    path = dataset.ann_file
    if not os.path.isfile(path):
        raise UserError(f'The annotation file {path} does not exist; correct ann_file.')
    files = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if dataset.option('with_label') is False:
            files.append(line.strip())
            continue
        name, _, label = line.strip().rpartition(' ')
        if not name or not label.isdigit():
            raise UserError(
                f'Line {number} of {path} is {line!r}; each line has to be a file name, a space '
                'and a class index.'
            )
        if names is not None and int(label) >= len(names):
            raise UserError(
                f'Line {number} of {path} has the class index {label}, but {dataset.name} has '
                f'{len(names)} classes; correct the file or metainfo.classes.'
            )
        files.append(name)
    missing = missing_files(dataset.images, files)
    if missing:
        raise UserError(
            f'{len(missing)} of {len(files)} images of {path} are not in {dataset.images}, the '
            f'first is {missing[0]}; fetch them or correct data_prefix.'
        )


def _class_folders(dataset: _Dataset) -> tuple[str, ...]:
    _require_folder(dataset.images, 'image')
    folders = tuple(sorted(e.name for e in os.scandir(dataset.images) if e.is_dir()))
    if not folders:
        raise UserError(
            f'{dataset.images} has no class folders; put one folder per class there or correct '
            'data_root and data_prefix.'
        )
    return folders


def _require_folder(path: str, kind: str) -> None:
    if not os.path.isdir(path):
        raise UserError(
            f'The {kind} folder {path} does not exist; put it there or correct data_root and '
            'data_prefix.'
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


def _some(names: Sequence[str], most: int = 4) -> str:
    shown = ', '.join(str(name) for name in names[:most])
    return shown if len(names) <= most else f'{shown} and {len(names) - most} more'


def _is_are(names: Sequence[str]) -> str:
    return 'is' if len(names) == 1 else 'are'


def _literal(names: Sequence[str], most: int = 12) -> str:
    return repr(tuple(names)) if len(names) <= most else '(...)'
