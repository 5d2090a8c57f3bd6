"""Scores over an image."""

import cv2
import numpy as np
import pytest

from mala_mm.analysis.attention_maps import draw_row, mean_row
from mala_mm.analysis.drawing import colour


def test_a_panel_is_the_row_in_colours(seen):
    layer = seen.layers[0]
    panel = draw_row(seen, layer, (50, 20))
    row = mean_row(layer, seen.token_at(layer, (50, 20)), None)
    assert row.shape == (384,) and panel.image.shape == (64, 96, 3)
    assert panel.title == 'mala' and ('negative' in panel.note) == bool((row < 0).any())
    best = int(np.abs(row).argmax())
    other = mean_row(layer, seen.token_at(layer, (50, 20)), 1, 'softmax')
    assert other.sum() == pytest.approx(1, abs=1e-5) and best < 384


def test_colours_keep_the_sign():
    values = np.array([[-2.0, 0.0, 2.0]])
    red, _, blue = colour(values, signed=True)[0].astype(int).transpose()
    assert blue[0] > red[0] and red[2] > blue[2] and min(red[1], blue[1]) > 240
    dark, bright = colour(np.array([[0.0, 3.0]]), top=3.0)[0].astype(int).sum(-1)
    assert dark < 20 < 500 < bright


def test_the_command_draws_mechanisms_side_by_side(command, folder):
    names = ('mala', 'linear', 'softmax')
    args = ('--size', '64', '--point', '10', '50')
    drawn = ('--operators', *names, '--out', 'three.png')
    code, *_ = command('attention_maps', 'photo.png', 'tiny.py', *args, *drawn)
    assert code == 0
    drawn = ('linear.pth', '--stage', '1', '--out', 'one.png')
    code, *_ = command('attention_maps', 'photo.png', 'tiny.py', *drawn, *args)
    assert code == 0
    three, one = (cv2.imread(str(folder / f'{name}.png')) for name in ('three', 'one'))
    assert three.shape[1] > 1.9 * one.shape[1]  # four panels, two
    assert three.shape[0] > 2.5 * one.shape[0]  # four stages, one
    assert len(np.unique(three.reshape(-1, 3), axis=0)) > 200


@pytest.mark.parametrize(
    ('args', 'sentence'),
    [
        (('--stage', '0'), 'stage must be one of 1, 2, 3, 4, got 0'),
        (
            ('--stage', '2', '--block', '2'),
            'block must be one of 1 to 1 in stage 2, or -1 for the last, got 2',
        ),
        (('--head', '2'), 'head must be one of 1 to 1 in stage 1, got 2'),
        (('--point', '90', '3'), 'x from 0 to 89 and y from 0 to 59, got (90, 3)'),
        (('--operators', 'hydra'), "operator 'hydra' has no scores"),
        (('--operators', 'nope'), "got 'nope'"),
        (('--size', '3'), 'the size must be at least 32 pixels, got 3'),
    ],
)
def test_bad_input_is_a_sentence(command, args, sentence):
    code, _, error = command('attention_maps', 'photo.png', 'tiny.py', '--size', '64', *args)
    assert code == 1 and sentence in error
