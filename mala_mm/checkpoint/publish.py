"""Make a checkpoint small enough to share: weights and what describes them, nothing else.

    python tools/publish_model.py work_dirs/nuts/iter_240.pth nuts.safetensors
    python tools/publish_model.py work_dirs/nuts/iter_240.pth backbone.pth --backbone

The optimizer, the random states and the log go, which are two thirds of what training writes. The
name gets the first eight digits of the file's SHA-256, as OpenMMLab names its files, by which a
broken download shows. Any tool takes the result in place of the checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mala_mm.errors import UserError
from mala_mm.version import __version__

from . import names
from .files import META_KEY, load_checkpoint, non_finite, save_checkpoint


def publish(
    source: str | os.PathLike, destination: str | os.PathLike, backbone: bool = False
) -> Path:
    """Write the weights of a checkpoint under a name with a digest.

    Args:
        source (str | os.PathLike): What training wrote.
        destination (str | os.PathLike): The file to write, ``.pth`` or ``.safetensors``; its name
            gets ``-`` and eight digits before the suffix.
        backbone (bool): Whether to leave all but the backbone out.

    Returns:
        Path: The file.

    Raises:
        UserError: If a file is wrong, or the weights are not finite; nothing is written then.
    """
    destination = Path(destination).expanduser()
    if destination.suffix not in ('.pth', '.safetensors'):
        raise UserError(f'{destination} must end in .pth or .safetensors')
    if not destination.parent.is_dir():
        raise UserError(f'{destination.parent} is no folder; name a file in an existing one')
    checkpoint = load_checkpoint(source)
    weights, _ = names.find_weights(checkpoint, str(source))
    damaged = non_finite(weights)
    if damaged:
        raise UserError(
            f'{source} holds values that are not finite, the first in {damaged[0]}; publish an '
            'earlier checkpoint'
        )
    if backbone:
        if not any(name.startswith(names.BACKBONE) for name in weights):
            raise UserError(f'{source} holds no whole model; leave --backbone out')
        weights = names.strip(weights, names.BACKBONE)
    meta = _describe(checkpoint, weights, backbone)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix='.publish') as folder:
        part = Path(folder) / destination.name
        save_checkpoint(part, weights, meta)
        digest = hashlib.sha256(part.read_bytes()).hexdigest()[:8]
        path = destination.with_name(f'{destination.stem}-{digest}{destination.suffix}')
        os.replace(part, path)
    return path


def _describe(checkpoint: Mapping, weights: OrderedDict, backbone: bool) -> dict[str, Any]:
    """Return the plain values to keep: classes, palette, and the attention of the backbone."""
    old = checkpoint.get('meta') if isinstance(checkpoint.get('meta'), Mapping) else {}
    meta: dict[str, Any] = {}
    if isinstance(old.get('dataset_meta'), Mapping) and not backbone:
        meta['dataset_meta'] = _plain(old['dataset_meta'])
    record = dict(old.get(META_KEY) or {}, version=__version__)
    for note in getattr(weights, '_metadata', {}).values():
        if 'attn_types' in note:
            record.update(family=note.get('family'), attn_types=list(note['attn_types']))
    whole = any(name.startswith(names.BACKBONE) for name in weights)
    record['target'] = 'model' if whole else 'backbone'
    meta[META_KEY] = record
    return meta


def _plain(value: Any) -> Any:
    """Keep what JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def main(argv: Sequence[str] | None = None) -> None:
    """Publish one file from the command line.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If a file is wrong; nothing is written then.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('source', metavar='SRC', help='what training wrote')
    parser.add_argument('destination', metavar='DST', help='the file to write')
    parser.add_argument('--backbone', action='store_true', help='leave all but the backbone out')
    args = parser.parse_args(argv)
    path = publish(args.source, args.destination, args.backbone)
    before, after = (Path(p).expanduser().stat().st_size / 1e6 for p in (args.source, path))
    print(f'{path}: {after:.0f} MB, from {before:.0f} MB')
