"""The command that writes generated data."""

import json
import subprocess
import sys

import pytest

from mala_mm.demo.writers import MARK
from mala_mm.engine import cli

COMMAND = 'mala_mm.demo.make_data'
SMALL = ['--train', '3', '--val', '2', '--size', '48', '64']


@pytest.fixture(scope='module')
def out(repo, tmp_path_factory):
    """A set made by the tool, with few classes."""
    folder = tmp_path_factory.mktemp('tool') / 'demo'
    options = ['thing_classes=ball,car', 'objects=1,2', 'crowd=0', 'object_size=0.3,0.5']
    layouts = ['coco', 'ade', 'imagenet']
    args = ['--out', str(folder), '--layout', *layouts, *SMALL, '--scene-options', *options]
    command = [sys.executable, str(repo / 'tools/make_demo_data.py'), *args]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for layout in layouts:
        assert f'{folder / layout}: 3 training and 2 validation images' in result.stdout
    return folder


def test_options_reach_the_scenes(out):
    content = json.loads((out / 'coco/annotations/instances_train2017.json').read_text())
    assert [c['name'] for c in content['categories']] == ['ball', 'car']
    assert all(
        48 <= image[side] <= 64 for image in content['images'] for side in ('width', 'height')
    )
    assert json.loads((out / MARK).read_text())['config']['objects'] == [1, 2]
    assert sorted(p.name for p in (out / 'imagenet/train').iterdir()) == ['ball', 'car']


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (['--size', '256', '300', '320'], '--size 256'),
        (['--size', '10'], 'got (10, 10)'),
        (['--train', '0'], "'train': 0"),
        (['--seed', '-1'], 'got -1'),
        (['--scene-options', 'object=1,3'], 'known are sides, objects'),
        (['--scene-options', 'objects=one,three'], 'objects=(2, 9)'),
        (['--scene-options', 'thing_classes=cat'], "got ('cat',)"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, args, message, capsys):
    assert cli.run(COMMAND, ['--out', str(tmp_path / 'out'), *SMALL, *args]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count('\n') == 1
    assert list(tmp_path.iterdir()) == []


def test_refuses_a_folder_in_use(out, capsys):
    before = (out / MARK).read_bytes()
    assert cli.run(COMMAND, ['--out', str(out), *SMALL]) == 1
    assert 'not empty' in capsys.readouterr().err
    assert (out / MARK).read_bytes() == before
