"""``python -m benchmarks.operators`` at toy sizes: what it reports, and what it refuses to time."""

import json

import pytest

from benchmarks import operators
from mala_mm.ops.fused.cpu import tiles

ARGUMENTS = ['--sizes', '4x4', '3x5', '--head-dim', '8', '--rounds', '2', '--layout', 'token-major']


def test_prints_and_draws(tmp_path, capsys):
    assert operators.main([*ARGUMENTS, '--out', str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    written = {path.suffix: path for path in tmp_path.iterdir()}
    assert written['.md'].read_text() in printed
    assert written['.png'].read_bytes().startswith(b'\x89PNG')
    rows = json.loads(written['.json'].read_text())['rows']
    # A head width of 8 is not compiled.
    expected = ['formula', 'formula, tables kept', 'cpu, tiles', 'softmax']
    assert [row['backend'] for row in rows] == expected * 2
    assert [row['tokens'] for row in rows] == [15] * 4 + [16] * 4  # in order
    for row in rows:
        assert row['error'] <= 1
        assert row['forward'] > 0 and row['both_memory'] > 0


@pytest.mark.parametrize('direction', ['forward', 'backward'])
def test_what_is_incorrect_gets_no_time(direction, tmp_path, capsys, monkeypatch):
    correct = getattr(tiles, direction)

    def wrong(problem, *tensors):
        correct(problem, *tensors)
        # the gradient of v, the output
        tensors[7 if direction == 'backward' else 3][0, 0, 2, 3] *= 1.01

    monkeypatch.setattr(tiles, direction, wrong)
    assert operators.main([*ARGUMENTS, '--out', str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert 'cpu, tiles at 4x4 is incorrect and was not timed' in printed
    (line,) = (x for x in printed.splitlines() if x.startswith('| 4x4') and 'cpu, tiles' in x)
    assert line.count('incorrect') == 4 and '(x' not in line
    (line,) = (x for x in printed.splitlines() if x.startswith('| 4x4') and 'softmax' in x)
    assert 'incorrect' not in line


def test_the_kept_tables_change_nothing():
    tensors = operators.inputs((1, 2, 20, 8), 'channel-first', operators.torch.float64, 'cpu')
    for kind in ('mala', 'rala', 'linear'):
        expected = operators.formula(kind, (4, 5))(*tensors[:3])
        actual = operators.formula_with_tables(kind, (4, 5), tensors[0])(*tensors[:3])
        assert operators.torch.equal(actual, expected)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--sizes', '20'], "a size is HEIGHTxWIDTH such as 200x334, got '20'"),
        (['--sizes', '0x4'], "got '0x4'"),
        (['--operator', 'softmax'], 'invalid choice'),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as ending:
        operators.main(arguments)
    assert ending.value.code == 2
    assert message in capsys.readouterr().err


def test_crossover():
    def rows(ours, softmax):
        return [
            dict(tokens=n, backend=name, forward=t)
            for name, times in (('cpu, tiles', ours), ('softmax', softmax))
            for n, t in zip((10, 100, 1000), times)
        ]

    # equal halfway, in logarithms, between 10 and 100
    assert operators.crossover(rows((2, 2, 2), (1, 4, 9)), 'forward', 'cpu, tiles') == (
        pytest.approx(10**1.5)
    )
    assert operators.crossover(rows((1, 1, 1), (2, 2, 2)), 'forward', 'cpu, tiles') == 10
    assert operators.crossover(rows((3, 3, 3), (2, 2, 2)), 'forward', 'cpu, tiles') is None
