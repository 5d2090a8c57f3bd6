"""Tables and drawings from a session's ``session.json``.

    python -m benchmarks.gpu.report DIR

Writes ``session.md``, ``kernels.png`` and ``operators.png`` beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path

AOT = Path(__file__).parents[1] / 'results' / 'aot.md'
"""Where ``benchmarks.aot`` predicts in which time a kernel's instructions issue."""

AIMS = {
    'forward': 0.8,
    'forward + backward': 0.7,
}
"""Share of copy speed at equal size that the operators aim at."""


def table(rows: Iterable[dict], columns: dict[str, Callable[[dict], object]]) -> list[str]:
    """Markdown; a column that a row has not is empty."""
    lines = ['| ' + ' | '.join(columns) + ' |', '|---' * len(columns) + '|']
    for row in rows:
        cells = []
        for value in columns.values():
            try:
                cells.append(str(value(row)))
            except (KeyError, TypeError):
                cells.append('')
        lines.append('| ' + ' | '.join(cells) + ' |')
    return lines


def us(key: str = 'us') -> Callable[[dict], str]:
    return lambda row: f'{row[key]:.1f}'


def share(row: dict) -> str:
    """Of the speed of a copy that moves as many bytes."""
    return f'{100 * row["copy us"] / row["us"]:.0f} %'


def size(row: dict) -> str:
    return '{}x{}'.format(*row['size'])


def predictions(text: str) -> dict[tuple[str, str, str], float]:
    """Microseconds of issue by kernel, type and shape, from the tables of ``aot.md``."""
    found: dict[tuple[str, str, str], float] = {}
    columns: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip('|').split('|')]
        if not line.startswith('|'):
            columns = []
        elif not columns:
            columns = cells
        elif {'kernel', 'shape', 'issue us'} <= set(columns) and '---' not in line:
            row = dict(zip(columns, cells))
            kernel, _, dtype, *words = row['kernel'].split()
            key = (kernel, dtype, row['shape'])
            if key not in found or 'gated' in words:  # as a session runs it
                found[key] = float(row['issue us'])
    return found


def check_rows(rows: list[dict]) -> list[dict]:
    """One row per variant: the worst error and the ways that failed."""
    found: dict[tuple, dict] = {}
    keys = ('kind', 'form', 'dtype', 'head_dim', 'token_major', 'size')
    for row in rows:
        key = tuple(str(row[x]) for x in keys)
        one = found.setdefault(key, {x: row[x] for x in keys} | {'ways': 0, 'failed': []})
        one['ways'] += 1
        if 'errors' in row:
            ratios = [error / allowed for error, _, allowed in row['errors'].values()]
            one['worst'] = max(ratios) if all(r == r for r in ratios) else float('nan')
        if not row['passed']:
            one['failed'].append(f'{row["way"]} {row.get("note", "")}'.strip())
    return list(found.values())


def against(rows: list[dict], name: str, base: str) -> list[dict]:
    """How many times faster ``name`` is than ``base``, by shape, dtype and direction."""
    times = {(r['name'], r['shape'], r['dtype'], r['direction']): r['us'] for r in rows}
    return [
        dict(shape=shape, dtype=dtype, direction=direction, name=base, ratio=other / ours)
        for (who, shape, dtype, direction), ours in times.items()
        if who == name and (other := times.get((base, shape, dtype, direction)))
    ]


SECTIONS = {
    'copies': {
        'bytes': lambda r: f'{r["bytes"]:,}',
        'us': us(),
        'GB/s, read and written': lambda r: f'{r["GB/s"]:.0f}',
    },
    'kernels': {
        'shape': lambda r: r['shape'],
        'type': lambda r: r['dtype'],
        'kind': lambda r: r['kind'],
        'kernel': lambda r: f'{r["place"]} {r["kernel"]}, {r["direction"]}',
        'programs': lambda r: 'x'.join(str(n) for n in r['grid'] if n > 1) or '1',
        'us': us(),
        'copy of its bytes, us': us('copy us'),
        'of copy speed': share,
        'issue, us (predicted)': us('issue us'),
    },
    'operators': {
        'shape': lambda r: r['shape'],
        'type': lambda r: r['dtype'],
        'what': lambda r: f'{r["name"]}, {r["direction"]}',
        'us': us(),
        'of copy speed': share,
        'peak MB': lambda r: f'{r["peak bytes"] / 1e6:.0f}',
    },
    'host': {
        'size': size,
        'call': lambda r: r['direction'],
        'us per call, issued one after the other': us('call us'),
        'us of the device': us('device us'),
    },
    'models': {
        'program': lambda r: r['program'],
        'size': lambda r: f'{size(r)}, batch {r["batch"]}',
        'model': lambda r: r['name'],
        'images/s': lambda r: f'{r["images"]:.1f}',
        'ms': lambda r: f'{1e3 * r["p50"]:.1f}',
        'peak MiB': lambda r: f'{r["memory"] / 2**20:.0f}',
        'note': lambda r: r['left_out'],
    },
    'layers': {
        'shape': lambda r: r['shape'],
        'type': lambda r: r['dtype'],
        'what': lambda r: ', '.join(r[k] for k in ('name', 'direction') if k in r),
        'us': us(),
        'of copy speed': share,
        'us per call': us('call us'),
        'peak MB': lambda r: f'{r["peak bytes"] / 1e6:.0f}',
    },
    'sweep': {
        'size': size,
        'us': us(),
        'of copy speed': share,
        'first call, us': us('call us'),
    },
    'tests': {
        'command': lambda r: f'`{r["command"]}`',
        'status': lambda r: r['status'],
        'end': lambda r: r['end'][-1],
    },
}
CHECKS = {
    'kind': lambda r: r['kind'] + (' (paper)' if r['form'] == 'paper' else ''),
    'type': lambda r: r['dtype'],
    'd': lambda r: r['head_dim'],
    'layout': lambda r: 'token-major' if r['token_major'] else 'channel-first',
    'size': size,
    'worst error (1 is allowed)': lambda r: f'{r["worst"]:.2f}',
    'ways': lambda r: r['ways'],
    'failed': lambda r: '; '.join(r['failed']),
}


def markdown(results: dict) -> str:
    """The whole report."""
    parts = results['parts']
    machine = results.get('machine', {})
    lines = ['# A session on one GPU', '', 'Written by `python -m benchmarks.gpu.report`.', '']
    lines += [f'- {key}: {value}' for key, value in machine.items() if value]
    for part in ('checks', 'more checks'):
        if parts.get(part):
            lines += ['', f'## {part.capitalize()}', '', *table(check_rows(parts[part]), CHECKS)]
    for part, columns in SECTIONS.items():
        rows = parts.get(part)
        if not rows:
            continue
        if part == 'operators':
            lines += _operators(rows)
            rows = [r for r in rows if 'size' not in r]
        lines += ['', f'## {part.capitalize()}', '', *table(rows, columns)]
    left = {part: reasons for part, reasons in results.get('left out', {}).items() if reasons}
    if left:
        lines += ['', '## Left out', '']
        lines += [f'- {part}: {reason}' for part, reasons in left.items() for reason in reasons]
    return '\n'.join(lines) + '\n'


def _operators(rows: list[dict]) -> list[str]:
    """How much faster than the rivals, and where softmax attention loses."""
    timed = [r for r in rows if 'direction' in r]
    ratios = [
        one
        for ours, base in (
            ('mixer, kernels', 'mixer, published'),
            ('mixer, kernels', 'mixer, published, compiled'),
            ('attention, kernels', 'attention, published'),
            ('attention, kernels', 'attention, softmax (SDPA)'),
        )
        for one in against(timed, ours, base)
    ]
    lines = ['', '## Against rivals', ''] + table(
        ratios,
        {
            'shape': lambda r: r['shape'],
            'rival': lambda r: r['name'],
            'direction': lambda r: r['direction'],
            'times faster': lambda r: f'{r["ratio"]:.1f}',
        },
    )
    crossing = [r for r in rows if 'direction' not in r]
    if crossing:
        columns = {'size': size, 'what': lambda r: r['name'], 'us': us()}
        lines += ['', '## Linear beside softmax attention', '', *table(crossing, columns)]
    return lines


def summary(results: dict) -> str:
    """A few lines for the end of a session's output."""
    checks = check_rows(results['parts'].get('checks', []))
    checks += check_rows(results['parts'].get('more checks', []))
    good = sum(not row['failed'] for row in checks)
    lines = [f'{good} of {len(checks)} variants passed']
    lines += [f'FAILED {r["kind"]} {r["dtype"]} d{r["head_dim"]} {size(r)}: {r["failed"]}'
              for r in checks if r['failed']]  # fmt: skip
    for row in results['parts'].get('operators', []):
        aim = AIMS.get(row.get('direction', ''))
        if aim and 'copy us' in row:
            reached = row['copy us'] / row['us']
            lines.append(
                f'{row["shape"]}, {row["dtype"]}, {row["name"]}, {row["direction"]}: '
                f'{row["us"]:.1f} us, {100 * reached:.0f} % of copy speed (aim {100 * aim:.0f} %)'
            )
    lines += [f'left out: {part}: {reason}' for part, reasons in results['left out'].items()
              for reason in reasons]  # fmt: skip
    return '\n'.join(lines)


def draw(results: dict, folder: Path) -> None:
    """Single kernels beside a copy of their bytes; operators beside their rivals."""
    from matplotlib.figure import Figure

    rows = [r for r in results['parts'].get('kernels', []) if 'us' in r]
    if rows:
        figure = Figure(figsize=(10, 0.22 * len(rows) + 1.5), layout='constrained')
        axes = figure.subplots()
        places = range(len(rows))
        axes.barh(places, [r['us'] for r in rows], color='C0', label='kernel')
        axes.barh(places, [r['copy us'] for r in rows], 0.35, color='C1', label='copy')
        axes.set_yticks(
            places, [f'{r["shape"]}, {r["dtype"]}, {r["kernel"]}' for r in rows], fontsize=7
        )
        axes.invert_yaxis()
        axes.set_xlabel('us')
        axes.legend()
        axes.set_title(results['machine']['device'])
        figure.savefig(folder / 'kernels.png', dpi=100)
    rows = [r for r in results['parts'].get('operators', []) if 'direction' in r]
    rows = [r for r in rows if r['dtype'] == 'bf16']
    shapes = list(dict.fromkeys(r['shape'] for r in rows))
    if shapes:
        figure = Figure(figsize=(11, 2.6 * len(shapes)), layout='constrained')
        grid = figure.subplots(len(shapes), 2, squeeze=False)
        for axes, shape in zip(grid, shapes):
            for one, direction in zip(axes, AIMS):
                here = [r for r in rows if r['shape'] == shape and r['direction'] == direction]
                bars = one.barh([r['name'] for r in here], [r['us'] for r in here])
                one.bar_label(bars, fmt='%.0f', padding=3)
                one.set_xscale('log')
                one.invert_yaxis()
                one.set_title(f'{shape}, {direction}, us', fontsize=8)
                one.tick_params(labelsize=7)
        figure.suptitle(results['machine']['device'])
        figure.savefig(folder / 'operators.png', dpi=100)


def write(folder: Path) -> None:
    """Tables, and drawings where matplotlib is installed."""
    results = json.loads((folder / 'session.json').read_text())
    expected = predictions(AOT.read_text()) if AOT.exists() else {}
    for row in results['parts'].get('kernels', []):
        if row['kind'] == 'mala':
            row['issue us'] = expected.get((row['kernel'], row['dtype'], row['shape']))
    (folder / 'session.md').write_text(markdown(results))
    try:
        draw(results, folder)
    except ImportError:
        print('no drawings: they need matplotlib')


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('folder', type=Path, metavar='DIR')
    args = parser.parse_args(argv)
    if not (args.folder / 'session.json').exists():
        parser.error(f'no session.json in {args.folder}; python -m benchmarks.gpu writes one')
    write(args.folder)
    print(args.folder / 'session.md')


if __name__ == '__main__':
    main()
