"""Distributions of scores from the command line."""

import json

import pytest


def test_the_command_measures_every_head(command, folder):
    args = ('--images', 'photo.png', '--size', '64', '--queries', '8', '--factors', '1', '4')
    code, printed, _ = command('score_distribution', 'tiny.py', *args, '--out', 'scores.png')
    assert code == 0
    found = json.loads((folder / 'scores.json').read_text())
    # 10 heads in 5 blocks, with and without rotation, at two lengths
    assert len(found) == 10 * 2 * 2
    for head in found:
        if head['operator'] == 'softmax' or not head['rotary']:
            # eps beside z, and sums of 384 scores in float32
            assert head['distribution']['total'] == pytest.approx(1, abs=1e-4)
        if head['operator'] == 'softmax':
            assert head['distribution']['negative_share'] == 0
        assert head['curve'] == sorted(head['curve'], reverse=True)
    lines = [line for line in printed.splitlines() if line.startswith('|')]
    assert len(lines) == 2 + 4 * 2 * 2  # four stages


def test_checkpoints_stand_side_by_side(command, folder):
    (folder / 'other').mkdir(exist_ok=True)
    (folder / 'other' / 'linear.pth').write_bytes((folder / 'linear.pth').read_bytes())
    args = ('--images', '.', '--limit', '1', '--size', '64', '--queries', '4', '--stage', '1')
    checkpoints = ('linear.pth', 'other/linear.pth')
    code, printed, _ = command('score_distribution', 'tiny.py', *checkpoints, *args)
    assert code == 0 and '| other/linear.pth' in printed


@pytest.mark.parametrize(
    ('args', 'sentence'),
    [
        (('--operators', 'angular'), "operator 'angular' has no scores"),
        (('--factors', '0'), 'must be positive'),
        (('--length', 'k'), "invalid choice: 'k'"),
        (('--stage', '9'), 'got 9'),
    ],
)
def test_bad_input_is_a_sentence(command, args, sentence):
    code, _, error = command(
        'score_distribution', 'tiny.py', '--images', 'photo.png', '--size', '64', *args
    )
    assert code != 0 and sentence in error
