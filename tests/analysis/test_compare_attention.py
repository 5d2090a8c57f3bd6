"""The comparison of mechanisms on painted images, at a size that takes seconds."""

import json

import pytest
import torch

from mala_mm.analysis import compare_attention
from mala_mm.errors import UserError

SMALL = ['--names', 'softmax', 'mala', '--images', '64']
SMALL += ['--seeds', '1', '--epochs', '1', '--rounds', '1']


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Few images, small measurements; returns the arguments and how often it was painted."""
    painted = []

    def paint(split, number):
        painted.append(split)
        number = min(number, 64)
        return torch.randint(0, 256, (number, 3, 64, 64), dtype=torch.uint8), torch.arange(
            number
        ) % 8

    monkeypatch.setattr(compare_attention, 'paint', paint)
    monkeypatch.setattr(compare_attention, 'SIZES', ((32, 40),))
    return [*SMALL, '--out', str(tmp_path)], painted


def test_what_is_written(small, tmp_path, capsys):
    arguments, painted = small
    compare_attention.main(arguments)
    assert painted == ['train', 'val']
    results = json.loads((tmp_path / 'compare_attention.json').read_text())
    assert list(results['rows']) == ['softmax', 'mala']
    for row in results['rows'].values():
        (run,) = row['runs']
        assert 0 <= run['accuracy'] <= 100 and run['diverged'] is None
        assert row['ms']['32x40'] > 0 and row['mib']['32x40'] > 0
    page = (tmp_path / 'compare_attention.md').read_text()
    assert page in capsys.readouterr().out
    lines = [line for line in page.splitlines() if line.startswith('| ')]
    assert {line.count('|') for line in lines} == {9}  # 6 columns, and 1 each of ms and MiB
    assert (tmp_path / 'compare_attention.png').stat().st_size > 1000

    # a second seed goes on from there, another budget does not mix
    compare_attention.main([*arguments, '--seeds', '2', '--only', 'accuracy'])
    again = json.loads((tmp_path / 'compare_attention.json').read_text())
    assert painted == ['train', 'val']
    for name, row in again['rows'].items():
        assert len(row['runs']) == 2 and row['runs'][0] == results['rows'][name]['runs'][0]
    with pytest.raises(UserError, match="holds trainings with .*'epochs': 1.*give another --out"):
        compare_attention.main([*arguments, '--epochs', '2'])


def test_a_loss_that_is_no_number_ends_a_training(monkeypatch):
    monkeypatch.setattr(
        compare_attention, 'logits', lambda model, x: x.new_full((len(x), 8), torch.nan)
    )
    data = compare_attention.Data(torch.zeros(64, 3, 64, 64), torch.zeros(64, dtype=torch.int64))
    run = compare_attention.train('mala', 0, 1, data, data)
    assert run == dict(accuracy=None, loss=None, diverged=0)
    results = dict(rows={'mala': dict(params=1, runs=[run])})
    assert '| mala | diverged | in 1, from step 0 | 1 |' in compare_attention.render(results)


@pytest.mark.parametrize(
    ('arguments', 'match'),
    [
        (['--names', 'mela'], "--names must be some of .*'mala'.*got 'mela'"),
        (['--seeds', '0'], '--seeds must be 1 or more, got 0'),
        (['--images', '8'], '--images must be 64 or more, got 8'),
    ],
)
def test_wrong_options_are_named(arguments, match):
    with pytest.raises(UserError, match=match):
        compare_attention.main(arguments)
