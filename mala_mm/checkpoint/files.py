"""Reading checkpoint files without running what they contain, and writing them whole or not at all.

A checkpoint is a pickle, and unpickling one can run any code. Everything here reads tensors, plain
containers and the few types that mmengine's Runner adds, and refuses the rest.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from mmengine.logging import print_log
from mmengine.runner import CheckpointLoader
from torch import Tensor

from mala_mm import files
from mala_mm.compat import safe_globals
from mala_mm.errors import UserError

from .weights import resolve

META_KEY = 'mala_mm'
"""Where ``meta`` holds what :func:`mala_mm.checkpoint.convert` recorded."""

_FORCE, _FORCE_NOT = 'TORCH_FORCE_WEIGHTS_ONLY_LOAD', 'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'


@contextmanager
def _weights_only() -> Iterator[None]:
    """Read weights only in every ``torch.load`` inside, whatever its caller asks for."""
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
    os.environ[_FORCE] = '1'
    try:
        allowed = torch.serialization.get_safe_globals()
        # Leaving the context removes what it added, so it must not add what was there before.
        with torch.serialization.safe_globals([f for f in safe_globals() if f not in allowed]):
            yield
    finally:
        del os.environ[_FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def load_checkpoint(path: str | os.PathLike, map_location: Any = 'cpu') -> dict:
    """Read a checkpoint; nothing that it contains is executed.

    Args:
        path (str | os.PathLike): A ``.safetensors`` file, any other file that ``torch.save`` wrote,
            a URL of a scheme that mmengine knows (``https://``, ``s3://``, ...), or a name of
            published weights (``mavit-tiny``), which :func:`.weights.resolve` looks up.
        map_location: Where tensors go, as in ``torch.load``.

    Returns:
        dict: The contents as they were saved. Those of a ``.safetensors`` file come as
        ``dict(meta=..., state_dict=...)``.

    Raises:
        UserError: If the file is missing, damaged, no checkpoint, or asks for anything to be
            executed.
    """
    path = os.fspath(path)
    if _is_url(path):
        return _load_url(path, map_location)
    path = resolve(os.path.expanduser(path))
    if not os.path.isfile(path):
        kind = 'is a folder, not a file' if os.path.isdir(path) else 'does not exist'
        raise UserError(f'Checkpoint {path} {kind}; give the path of a checkpoint file')
    if path.endswith('.safetensors'):
        return _load_safetensors(path, map_location)
    return _load_pickle(path, map_location)


def _load_pickle(path: str, map_location: Any) -> dict:
    try:
        # torch does not look at the checksums that its own files carry.
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise zipfile.BadZipFile(f'the checksum of {damaged} is wrong')
        with _weights_only():
            checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # a damaged pickle raises anything at all
        raise _explain(path, error) from error
    return _check_type(checkpoint, path)


def _check_type(checkpoint: object, path: str) -> dict:
    if not isinstance(checkpoint, dict):
        raise UserError(
            f'Checkpoint {path} holds a {type(checkpoint).__name__}, not a dict of weights; '
            'give a file that torch.save wrote from a state dict'
        )
    return checkpoint


def _explain(path: str, error: Exception) -> UserError:
    message = str(error)
    if isinstance(error, PermissionError):
        return UserError(f'Checkpoint {path} cannot be read: permission denied; fix its mode')
    forbidden = _forbidden(error)
    if forbidden:
        return UserError(
            f'Checkpoint {path} was refused because it asks for {forbidden}, which is '
            'neither a tensor nor a plain value and could run code; ask its author for a file '
            'with the weights alone, or a .safetensors file'
        )
    reason = (message or type(error).__name__).split('\n')[0].split('. ')[0].rstrip('.')
    if _is_url(path):
        return UserError(
            f'Checkpoint {path} could not be loaded ({type(error).__name__}: {reason}); check the '
            'address, or download the file and give its path'
        )
    return UserError(
        f'Checkpoint {path} is damaged, cut short or no checkpoint ({reason}); '
        'copy or download it again'
    )


def _forbidden(error: Exception) -> str | None:
    """Name what a pickle asks for beyond tensors and plain values, if that is the error."""
    pattern = r'GLOBAL (\S+(?:\(.*?\))?)|reduce for unrecognized function (.+)'
    found = re.search(pattern, str(error)) if isinstance(error, UnpicklingError) else None
    return (found[1] or found[2]) if found else None


def _is_url(path: str) -> bool:
    return re.match(r'\w[\w+.-]*://', path) is not None


def _load_safetensors(path: str, map_location: Any) -> dict:
    from safetensors import SafetensorError, safe_open

    device = map_location if isinstance(map_location, (str, torch.device)) else 'cpu'
    try:
        with safe_open(path, 'pt', device=str(device)) as file:
            metadata = file.metadata() or {}
            state_dict = OrderedDict((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        meta = json.loads(metadata['meta']) if 'meta' in metadata else {}
        if not isinstance(meta, dict):
            raise ValueError('its metadata is no dict')
    except (SafetensorError, OSError, ValueError) as error:
        raise _explain(path, error) from error
    annotate(state_dict, meta)
    return dict(meta=meta, state_dict=state_dict)


def _load_url(url: str, map_location: Any) -> dict:
    try:
        with _weights_only():
            checkpoint = CheckpointLoader.load_checkpoint(url, map_location)
    except Exception as error:  # each of mmengine's schemes raises errors of its own
        raise _explain(url, error) from error
    return _check_type(checkpoint, url)


def annotate(state_dict: OrderedDict[str, Tensor], meta: dict) -> None:
    """Put what a conversion recorded where torch's loading passes it to the backbone.

    torch keeps a small dict per module beside a state dict. Our backbones write their attention
    operators into theirs, and compare when they load.
    """
    record = meta.get(META_KEY)
    if isinstance(record, dict):
        backbone = '' if record.get('target') == 'backbone' else 'backbone'
        state_dict._metadata = OrderedDict(
            {backbone: {key: record.get(key) for key in ('family', 'attn_types')}}
        )


def save_checkpoint(
    path: str | os.PathLike,
    state_dict: OrderedDict[str, Tensor],
    meta: dict,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint in mmengine's form; a file appears only once it is complete.

    Args:
        path (str | os.PathLike): The file, in safetensors' format if it ends in ``.safetensors``,
            in torch's otherwise.
        state_dict (OrderedDict[str, Tensor]): The weights.
        meta (dict): Plain values that describe them.
        overwrite (bool): Whether an existing file may be replaced.

    Raises:
        UserError: If the file exists, or cannot be written.
    """
    path = Path(path)
    check_writable(path, overwrite)
    # Views would drag the whole storage along, and safetensors refuses shared memory.
    tensors = OrderedDict((name, t.clone().contiguous()) for name, t in state_dict.items())
    tensors._metadata = getattr(state_dict, '_metadata', OrderedDict())
    try:
        with files.replacing(path) as part:
            if path.suffix == '.safetensors':
                from safetensors.torch import save

                part.write_bytes(save(tensors, metadata={'format': 'pt', 'meta': json.dumps(meta)}))
            else:
                annotate(tensors, meta)
                torch.save(dict(meta=meta, state_dict=tensors), part)
    except OSError as error:
        raise UserError(
            f'{path} could not be written ({error}); free space or choose another'
        ) from error


def check_writable(path: Path, overwrite: bool) -> None:
    """Refuse a path that :func:`save_checkpoint` could not write, before any work is done."""
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f'{path} is no path for a file; name a file in an existing folder')
    if path.exists() and not overwrite:
        raise UserError(f'{path} exists already; choose another name or pass --force')


def check_written(path: Path) -> None:
    """Read a file back that training wrote, before it takes its name.

    Args:
        path (Path): The file, in torch's format.

    Raises:
        OSError: If it does not hold what was written.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f'the checksum of {damaged} is wrong')
        with _weights_only():
            torch.load(path, map_location='cpu', weights_only=True, mmap=True)
    except UnpicklingError as error:  # it is whole, so that unsafe loading would read it
        print_log(
            f'The checkpoint asks for {_forbidden(error) or error}, which safe loading will '
            'refuse; keep plain values and tensors in it',
            'current',
            logging.WARNING,
        )
    except (zipfile.BadZipFile, RuntimeError) as error:
        raise OSError(errno.EIO, f'it reads back differently: {error}') from error


def non_finite(tensors: Mapping[str, Any]) -> list[str]:
    """Return the names of those that hold NaN or infinity, in their order.

    Args:
        tensors (Mapping[str, Any]): For example a state dict; what is no tensor is passed over.
    """
    return [
        name
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor)
        and tensor.is_floating_point()
        and not torch.isfinite(tensor).all()
    ]


@contextmanager
def safe_loading() -> Iterator[None]:
    """Make every checkpoint that is read inside safe, whoever reads it.

    The inference functions of mmdet, mmseg and mmpretrain, ``init_cfg=dict(type='Pretrained')`` and
    mmengine's Runner load through mmengine's ``CheckpointLoader``: its local files go through
    :func:`load_checkpoint`, and all other ``torch.load`` calls read weights only, downloads
    included. It holds for the whole process, other threads included, and ends with the block::

        with safe_loading():
            model = init_detector('config.py', 'from_somewhere.pth')
    """
    schemes = CheckpointLoader._schemes
    with _weights_only():
        CheckpointLoader._schemes = dict(schemes)
        CheckpointLoader.register_scheme(prefixes='', loader=load_from_local, force=True)
        try:
            yield
        finally:
            CheckpointLoader._schemes = schemes


def load_from_local(filename: str, map_location: Any = None) -> dict:
    """Read a local file in the place of mmengine's loader; as :func:`load_checkpoint`."""
    checkpoint = load_checkpoint(filename, map_location)
    # Runner.resume runs this text as Python. mmengine itself writes `cfg`, which it does not.
    if isinstance(checkpoint.get('meta'), dict):
        checkpoint['meta'].pop('config', None)
    return checkpoint


def enforce_safe_loading() -> None:
    """Begin what :func:`safe_loading` does, for the rest of this process."""
    in_force = CheckpointLoader._schemes.get('') is load_from_local
    if not in_force or os.environ.get(_FORCE) != '1':
        _for_good.enter_context(safe_loading())


_for_good = ExitStack()
