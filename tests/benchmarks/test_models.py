"""``python -m benchmarks.models`` and ``.training`` at toy sizes: what they report and refuse."""

import json

import pytest
import torch

from benchmarks import models, training
from benchmarks.published import Backbone

ARGUMENTS = ['--peers', 'PVTv2-B1', '--rounds', '2', '--batch', '2']
NAMES = [
    'published form',
    'MAViT-T',
    'published form, MALA in all stages',
    'MAViT-T, MALA in all stages',
    'PVTv2-B1',
]


def run(program, folder, *arguments):
    code = program.main([*ARGUMENTS, *arguments, '--out', str(folder)])
    return code, {path.suffix: path for path in folder.iterdir()}


@pytest.mark.parametrize('program', [models, training])
def test_prints_and_draws(program, tmp_path, capsys):
    code, written = run(program, tmp_path, '--sizes', '64x64', '33x70')
    assert code == 0
    assert written['.md'].read_text() in capsys.readouterr().out
    assert written['.png'].read_bytes().startswith(b'\x89PNG')
    rows = json.loads(written['.json'].read_text())['rows']
    assert [row['name'] for row in rows] == NAMES * 2
    assert [row['size'] for row in rows] == [[33, 70]] * 5 + [[64, 64]] * 5  # in order
    for row in rows:
        assert row['images'] == pytest.approx(2 / row['p50']) and row['p50'] <= row['p90']
        assert row['memory'] > 0
        # ours and they alone have somebody to agree with
        assert (row['error'] is None) == (not row['name'].startswith('MAViT'))
        if program is training:
            # the maps of the first stage alone, 64 channels for two images, are saved
            tokens = -(-row['size'][0] // 4) * -(-row['size'][1] // 4)
            assert row['saved'] > 2 * 64 * 4 * tokens


@pytest.mark.parametrize('program', [models, training])
def test_what_is_incorrect_gets_no_time(program, tmp_path, capsys, monkeypatch):
    correct = Backbone.forward

    def wrong(self, x):
        maps = correct(self, x)
        maps[1] = maps[1] * 1.001
        return maps

    monkeypatch.setattr(Backbone, 'forward', wrong)
    code, written = run(program, tmp_path, '--sizes', '33x33')
    assert code == 1
    assert 'MAViT-T at 33x33 is incorrect and was not timed' in capsys.readouterr().out
    rows = {row['name']: row for row in json.loads(written['.json'].read_text())['rows']}
    assert 'p50' not in rows['MAViT-T'] and 'p50' in rows['PVTv2-B1']


def test_what_costs_too_much_is_left_out(tmp_path, capsys):
    arguments = '--sizes', '33x33', '64x64', '--seconds', '0', '--gib', '1e-6'
    code, written = run(models, tmp_path, *arguments)
    assert code == 0
    rows = json.loads(written['.json'].read_text())['rows']
    reasons = {(row['name'], row['size'][0]): row.get('left_out') for row in rows}
    assert reasons['published form', 33] == 'its softmax scores would take 0 GiB'
    assert reasons['MAViT-T', 33] is None
    assert reasons['MAViT-T', 64] == '0 s at 33x33 already'
    assert '0 s at 33x33 already' in capsys.readouterr().out


def test_saved_bytes_count_memory_once_and_no_weights():
    x = torch.randn(4, 8, requires_grad=True)
    linear = torch.nn.Linear(8, 8)

    def module(x):
        y = linear(x).exp()  # x and the result of exp are saved, the weight is
        return y * y.view(-1).view(4, 8)  # both factors are that result

    holder = torch.nn.Module()
    holder.linear, holder.forward = linear, module
    assert training.saved_bytes(holder, x) == 2 * 4 * 8 * 4


def test_scores_are_those_of_the_largest_softmax_stage():
    count = models.scores_bytes('tiny', ('mala', 'mala', 'softmax', 'softmax'))
    # stage 3 of a 512x2048 image: 4 heads, 32 x 128 tokens; the scores and their softmax
    assert count(1, 512, 2048) == 2 * 4 * 4 * 4096**2
    assert models.scores_bytes('tiny', ('mala',) * 4)(1, 512, 2048) == 0
