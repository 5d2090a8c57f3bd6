"""Reads a config for a run: options of the command line, place of the data, kind of machine."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.logging import print_log
from mmengine.utils import import_modules_from_strings

import mala_mm.registry  # noqa: F401, makes `mmseg::` known to mmengine
from mala_mm.errors import UserError

from .options import check_options

DATALOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')


def load_config(path: str | os.PathLike, options: Mapping[str, Any] | None = None) -> Config:
    """Read a config file and merge options into it.

    Args:
        path (str | os.PathLike): The config file.
        options (Mapping[str, Any], optional): Values by dotted key, as ``--cfg-options`` yields
            them.

    Raises:
        UserError: If the file cannot be read, needs a package that is not installed, or an option
            names a key that nothing would read.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f'Config {path} does not exist; {_similar_file(path)}')
    try:
        cfg = Config.fromfile(path)
    except ModuleNotFoundError as error:
        raise UserError(
            f'Config {path} needs a package that is missing ({error}); '
            '`python -m mala_mm.doctor` says how to install it'
        ) from error
    except Exception as error:  # a config is the user's program: whatever it raises is bad input
        raise UserError(
            f'Config {path} cannot be read: {type(error).__name__}: {error}; correct it'
        ) from error
    _import_scope(cfg, path)
    if options:
        check_options(cfg, options)
        try:
            cfg.merge_from_dict(dict(options))
        except (KeyError, TypeError, IndexError) as error:
            raise UserError(f'--cfg-options do not fit {path}: {error}; correct them') from error
        _import_what_is_named(cfg, path)
    for loader in DATALOADERS:
        # Users who set num_workers=0 mean no worker, whatever else asks for one.
        if isinstance(cfg.get(loader), Mapping) and cfg[loader].get('num_workers', 0) == 0:
            cfg[loader].persistent_workers = False
            cfg[loader].pop('prefetch_factor', None)
    return cfg


def _similar_file(path: Path) -> str:
    names = [p.name for p in path.parent.glob('*')] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f'did you mean {path.parent / close[0]}?' if close else 'correct the path'


def _import_what_is_named(cfg: Config, path: Path) -> None:
    """Import what options may have changed."""
    if isinstance(cfg.get('default_scope'), str):
        _import_scope(cfg, path)
    custom = cfg.get('custom_imports') or dict(imports=[])
    try:
        import_modules_from_strings(**custom)
    except (ImportError, TypeError) as error:
        raise UserError(
            f'custom_imports={dict(custom)} cannot be imported ({error}); correct its modules'
        ) from error


def _import_scope(cfg: Config, path: Path) -> None:
    scope = cfg.get('default_scope') or 'mmengine'
    try:
        importlib.import_module(scope)
    except ImportError as error:
        raise UserError(
            f'Config {path} needs {scope}, which cannot be imported ({error}); '
            '`python -m mala_mm.doctor` says how to fix it'
        ) from error


def set_data_root(cfg: Config, root: str | os.PathLike) -> None:
    """Let every dataset and metric of a config read from another folder.

    Args:
        cfg (Config): Changed in place: every path below the datasets' ``data_root``.
        root (str | os.PathLike): The folder that takes the place of ``data/coco`` or
            ``data/ade/ADEChallengeData2016``.

    Raises:
        UserError: If the datasets have no ``data_root``, or several.
    """
    loaders = [cfg.get(loader) for loader in DATALOADERS]
    old = {os.path.normpath(found) for found in _values(loaders, 'data_root') if found}
    if len(old) != 1:
        raise UserError(
            f'--data-root needs a config whose datasets share one data_root, found {sorted(old)}; '
            'set each path through --cfg-options'
        )
    (prefix,) = old

    def moved(value: Any) -> Any:
        path = os.path.normpath(value) if isinstance(value, str) else ''
        if path == prefix:
            return os.fspath(root)
        if path.startswith(prefix + os.sep):
            return os.path.join(root, path[len(prefix) + 1 :])
        return value

    _replace_leaves(cfg._cfg_dict, moved)


def _values(node: Any, key: str) -> Iterator[Any]:
    """All values that stand under a key anywhere in a config."""
    if isinstance(node, Mapping):
        if key in node:
            yield node[key]
        node = list(node.values())
    if isinstance(node, (list, tuple)):
        for child in node:
            yield from _values(child, key)


def _replace_leaves(node: Any, replace: Callable[[Any], Any]) -> Any:
    """Replace all leaves of a config's dicts and lists, in place where they can be changed."""
    if isinstance(node, Mapping):
        for key, value in list(node.items()):
            node[key] = _replace_leaves(value, replace)
        return node
    if isinstance(node, (list, tuple)):
        return type(node)(_replace_leaves(value, replace) for value in node)
    return replace(node)


def set_precision(cfg: Config, amp: bool = False) -> None:
    """Turn mixed precision on, as far as the machine allows.

    A GPU runs ``AmpOptimWrapper`` (float16 and a dynamic loss scale unless the config says
    otherwise). It refuses to run on a CPU: there, ``amp`` means bfloat16 autocast, and a config
    that asks for ``AmpOptimWrapper`` by itself trains in float32.

    Args:
        cfg (Config): Changed in place.
        amp (bool): Whether the user asked for mixed precision.
    """
    wrapper = cfg.get('optim_wrapper')
    if not wrapper:
        return
    wanted = wrapper.get('type') == 'AmpOptimWrapper'
    if get_device() != 'cpu':
        if amp and not wanted:
            wrapper.type = 'AmpOptimWrapper'
            wrapper.setdefault('loss_scale', 'dynamic')
        return
    if amp or wanted:
        for key in ('loss_scale', 'dtype', 'use_fsdp'):
            wrapper.pop(key, None)
    if amp:
        wrapper.type = 'mala_mm.CPUAmpOptimWrapper'
        print_log('Mixed precision on the CPU: bfloat16 without loss scaling.', 'current')
    elif wanted:
        wrapper.type = 'OptimWrapper'
        print_log(
            'No GPU: training in float32 instead of mixed precision (--amp: bfloat16).', 'current'
        )
