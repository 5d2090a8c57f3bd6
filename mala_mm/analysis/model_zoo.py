"""Writes the model zoo from configs/model_zoo.yml: metafiles, tables of the docs, configs' headers.

python tools/model_zoo.py          # after a change of configs/model_zoo.yml
python tools/model_zoo.py --check  # say what is out of date, write nothing
python tools/model_zoo.py --count  # after a change of a model: count all of them first (minutes)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import yaml
from mmengine.config import Config

from mala_mm.engine.arguments import make_parser
from mala_mm.errors import UserError
from mala_mm.paths import ROOT

from . import linear_attention
from .complexity import build_on_meta, count_complexity
from .markdown import insert, markdown_table

TABLE = 'configs/model_zoo.yml'
COUNTS = 'configs/complexity.yml'
EVALUATED_ON = {
    'COCO': 'COCO val2017',
    'ADE20K': 'ADE20K val, single scale',
    'ImageNet-1K': 'ImageNet-1K val',
}
GENERATED = '# Written by tools/model_zoo.py; edit configs/model_zoo.yml instead.\n'


@dataclass(frozen=True)
class Model:
    """One config of the zoo.

    Attributes:
        config (str): Path of the config from the root of the repository.
        family (str): ``'mavit'`` or ``'ravlt'``.
        size (str): ``'t'``, ``'s'``, ``'b'`` or ``'l'``.
        recipe (dict): What all sizes and families of this recipe share.
    """

    config: str
    family: str
    size: str
    recipe: dict

    @property
    def name(self) -> str:
        """Name of the config."""
        return Path(self.config).stem

    @property
    def folder(self) -> str:
        """Folder of the config, from the root of the repository."""
        return Path(self.config).parent.as_posix()

    @property
    def reported(self) -> dict:
        """What the paper prints: params in M, FLOPs in G and the metrics in percent."""
        keys = ('params', 'FLOPs', *self.recipe['metrics'])
        return dict(zip(keys, self.recipe['reported'][self.family][self.size], strict=True))


def list_models(zoo: dict) -> list[Model]:
    """List the models of the table, recipe by recipe.

    Raises:
        UserError: If the table and the config files beside it are not the same set.
    """
    models = [
        Model(recipe['config'].format(family=family, size=size), family, size, recipe)
        for recipe in zoo['recipes']
        for family, sizes in recipe['reported'].items()
        for size in sizes
    ]
    listed = {model.config for model in models}
    folders = {model.folder for model in models}
    found = {f'{folder}/{path.name}' for folder in folders for path in (ROOT / folder).glob('*.py')}
    if listed != found:
        raise UserError(
            f'{TABLE} and the configs disagree about {sorted(listed ^ found)}; fix the table or '
            'the names of the files'
        )
    if unknown := set(zoo['measured']) - {model.name for model in models}:
        raise UserError(
            f'{TABLE} has measurements of {sorted(unknown)}, which are no configs; correct '
            'the names'
        )
    return models


def count(model: Model) -> dict[str, int]:
    """Count one model at its recipe's shape."""
    cfg = Config.fromfile(ROOT / model.config)
    total = count_complexity(build_on_meta(cfg), model.recipe['shape']).total
    return dict(
        params=total.params,
        mmcv=total.mmcv,
        layers=total.layers,
        total=total.macs,
        all_linear=total.macs_linear,
    )


def render_counts(counts: dict[str, dict]) -> str:
    """Render :data:`COUNTS`."""
    lines = [
        '# Written by `python tools/model_zoo.py --count`: parameters and multiply-adds at the',
        '# shape of the recipe. docs/complexity.md says what each column counts.',
    ]
    for name, row in counts.items():
        lines.append(f'{name}: {{{", ".join(f"{k}: {v}" for k, v in row.items())}}}')
    return '\n'.join(lines) + '\n'


def render_metafile(models: list[Model], zoo: dict, counts: dict, collection: bool) -> str:
    """Render one folder's metafile in OpenMMLab's schema.

    The papers' metrics are named ``reported ...``, ours have the plain names: no reader of the
    metafile can mix them up.
    """
    paper = zoo['papers'][models[0].family]
    content = {}
    if collection:
        content['Collections'] = [
            {
                'Name': paper['name'],
                'Metadata': {'Architecture': [paper['name']]},
                'Paper': {'Title': paper['title'], 'URL': paper['url']},
                'README': f'{Path(models[0].folder).parent.as_posix()}/README.md',
            }
        ]
    content['Models'] = [_metafile_entry(m, paper, zoo['measured'], counts) for m in models]
    return GENERATED + yaml.safe_dump(content, sort_keys=False, width=100)


def _metafile_entry(model: Model, paper: dict, measured: dict, counts: dict) -> dict:
    recipe = model.recipe
    schedule = {key.capitalize(): recipe[key] for key in ('epochs', 'iterations') if key in recipe}
    metrics = {f'reported {key}': model.reported[key] for key in recipe['metrics']}
    metrics |= measured.get(model.name, {}).get('metrics', {})
    return {
        'Name': model.name,
        'In Collection': paper['name'],
        'Config': model.config,
        'Metadata': {
            'Training Data': recipe['dataset'],
            'Batch Size': recipe['batch_size'],
            **schedule,
            'Architecture': [f'{paper["name"]}-{model.size.upper()}', *recipe['architecture']],
            'Parameters': counts[model.name]['params'],
            'FLOPs': counts[model.name]['total'],
        },
        'Results': [{'Task': recipe['task'], 'Dataset': recipe['dataset'], 'Metrics': metrics}],
    }


def render_index(folders: list[str]) -> str:
    """Render ``model-index.yml``, which names the metafiles."""
    imports = ''.join(f'  - {folder}/metafile.yml\n' for folder in folders)
    return f'{GENERATED}Import:\n{imports}'


def render_results(models: list[Model], zoo: dict, counts: dict) -> str:
    """Render the tables of one README; what nobody measured stays empty."""
    sections = []
    for title, group in groupby(models, key=lambda model: model.recipe['title']):
        group = list(group)
        shown = group[0].recipe['shown']
        rows = []
        for model in group:
            row = counts[model.name]
            measured = zoo['measured'].get(model.name, {}).get('metrics', {})
            link = f'{Path(model.folder).name}/{model.name}.py'
            rows.append(
                [
                    f'[{model.name}]({link})',
                    f'{row["params"] / 1e6:.2f}',
                    _giga(row['total']),
                    *(f'{model.reported[key]:.1f}' for key in shown),
                    *(f'{measured[key]:.1f}' if key in measured else '' for key in shown),
                ]
            )
        header = ['config', 'params (M)', 'FLOPs (G)']
        header += [f'{key}, reported' for key in shown] + [f'{key}, measured' for key in shown]
        sections.append(f'## {title}\n\n{markdown_table(header, rows)}')
    return '\n\n'.join(sections)


def render_complexity(models: list[Model], counts: dict) -> str:
    """Render the papers' columns beside our counts."""
    header = ['config', 'params, printed (M)', 'params (M)', 'FLOPs, printed (G)']
    header += ['mmcv (G)', 'layers (G)', 'total (G)', 'all linear (G)']
    sections = []
    for title, group in groupby(models, key=lambda model: model.recipe['title']):
        rows = []
        for model in group:
            row = counts[model.name]
            cells = [f'{row["params"] / 1e6:.3f}', str(model.reported['FLOPs'])]
            cells += [_giga(row[key]) for key in ('mmcv', 'layers', 'total', 'all_linear')]
            rows.append([model.name, str(model.reported['params']), *cells])
        height, width = model.recipe['shape']
        sections.append(f'### {title}, {height}x{width}\n\n{markdown_table(header, rows)}')
    return '\n\n'.join(sections)


def _giga(macs: int) -> str:
    return f'{macs / 1e9:.2f}' if macs < 1e11 else f'{macs / 1e9:.1f}'


def render_config(model: Model, zoo: dict) -> str:
    """Render a config with the paper's figure and the command above and below its batch line.

    Raises:
        UserError: If the config does not say where its batch and learning rate are from.
    """
    lines = (ROOT / model.config).read_text().splitlines()
    batch = f'# Total batch {model.recipe["batch_size"]} ('
    batches = [line for line in lines if line.startswith(batch)]
    if len(batches) != 1:
        raise UserError(
            f'{model.config} must have one line that begins with {batch!r} and says where its '
            'batch and learning rate are from'
        )
    code = [line for line in lines if not line.startswith('#')]
    paper = zoo['papers'][model.family]['mechanism']
    table = model.recipe['tables'][model.family]
    figures = _figures(model.reported, model.recipe['shown'])
    measured = zoo['measured'].get(model.name, {}).get('metrics', {})
    here = f'measured here: {_figures(measured, measured)}' if measured else 'not measured here'
    figure = (
        f'# {paper} paper, table {table}: {figures} on {EVALUATED_ON[model.recipe["dataset"]]}, '
        f'{model.reported["params"]} M parameters, {model.reported["FLOPs"]} GFLOPs; {here}.'
    )
    command = f'# bash tools/dist_train.sh {model.config} 8'
    if model.recipe['task'] != 'Image Classification':
        backbone = 'model.backbone.init_cfg'
        command += f' --cfg-options {backbone}.type=Pretrained {backbone}.checkpoint=CLASSIFIER'
    return '\n'.join([figure, *batches, command, *code]) + '\n'


def _figures(metrics: dict, names: Iterable[str]) -> str:
    texts = (f'{name} {metrics[name]}' for name in names)
    return ', '.join(re.sub('Top 1 Accuracy (.*)', r'top-1 \1 %', text) for text in texts)


def generate(zoo: dict, models: list[Model], counts: dict) -> Iterator[tuple[str, str]]:
    """Yield each generated file's path and content."""
    for model in models:
        yield model.config, render_config(model, zoo)
    folders = sorted({model.folder for model in models})
    for folder in folders:
        members = [model for model in models if model.folder == folder]
        # A collection may be defined once; the classifiers are what all others start from.
        collection = folder.startswith('configs/cls/')
        yield f'{folder}/metafile.yml', render_metafile(members, zoo, counts, collection)
    yield 'model-index.yml', render_index(folders)
    for task in sorted({Path(folder).parent.as_posix() for folder in folders}):
        members = [model for model in models if model.folder.startswith(f'{task}/')]
        yield (
            f'{task}/README.md',
            insert(ROOT, f'{task}/README.md', render_results(members, zoo, counts)),
        )
    yield from linear_attention.generate(ROOT)
    yield (
        'docs/complexity.md',
        insert(ROOT, 'docs/complexity.md', render_complexity(models, counts)),
    )


def update(check: bool, recount: bool) -> list[str]:
    """Write what is out of date, or only look, and return the paths of these files."""
    zoo = yaml.safe_load((ROOT / TABLE).read_text())
    models = list_models(zoo)
    if recount:
        counts = {model.name: count(model) for model in models}
        files = {COUNTS: render_counts(counts)}
    else:
        counts, files = yaml.safe_load((ROOT / COUNTS).read_text()), {}
    if list(counts) != [model.name for model in models]:
        raise UserError(f'{COUNTS} does not hold the models of {TABLE}; give --count')
    files.update(generate(zoo, models, counts))
    outdated = []
    for path, content in files.items():
        file = ROOT / path
        if not file.is_file() or file.read_text() != content:
            outdated.append(path)
            if not check:
                file.write_text(content)
    return outdated


def main(argv: Sequence[str] | None = None) -> None:
    """Write or check the model zoo from the command line.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If the table and the configs disagree, or ``--check`` found an outdated file.
    """
    parser = make_parser(__doc__)
    parser.add_argument('--check', action='store_true', help='write nothing; fail if it would')
    parser.add_argument('--count', action='store_true', help=f'renew {COUNTS} first')
    args = parser.parse_args(argv)
    outdated = update(args.check, args.count)
    if args.check and outdated:
        raise UserError(f'{", ".join(outdated)} out of date; run python tools/model_zoo.py')
    for path in outdated:
        print(f'{path} written')
