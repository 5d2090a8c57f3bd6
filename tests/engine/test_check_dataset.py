"""The command that lists what is wrong with a data set."""

import json
from functools import partial

import pytest
from PIL import Image

from mala_mm.engine import cli

check = partial(cli.run, 'mala_mm.engine.check_dataset')


def test_check_dataset_lists_findings(demo, tmp_path, capsys):
    path = demo.root / 'coco/annotations/instances_val2017.json'
    assert check([str(path), '--images', str(demo.root / 'coco/val2017')]) == 0
    assert 'no findings' in capsys.readouterr().out
    content = json.loads(path.read_text())
    for ann in content['annotations'][:2]:
        ann['area'] = 0
    bad = tmp_path / 'bad.json'
    bad.write_text(json.dumps(content))
    assert check([str(bad), '--most', '1']) == 1
    printed = capsys.readouterr().out
    assert printed.count('zero-area: annotation') == 1 and '1 more' in printed
    assert '2 zero-area' in printed
    assert check([str(bad), '--most', '2']) == 1
    printed = capsys.readouterr().out
    assert printed.count('zero-area: annotation') == 2 and 'more' not in printed
    assert check([str(tmp_path / 'gone.json')]) == 1
    assert 'gone.json does not exist' in capsys.readouterr().err


def test_check_dataset_reads_configs(demo, tmp_path, capsys):
    pytest.importorskip('mmdet', reason='needs mmdet')
    config = tmp_path / 'config.py'
    config.write_text(f"""
default_scope = 'mmdet'
dataset = dict(
    type='CocoDataset',
    data_root='{demo.root}/coco',
    ann_file='annotations/instances_train2017.json',
    data_prefix=dict(img='train2017'),
    metainfo=dict(classes={demo.config.thing_classes}))
train_dataloader = val_dataloader = dict(dataset=dataset)
model = dict(bbox_head=dict(num_classes={len(demo.config.thing_classes)}))
""")
    assert check([str(config)]) == 0
    # a data set that two loaders share is checked once
    assert capsys.readouterr().out.count('paths and classes are right') == 1
    assert check([str(config), '--cfg-options', 'model.bbox_head.num_classes=3']) == 1
    assert 'model.bbox_head.num_classes is 3' in capsys.readouterr().out
    assert check([str(tmp_path / 'gone.py')]) == 1


def test_check_dataset_reads_every_label_map(tmp_path, capsys):
    """Training starts after a sample of them."""
    pytest.importorskip('mmseg', reason='needs mmseg')
    for folder in ('images', 'labels'):
        (tmp_path / folder).mkdir()
    for number in range(130):
        for name in (f'images/{number:03d}.jpg', f'labels/{number:03d}.png'):
            Image.new('L', (1, 1), 5 if name == 'labels/001.png' else 0).save(tmp_path / name)
    config = tmp_path / 'config.py'
    config.write_text(f"""
default_scope = 'mmseg'
train_dataloader = dict(dataset=dict(
    type='BaseSegDataset',
    data_root='{tmp_path}',
    data_prefix=dict(img_path='images', seg_map_path='labels'),
    metainfo=dict(classes=('one', 'two'))))
""")
    assert check([str(config)]) == 1
    assert '001.png has the value 5' in capsys.readouterr().out
