"""What checks read off the configuration of a data set, and what their sentences have in common."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mala_mm.errors import UserError

SCOPES = ('mmdet', 'mmseg', 'mmpretrain')


class Dataset:
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
        """Return the configured value, or the default in the constructor that defines it."""
        if name in self.cfg:
            return self.cfg[name]
        for base in self.cls.__mro__ if self.cls else ():
            parameter = inspect.signature(base.__init__).parameters.get(name)
            if parameter is not None and parameter.default is not inspect.Parameter.empty:
                return parameter.default
        return None

    @property
    def default_classes(self) -> tuple[str, ...] | None:
        """The classes that the data set's type brings along, None if it has none."""
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
                    f'one name per line; write a tuple, such as classes=({names!r},)'
                )
            names = read_lines(names)
        return tuple(names)


def leaves(cfg: Mapping[str, Any] | Sequence) -> Iterator[Mapping[str, Any]]:
    """Return the data sets inside wrappers."""
    if isinstance(cfg, (list, tuple)):
        for part in cfg:
            yield from leaves(part)
    elif 'datasets' in cfg:
        yield from leaves(cfg['datasets'])
    elif 'dataset' in cfg:
        yield from leaves(cfg['dataset'])
    elif 'type' in cfg:
        yield cfg


def _resolve(kind: str | type, scope: str | None) -> type | None:
    """Return the class of a data set type, or None if nothing knows it (building will complain)."""
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


def require_folder(path: str, kind: str) -> None:
    """Refuses a folder that is not there."""
    if not os.path.isdir(path):
        raise UserError(
            f'The {kind} folder {path} does not exist; put it there or correct data_root and '
            'data_prefix'
        )


def read_lines(path: str) -> list[str]:
    """Return the lines of a text file, stripped; blank ones too, which the data sets trip over."""
    try:
        with open(path, encoding='utf-8') as file:
            return [line.strip() for line in file]
    except (OSError, ValueError) as error:
        raise UserError(
            f'The list {path} cannot be read ({error}); write it again, as plain UTF-8 text'
        ) from None


def some(names: Sequence[str], most: int = 4) -> str:
    """Return the first of the names, and how many more there are."""
    shown = ', '.join(str(name) for name in names[:most])
    return shown if len(names) <= most else f'{shown} and {len(names) - most} more'


def is_are(names: Sequence[str]) -> str:
    """Return the verb that goes with so many names."""
    return 'is' if len(names) == 1 else 'are'


def literal(names: Sequence[str], most: int = 12) -> str:
    """Names as they are written in a config."""
    return repr(tuple(names)) if len(names) <= most else '(...)'
