#!/usr/bin/env python
"""Converts a published MAViT or RAVLT checkpoint into this package's form.

    python tools/convert_checkpoint.py SRC DST --family mavit --arch small
    python tools/convert_checkpoint.py SRC DST --family ravlt --arch base --to classifier

The weights cannot tell which attention they were trained with, so the family is always named. DST
ending in .safetensors is written in that format. See docs/checkpoints.md.
"""

import argparse
import sys
from collections.abc import Sequence

from mala_mm.checkpoint.convert import ARCHS, FAMILIES, TARGETS, convert_file
from mala_mm.checkpoint.files import META_KEY
from mala_mm.checkpoint.names import CONTAINERS
from mala_mm.engine import cli
from mala_mm.ops import OPERATORS


def main(argv: Sequence[str] | None = None) -> None:
    """Converts one file and prints what became of every tensor.

    Args:
        argv (Sequence[str], optional): The arguments; those of the process by default.
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
        choices=CONTAINERS,
        help='the key of SRC to read; default: the first of these that is there',
    )
    parser.add_argument('--force', action='store_true', help='replace DST if it exists')
    args = parser.parse_args(argv)

    conversion = convert_file(
        args.source,
        args.destination,
        args.family,
        args.arch,
        args.to,
        args.attn_types,
        args.weights,
        args.force,
    )
    print(conversion)
    record = conversion.meta[META_KEY]
    print(
        f'wrote {args.destination}: {record["family"]} {record["arch"]} {record["target"]}, '
        f'attention {", ".join(record["attn_types"])}, from the weights '
        f'{"" if record["container"] is None else "under " + record["container"] + " "}'
        f'of {record["source"]} (sha256 {record["source_sha256"]})'
    )


if __name__ == '__main__':
    sys.exit(cli.run(main))
