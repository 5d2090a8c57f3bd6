"""The comparison of attention mechanisms in other backbones: headers and table of its configs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from mala_mm.errors import UserError

from .markdown import insert, markdown_table

TABLE = 'configs/linear_attention.yml'
FOLDER = 'configs/cls/linear_attention'


@dataclass(frozen=True)
class Comparison:
    """One config of the comparison.

    Attributes:
        name (str): Name of the config.
        host (str): The backbone, as the paper writes it.
        title (str): The mechanism.
        params (int): Number of parameters.
        reported (float | None): Top-1 in percent that the paper prints, if it does.
        measured (float | None): Top-1 in percent that was measured here, if it was.
    """

    name: str
    host: str
    title: str
    params: int
    reported: float | None
    measured: float | None

    @property
    def config(self) -> str:
        """Path of the config from the root of the repository."""
        return f'{FOLDER}/{self.name}.py'


def read_table(root: Path) -> tuple[dict, list[Comparison]]:
    """Read the table.

    Args:
        root (Path): Root of the repository.

    Raises:
        UserError: If the table and the config files are not the same set.
    """
    table = yaml.safe_load((root / TABLE).read_text())
    comparisons = []
    for key, row in table['mechanisms'].items():
        for (short, host), params, top1 in zip(
            table['hosts'].items(), row['params'], row['reported']
        ):
            name = f'{short}_{key}_8xb128_in1k'
            measured = table['measured'].get(name)
            comparisons.append(Comparison(name, host, row['title'], params, top1, measured))
    found = {f'{FOLDER}/{path.name}' for path in (root / FOLDER).glob('*.py')}
    if differing := sorted(found ^ {c.config for c in comparisons}):
        raise UserError(
            f'{TABLE} and the configs disagree about {differing}; fix the table or the names of '
            'the files'
        )
    return table, comparisons


def generate(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and content of every config, and the table of the folder's README.

    Args:
        root (Path): Root of the repository.

    Raises:
        UserError: If the table and the files disagree, or a config does not say where its batch is
            from.
    """
    table, comparisons = read_table(root)
    for comparison in comparisons:
        yield comparison.config, _render_config(root, comparison, table)
    yield f'{FOLDER}/README.md', _render_table(root, comparisons)


def _render_config(root: Path, comparison: Comparison, table: dict) -> str:
    lines = (root / comparison.config).read_text().splitlines()
    batch = f'# Total batch {table["batch_size"]} ('
    batches = [line for line in lines if line.startswith(batch)]
    if len(batches) != 1:
        raise UserError(
            f'{comparison.config} must have one line that begins with {batch!r} and says where its '
            'batch and learning rate are from'
        )
    paper = f'MALA paper, table {table["table"]}'
    if comparison.reported is None:
        figure = f'Not in the {paper}'
    else:
        figure = f'{paper}: top-1 {comparison.reported} % on ImageNet-1K val'
    here = 'not measured here'
    if comparison.measured is not None:
        here = f'measured here: top-1 {comparison.measured} %'
    first = f'# {comparison.host} with {comparison.title}, {comparison.params:,} parameters.'
    second = f'# {figure}; {here}.'
    command = f'# bash tools/dist_train.sh {comparison.config} 8'
    code = [line for line in lines if not line.startswith('#')]
    return '\n'.join([first, second, *batches, command, *code]) + '\n'


def _render_table(root: Path, comparisons: list[Comparison]) -> str:
    rows = [
        [
            f'[{c.name}]({c.name}.py)',
            c.title,
            f'{c.params:,}',
            '' if c.reported is None else str(c.reported),
            '' if c.measured is None else str(c.measured),
        ]
        for c in comparisons
    ]
    header = ['config', 'attention', 'parameters', 'top-1, reported', 'top-1, measured']
    return insert(root, f'{FOLDER}/README.md', markdown_table(header, rows))
