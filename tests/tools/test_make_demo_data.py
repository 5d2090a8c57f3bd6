"""The command lines that write and check generated data."""

import importlib.util
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from mala_mm.demo.writers import MARK
from mala_mm.engine import cli

SMALL = ['--train', '3', '--val', '2', '--size', '48', '64']


def load(repo: Path, tool: str):
    """A tool as a function of its arguments that returns the exit code."""
    spec = importlib.util.spec_from_file_location(tool, repo / 'tools' / f'{tool}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return partial(cli.run, module.main)


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
def test_bad_input_is_one_sentence(repo, tmp_path, args, message, capsys):
    main = load(repo, 'make_demo_data')
    assert main(['--out', str(tmp_path / 'out'), *SMALL, *args]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count('\n') == 1
    assert list(tmp_path.iterdir()) == []


def test_refuses_a_folder_in_use(repo, out, capsys):
    before = (out / MARK).read_bytes()
    assert load(repo, 'make_demo_data')(['--out', str(out), *SMALL]) == 1
    assert 'not empty' in capsys.readouterr().err
    assert (out / MARK).read_bytes() == before


def test_check_dataset_lists_findings(repo, out, tmp_path, capsys):
    main = load(repo, 'check_dataset')
    path = out / 'coco/annotations/instances_val2017.json'
    assert main([str(path), '--images', str(out / 'coco/val2017')]) == 0
    assert 'no findings' in capsys.readouterr().out
    content = json.loads(path.read_text())
    for ann in content['annotations'][:2]:
        ann['area'] = 0
    bad = tmp_path / 'bad.json'
    bad.write_text(json.dumps(content))
    assert main([str(bad), '--most', '1']) == 1
    printed = capsys.readouterr().out
    assert printed.count('zero-area: annotation') == 1 and '1 more' in printed
    assert '2 zero-area' in printed
    assert main([str(tmp_path / 'gone.json')]) == 1
    assert 'gone.json does not exist' in capsys.readouterr().err


def test_check_dataset_reads_configs(repo, out, tmp_path, capsys):
    pytest.importorskip('mmdet', reason='needs mmdet')
    main = load(repo, 'check_dataset')
    config = tmp_path / 'config.py'
    config.write_text(f"""
default_scope = 'mmdet'
dataset = dict(
    type='CocoDataset',
    data_root='{out}/coco',
    ann_file='annotations/instances_train2017.json',
    data_prefix=dict(img='train2017'),
    metainfo=dict(classes=('ball', 'car')))
train_dataloader = dict(dataset=dataset)
model = dict(bbox_head=dict(num_classes=2))
""")
    assert main([str(config)]) == 0
    assert main([str(config), '--cfg-options', 'model.bbox_head.num_classes=3']) == 1
    assert 'model.bbox_head.num_classes is 3' in capsys.readouterr().out
    assert main([str(tmp_path / 'gone.py')]) == 1
