"""Finds ``--cfg-options`` that no part of a config would ever read."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import mmengine.registry
from mmengine.config import Config
from mmengine.registry import DefaultScope, Registry, init_default_scope
from mmengine.runner import Runner
from torch.utils.data import DataLoader

from mala_mm.errors import UserError

# Read by mmengine outside of constructors.
RUNNER_KEYS = {
    *inspect.signature(Runner).parameters,
    *('custom_imports', 'find_unused_parameters', 'model_wrapper_cfg', 'runner_type', 'sync_bn'),
    *('tta_model', 'tta_pipeline'),
}
LOADER_KEYS = {
    *inspect.signature(DataLoader).parameters,
    *('dataset', 'sampler', 'batch_sampler', 'collate_fn', 'num_batch_per_epoch'),
}
COMPONENT_KEYS = {
    *('type', '_delete_', '_scope_', 'name', 'priority'),
    *('constructor', 'paramwise_cfg'),  # optim_wrapper
    *('by_epoch', 'convert_to_iter_based'),  # train_cfg, param_scheduler
}


def check_options(cfg: Config, options: Mapping[str, Any]) -> None:
    """Refuse options that name a key which the config does not have and nothing would read.

    A new key is fine where its owner takes it: an argument of the class that ``type`` names, an
    argument of the runner or of a data loader. In dicts without an owner (custom keys, hooks by
    name) every key is fine.

    Args:
        cfg (Config): The config before the options are merged.
        options (Mapping[str, Any]): Values by dotted key, as ``--cfg-options`` yields them.

    Raises:
        UserError: If a key would have no effect or could not be set.
    """
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    for option in options:
        node: Any = cfg._cfg_dict
        parts = option.split('.')
        for depth, part in enumerate(parts):
            path = '.'.join(parts[:depth])
            if isinstance(node, (list, tuple)):
                if not (part.isdigit() and int(part) < len(node)):
                    raise UserError(
                        f'--cfg-options {option}: {path} is a list of {len(node)}, so that a '
                        f'number below {len(node)} must follow, got {part!r}'
                    )
                node = node[int(part)]
            elif isinstance(node, Mapping):
                if part not in node:
                    _check_new_key(option, path, part, node)
                    break
                if depth == 0 and part == 'data_root':
                    raise UserError(
                        '--cfg-options data_root has no effect, because the datasets and metrics '
                        'already hold their own copy; use --data-root DIR'
                    )
                node = node[part]
            elif node is None or depth == 0:
                break
            else:
                raise UserError(
                    f'--cfg-options {option}: {path} is {node!r}, which has no '
                    f'{part!r}; leave it out'
                )


def _check_new_key(option: str, path: str, key: str, owner: Mapping) -> None:
    if not path:
        name, allowed = 'the config', RUNNER_KEYS
    elif path in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        name, allowed = path, LOADER_KEYS
    elif isinstance(owner.get('type'), str) and (found := _arguments(owner['type'])):
        name, allowed = f'{path} ({owner["type"]})', found | COMPONENT_KEYS
    else:
        return
    if key in allowed:
        return
    known = {*owner, *allowed} - COMPONENT_KEYS
    close = difflib.get_close_matches(key, sorted(known), n=3, cutoff=0.6)
    advice = (
        f'did you mean {" or ".join(close)}?' if close else f'it has {", ".join(sorted(known))}'
    )
    raise UserError(f'--cfg-options {option}: {name} has no {key!r}; {advice}')


def _arguments(type_name: str) -> set[str] | None:
    """Return the arguments that a registered class takes, or None where they cannot be told."""
    roots: Iterable[Registry] = (
        value for value in vars(mmengine.registry).values() if isinstance(value, Registry)
    )
    scope = DefaultScope.get_current_instance().scope_name
    importlib.import_module(f'{scope}.registry')
    for root in roots:  # not all of which every library has a child of
        cls = root.children.get(scope, root).get(type_name)
        if cls is not None:
            break
    if not inspect.isclass(cls):
        return None
    arguments: set[str] = set()
    for base in cls.__mro__:  # as long as **kwargs hand the rest on
        if '__init__' not in vars(base):
            continue
        parameters = inspect.signature(base.__init__).parameters.values()
        arguments |= {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return arguments - {'self'}
    return None
