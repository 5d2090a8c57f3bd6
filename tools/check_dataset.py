#!/usr/bin/env python
"""Lists what is wrong with a data set.

    python tools/check_dataset.py annotations/instances_train2017.json --images train2017
    python tools/check_dataset.py configs/det/mavit/mask-rcnn_mavit-t_fpn_amp-1x_coco.py

With a config, the data sets of its training, validation and test loaders are checked, every label
map is read, and class counts are compared with the model's heads. Exits with 1 on findings.
"""

import argparse
import sys
from collections import Counter

from mmengine.config import Config

from mala_mm.data.checks import check_dataset, check_num_classes, coco_files, validate_coco
from mala_mm.engine import cli
from mala_mm.engine.config import load_config, set_data_root
from mala_mm.errors import UserError


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('source', help='a COCO annotation file (.json) or a config (.py)')
    parser.add_argument('--images', help='folder of the images of an annotation file')
    parser.add_argument('--most', type=int, default=20, help='findings to print per file')
    parser.add_argument('--data-root', metavar='DIR', help="in place of a config's")
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=cli.CfgOptions,
        metavar='KEY=VALUE',
        help='override entries of a config',
    )
    return parser.parse_args(argv)


def report(ann_file: str, images: str | None, most: int) -> int:
    """Prints the findings of one annotation file and returns their number."""
    findings = validate_coco(ann_file, images)
    for finding in findings[:most]:
        print(f'  {finding}')
    if len(findings) > most:
        print(f'  ... {len(findings) - most} more')
    kinds = Counter(finding.kind for finding in findings)
    summary = ', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))
    print(f'{ann_file}: {summary or "no findings"}')
    return len(findings)


def check_config(cfg: Config, most: int) -> int:
    """Checks every data loader of a config and returns the number of findings."""
    scope, total, seen = cfg.get('default_scope'), 0, []
    for split in ('train', 'val', 'test'):
        loader = cfg.get(f'{split}_dataloader')
        if not loader or loader.dataset in seen:
            continue
        seen.append(loader.dataset)
        try:
            check_dataset(loader.dataset, scope, limit=None)
            if cfg.get('model'):
                check_num_classes(cfg.model, loader.dataset, scope)
        except UserError as error:
            print(f'{split}: {error}')
            total += 1
            continue
        print(f'{split}: paths and classes are right')
        total += sum(report(*files, most) for files in coco_files(loader.dataset, scope))
    return total


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.source.endswith('.json'):
        total = report(args.source, args.images, args.most)
    else:
        cfg = load_config(args.source, args.cfg_options)
        if args.data_root:
            set_data_root(cfg, args.data_root)
        total = check_config(cfg, args.most)
    if total:
        raise UserError(f'{total} findings in {args.source}; mend what is named above.')


if __name__ == '__main__':
    sys.exit(cli.run(main))
