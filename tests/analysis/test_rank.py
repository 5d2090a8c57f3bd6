"""Singular values and ranks of states and outputs."""

import json

import pytest
import torch

from mala_mm.analysis.rank import (
    effective_rank,
    matrices_of,
    numerical_rank,
    singular_values,
)


def test_singular_values_and_ranks_of_known_matrices():
    generator = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(50, 8, generator=generator, dtype=torch.float64)).Q
    w = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64)).Q
    known = torch.tensor([4.0, 4, 4, 1, 0.1, 0.01, 1e-7, 0], dtype=torch.float64)
    values = singular_values(u @ torch.diag(known) @ w)
    torch.testing.assert_close(values, known, rtol=1e-6, atol=1e-14)
    # 4 * 50 * 2^-23 = 2.4e-5
    assert numerical_rank(values, (50, 8)).item() == 6
    assert numerical_rank(values, (50, 8)).item() == torch.linalg.matrix_rank(
        (u @ torch.diag(known) @ w).float()
    )
    assert effective_rank(torch.ones(5)).item() == pytest.approx(5)
    assert effective_rank(torch.tensor([1.0, 0, 0])).item() == pytest.approx(1)


def test_the_matrices_of_a_layer(seen):
    mala, softmax = seen.choose(2)[0], seen.choose(3)[0]
    found = matrices_of(mala)
    assert {name: tuple(m.shape) for name, m in found.items()} == dict(
        state=(2, 8, 8), output=(2, 96, 8), gated=(2, 96, 8)
    )
    assert set(matrices_of(softmax)) == {'output', 'gated'}  # it has no state
    assert set(matrices_of(mala, mala.with_operator('softmax'))) == {'output'}
    # linear attention's state is that of MALA but for a factor
    linear = matrices_of(mala, mala.with_operator('linear'))['state']
    ratio = linear / found['state']
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio))


def test_the_command_writes_table_plot_and_numbers(command, folder):
    out = ('--out', 'rank.png', '--size', '64')
    code, printed, _ = command('rank', 'tiny.py', '--images', 'photo.png', *out)
    assert code == 0
    lines = [line for line in printed.splitlines() if line.startswith('|')]
    # 3 matrices of stages 1 (2 blocks) and 2 (2 heads), 2 of 2 and 4 heads in stages 3 and 4
    assert len(lines) == 2 + 3 * 4 + 2 * 6
    found = json.loads((folder / 'rank.json').read_text())
    assert len(found) == 24 and (folder / 'rank.png').stat().st_size > 5000
    for head in found:
        assert head['values'][0] == pytest.approx(1)
        assert 1 <= head['effective'] <= len(head['values']) >= head['rank']


@pytest.mark.parametrize(
    ('args', 'sentence'),
    [
        (('--operators', 'nope'), "the operator must be one of ('"),
        (('--stage', '7'), 'stage must be one of 1, 2, 3, 4, got 7'),
        (('--block', '3'), 'block must be one of 1 to 2'),
        (('--out', 'rank.pdf'), '--out must end in .png or .jpg, got rank.pdf'),
        (('--images', 'nope'), 'image nope does not exist'),
    ],
)
def test_bad_input_is_a_sentence(command, args, sentence):
    code, _, error = command('rank', 'tiny.py', '--images', 'photo.png', '--size', '64', *args)
    assert code == 1 and sentence in error
