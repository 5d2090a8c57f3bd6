"""Converts a published MAViT or RAVLT checkpoint into this package's form.

    python tools/convert_checkpoint.py SRC DST --family mavit --arch small
    python tools/convert_checkpoint.py SRC DST --family ravlt --arch base --to classifier

The weights cannot tell which attention they were trained with, so the family is always named. DST
ending in .safetensors is written in that format. See docs/checkpoints.md.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from mala_mm.errors import UserError
from mala_mm.models import ARCHS, FAMILIES
from mala_mm.models.heads import ProjectionNeck
from mala_mm.ops import OPERATORS
from mala_mm.version import __version__

from . import names
from .files import META_KEY, annotate, check_writable, load_checkpoint, save_checkpoint

TARGETS = dict(
    backbone=(),
    classifier=('neck.', 'head.'),
    detector=('bbox_head.', 'rpn_head.', 'roi_head.'),
    segmentor=('decode_head.',),
)
"""What a file can be converted to, and how the names of its heads begin."""


@dataclass(frozen=True)
class Conversion:
    """Converted weights and the account of them.

    Attributes:
        state_dict (OrderedDict[str, Tensor]): The weights under this package's names.
        meta (dict): What is written beside them: family, arch, attn_types, source, ...
        copied (tuple[str, ...]): Names of heads that were taken over as they were, because mmdet
            and mmseg define them.
        angles (tuple[str, ...]): Rotary angles in the source that were found right, and left out
            because they are computed here.
        unused (tuple[str, ...]): Names in the source that the target has no place for.
        entries (tuple[str, ...]): What the file holds beside the weights, such as ``optimizer``.
        counters (tuple[str, ...]): BatchNorm counters that the source lacks, which became 0.
        missing (tuple[str, ...]): Output norms that the source lacks, as every classifier does;
            a model that loads the file keeps their initial values.
    """

    state_dict: OrderedDict[str, Tensor]
    meta: dict
    copied: tuple[str, ...]
    angles: tuple[str, ...]
    unused: tuple[str, ...]
    entries: tuple[str, ...]
    counters: tuple[str, ...]
    missing: tuple[str, ...]

    def __str__(self) -> str:
        converted = len(self.state_dict) - len(self.copied) - len(self.counters)
        lines = [f'{converted} tensors converted, their shapes are those of the model.']
        for title, listed in (
            ('heads, taken over under the same names', self.copied),
            ('rotary angles, as computed here, left out', self.angles),
            ('in the source but NOT USED', self.unused),
            ('entries beside the weights, not read', self.entries),
            ('counters that the source lacks, set to 0', self.counters),
            ('NOT FILLED, loading keeps their initial values', self.missing),
        ):
            if listed:
                lines.append(f'{len(listed)} {title}: {", ".join(listed)}')
        return '\n'.join(lines)


def convert_file(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    family: str,
    arch: str,
    to: str = 'backbone',
    attn_types: Sequence[str] | None = None,
    container: str | None = None,
    overwrite: bool = False,
) -> Conversion:
    """Convert a published checkpoint file.

    Args:
        source (str | os.PathLike): The published file.
        destination (str | os.PathLike): The file to write; in safetensors' format if it ends in
            ``.safetensors``, in torch's otherwise.
        family (str): ``'mavit'`` or ``'ravlt'``. The weights do not tell.
        arch (str): ``'tiny'``, ``'small'``, ``'base'`` or ``'large'``.
        to (str): ``'backbone'``, ``'classifier'``, ``'detector'`` or ``'segmentor'``.
        attn_types (Sequence[str], optional): The operator that each stage was trained with;
            defaults to the published assignment of the family.
        container (str, optional): The key of the file that holds the weights: ``'state_dict'``,
            ``'model'`` or ``'model_ema'``. Defaults to the first of them that is there.
        overwrite (bool): Whether ``destination`` may be replaced.

    Returns:
        Conversion: What was written, and the account.

    Raises:
        UserError: If a file or an argument is wrong; nothing is written then.
    """
    source, destination = Path(source).expanduser(), Path(destination).expanduser()
    check_writable(destination, overwrite)
    checkpoint = load_checkpoint(source)
    conversion = convert(checkpoint, str(source), family, arch, to, attn_types, container)
    conversion.meta[META_KEY]['source_sha256'] = _sha256(source)
    save_checkpoint(destination, conversion.state_dict, conversion.meta, overwrite)
    return conversion


def convert(
    checkpoint: dict,
    source: str,
    family: str,
    arch: str,
    to: str = 'backbone',
    attn_types: Sequence[str] | None = None,
    container: str | None = None,
) -> Conversion:
    """Convert the contents of a published file; arguments as in :func:`convert_file`."""
    for title, value, known in (
        ('family', family, FAMILIES), ('arch', arch, ARCHS), ('target', to, TARGETS)
    ):  # fmt: skip
        if value not in known:
            raise UserError(f'{title} must be one of {", ".join(known)}, got {value!r}')
    weights, container = names.find_weights(checkpoint, source, container)
    _check_is_published(weights, checkpoint, source)
    entries = [] if container is None else [key for key in checkpoint if key != container]
    weights, angles, sources = names.rename(weights, source)
    _check_arch(weights, source, family, arch)
    model = _template(family, arch, None if attn_types is None else tuple(attn_types))
    names.check_angles(angles, model, source)

    expected = OrderedDict(
        (names.BACKBONE + name, tensor)
        for name, tensor in model.state_dict().items()
        if to != 'classifier' or not name.startswith('norm')
    )
    heads = tuple(name for name in weights if name.startswith(TARGETS[to])) if TARGETS[to] else ()
    if TARGETS[to] and not heads:
        raise UserError(
            f'{source} has no {to} in it, no name begins with {" or ".join(TARGETS[to])}; '
            'convert it with --to backbone'
        )
    copied = ()
    if to == 'classifier':
        classes = weights['head.fc.weight'].shape[0] if 'head.fc.weight' in weights else 1000
        expected.update(_classifier_tail(family, arch, model.embed_dims[-1], classes))
    elif heads:
        copied = tuple(name for name in weights if not name.startswith(names.BACKBONE))

    state_dict, counters, missing = OrderedDict(), [], []
    for name, tensor in expected.items():
        if name in weights:
            if weights[name].shape != tensor.shape:
                raise UserError(
                    f'{sources[name]} in {source} has the shape {tuple(weights[name].shape)}, '
                    f'{family} {arch} needs {tuple(tensor.shape)}; correct the family or the arch'
                )
            state_dict[name] = weights[name]
        elif name.endswith('num_batches_tracked'):
            state_dict[name] = torch.zeros((), dtype=torch.long)
            counters.append(name)
        else:
            missing.append(name)
    gaps = [name for name in missing if not name.startswith(names.BACKBONE + 'norm')]
    if gaps:
        raise UserError(
            f'{source} lacks {len(gaps)} of the tensors of a {family} {arch} {to}, the first '
            f'{gaps[0]}; get the whole file'
        )
    state_dict.update((name, weights[name]) for name in copied)
    unused = [sources[name] for name in weights if name not in state_dict]
    if to == 'backbone':
        state_dict = names.strip(state_dict, names.BACKBONE)
        counters, missing = (
            [name.removeprefix(names.BACKBONE) for name in listed] for listed in (counters, missing)
        )
    record = dict(
        family=family,
        arch=arch,
        attn_types=list(model.attn_types),
        target=to,
        source=Path(source).name,
        container=container,
        version=__version__,
    )
    meta = {META_KEY: record}
    annotate(state_dict, meta)
    return Conversion(
        state_dict,
        meta,
        copied,
        tuple(angles),
        tuple(unused),
        tuple(entries),
        tuple(counters),
        tuple(missing),
    )


def _check_is_published(weights: OrderedDict, checkpoint: dict, source: str) -> None:
    record = checkpoint['meta'].get(META_KEY) if isinstance(checkpoint.get('meta'), dict) else None
    if record:
        raise UserError(
            f'{source} is converted already ({record.get("family")} {record.get("arch")}, '
            f'{record.get("target")}); load it as it is'
        )
    if names.is_published(weights):
        return
    if any(name.removeprefix(names.BACKBONE).startswith('stages.0.0.') for name in weights):
        raise UserError(f'{source} has the names of this package already; load it as it is')
    raise UserError(
        f'{source} is no published MAViT or RAVLT checkpoint, its names begin with '
        f'{", ".join(list(weights)[:3])}; give one with names such as patch_embed.proj.0.weight'
    )


@lru_cache
def _template(family: str, arch: str, attn_types: tuple[str, ...] | None) -> nn.Module:
    """Return the model whose names and shapes the file has to meet; it takes no memory."""
    try:
        with torch.device('meta'):
            return FAMILIES[family](arch, attn_types=attn_types)
    except ValueError as error:
        raise UserError(str(error)) from error


def _classifier_tail(family: str, arch: str, channels: int, classes: int) -> dict[str, Tensor]:
    width = FAMILIES[family].tail_widths[arch]
    with torch.device('meta'):
        tail = nn.ModuleDict(
            dict(
                neck=ProjectionNeck(channels, width),
                head=nn.ModuleDict(dict(fc=nn.Linear(width, classes))),
            )
        )
    return tail.state_dict()


def _check_arch(weights: OrderedDict, source: str, family: str, arch: str) -> None:
    dims, depths = names.measure(names.strip(weights, names.BACKBONE))
    sizes = {name: (a['embed_dims'], a['depths']) for name, a in ARCHS.items()}
    if (dims, depths) != sizes[arch]:
        found = [name for name, size in sizes.items() if size == (dims, depths)]
        raise UserError(
            f'{source} looks like {found[0] if found else "none of the published sizes"} '
            f'(embed_dims {dims}, depths {depths}), not like {arch}; correct the arch'
        )
    if 'neck.proj.weight' in weights:
        width = weights['neck.proj.weight'].shape[0]
        if width != FAMILIES[family].tail_widths[arch]:
            raise UserError(
                f'The classifier in {source} projects to {width} channels, that of {family} {arch} '
                f'to {FAMILIES[family].tail_widths[arch]}; correct the family'
            )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def main(argv: Sequence[str] | None = None) -> None:
    """Convert one file from the command line, and print what became of every tensor.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If a file or an argument is wrong; nothing is written then.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('source', metavar='SRC', help='the published file')
    parser.add_argument('destination', metavar='DST', help='the file to write')
    parser.add_argument('--family', required=True, choices=FAMILIES)
    parser.add_argument('--arch', required=True, choices=ARCHS)
    parser.add_argument('--to', default='backbone', choices=TARGETS, help='default: %(default)s')
    parser.add_argument(
        '--attn-types',
        nargs='+',
        choices=OPERATORS,
        help='operator of each stage, if it is not the published assignment of the family',
    )
    parser.add_argument(
        '--weights',
        dest='container',
        choices=names.CONTAINERS,
        help='the key of SRC to read; default: the first of these that is there',
    )
    parser.add_argument(
        '--force', dest='overwrite', action='store_true', help='replace DST if it exists'
    )
    args = parser.parse_args(argv)
    conversion = convert_file(**vars(args))
    print(conversion)
    record = conversion.meta[META_KEY]
    print(
        f'wrote {args.destination}: {record["family"]} {record["arch"]} {record["target"]}, '
        f'attention {", ".join(record["attn_types"])}, from the weights '
        f'{"" if record["container"] is None else "under " + record["container"] + " "}'
        f'of {record["source"]} (sha256 {record["source_sha256"]})'
    )
