"""What the table of counts says, and how bad input is refused."""

from pathlib import Path

import pytest

from mala_mm.engine import cli

REPO = Path(__file__).resolve().parents[2]
FRAGMENT = str(REPO / 'configs' / '_base_' / 'backbones' / 'mavit-t.py')


@pytest.fixture
def get_flops(capsys, monkeypatch):
    """Runs the command; returns its exit code and the lines of both its outputs."""
    monkeypatch.setenv('COLUMNS', '100')

    def call(*args: str) -> tuple[int, list[str], list[str]]:
        try:
            code = cli.run('mala_mm.analysis.get_flops', args)
        except SystemExit as stop:  # argparse
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return call


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace('┃', '│').strip('│').split('│')]


def test_table_of_a_backbone(get_flops):
    code, lines, _ = get_flops(FRAGMENT, '--shape', '224')
    assert code == 0
    assert 'mavit-t at 224x224, attention mala, mala, softmax, softmax' in lines
    table = [cells(line) for line in lines if line[0] in '┃│']
    assert table[0] == ['part', 'params (M)', 'layers (G)', 'total (G)', 'all linear (G)']
    assert [row[0] for row in table[1:]] == ['stem', *(f'stage{i}' for i in range(1, 5)), 'total']
    # Trunk 13,345,408 and output norms 2 (64 + 128 + 256 + 512); stage 3: 6 (2 196^2 256) softmax.
    assert table[-1][:2] == ['total', '13.347']
    layers, total = (float(x) for x in table[4][2:4])
    assert total - layers == pytest.approx(6 * 2 * 196**2 * 256 / 1e9, abs=0.011)  # two roundings


def test_options_change_the_model(get_flops):
    options = ('--cfg-options', 'backbone.attn_types=[rala,rala,linear,linear]')
    code, lines, _ = get_flops(FRAGMENT, '--shape', '32', '64', *options)
    assert code == 0
    assert 'mavit-t at 32x64, attention rala, rala, linear, linear' in lines


@pytest.mark.parametrize(
    ('args', 'sentence'),
    [
        (('configs/nope.py', '--shape', '224'), 'Config configs/nope.py does not exist'),
        ((FRAGMENT, '--shape', '0'), 'got (0, 0)'),
        ((FRAGMENT, '--shape', '1', '2', '3'), 'got [1, 2, 3]'),
        ((FRAGMENT,), 'required: --shape'),
        (
            (FRAGMENT, '--shape', '9', '--cfg-options', 'backbone.attn_types=[mala,nope]'),
            "got ['mala', 'nope']",
        ),
    ],
)
def test_bad_input_ends_in_one_sentence(get_flops, args, sentence):
    code, out, err = get_flops(*args)
    assert code != 0
    assert not any('│' in line for line in out)
    assert sentence in err[-1]
    assert not any('Traceback' in line for line in err)
