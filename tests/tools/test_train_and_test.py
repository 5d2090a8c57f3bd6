"""Training, resuming and evaluation through the command lines, for each task."""

import json
import math
import pickle
import sys

import torch
from PIL import Image

COCO_FIGURES = ('mAP', 'mAP_50', 'mAP_75', 'mAP_s', 'mAP_m', 'mAP_l')


def training_log(work_dir):
    """The last run's entries for training iterations."""
    (newest,) = sorted(work_dir.glob('*/vis_data/scalars.json'))[-1:]
    entries = [json.loads(line) for line in newest.read_text().splitlines()]
    return [entry for entry in entries if 'loss' in entry]


def metrics(work_dir):
    (newest,) = sorted(work_dir.glob('*/*.json'))[-1:]
    return json.loads(newest.read_text())


def test_detector(workplace, trained_detector):
    entries = training_log(trained_detector)
    assert [entry['step'] for entry in entries] == [1, 2]
    assert all(math.isfinite(entry['loss']) for entry in entries)
    checkpoint = trained_detector / 'epoch_1.pth'

    done = workplace.tool(
        *('test.py', 'det', checkpoint, '--work-dir', 'det_test'),
        *('--out', 'predictions.pkl', '--show-dir', 'images'),
    )
    assert done.returncode == 0, done.stderr
    found = metrics(workplace.folder / 'det_test')
    assert {f'coco/{kind}_{f}' for kind in ('bbox', 'segm') for f in COCO_FIGURES} <= {*found}
    predictions = pickle.loads((workplace.folder / 'predictions.pkl').read_bytes())
    assert len(predictions) == 4
    assert all(len(p['pred_instances']['masks']) == 5 for p in predictions)
    images = [*(workplace.data / 'coco' / 'val2017').iterdir()]
    drawn = workplace.folder / 'images'
    assert {p.name for p in drawn.iterdir()} == {p.name for p in images}
    assert ' 0 missing, 0 unexpected, 0 of another shape' in done.stdout


def test_resume_takes_the_latest_readable_checkpoint(workplace, trained_detector):
    whole = (trained_detector / 'epoch_1.pth').read_bytes()
    resumed = workplace.folder / 'resumed'
    resumed.mkdir()
    (resumed / 'epoch_1.pth').write_bytes(whole)
    (resumed / 'epoch_2.pth').write_bytes(whole[: len(whole) // 2])  # as a kill may leave it
    (resumed / 'last_checkpoint').write_text(str(resumed / 'epoch_2.pth'))
    done = workplace.tool(
        *('train.py', 'det', '--work-dir', resumed, '--resume'),
        *('--cfg-options', 'train_cfg.max_epochs=2', 'val_cfg=None', 'val_dataloader=None'),
        *('val_evaluator=None',),
    )
    assert done.returncode == 0, done.stderr
    assert 'Not resuming from' in done.stdout and 'epoch_2.pth' in done.stdout
    assert 'resumed epoch: 1, iter: 2' in done.stdout
    assert [entry['step'] for entry in training_log(resumed)] == [3, 4]
    saved = torch.load(resumed / 'epoch_2.pth', weights_only=False)
    assert (saved['meta']['epoch'], saved['meta']['iter']) == (2, 4)
    steps = {int(state['step']) for state in saved['optimizer']['state'].values()}
    assert steps == {4}
    assert not [p for p in resumed.iterdir() if p.name.endswith('.part')]


def test_segmentor(workplace, trained_segmentor):
    assert [entry['step'] for entry in training_log(trained_segmentor)] == [1, 2]
    checkpoint = trained_segmentor / 'iter_2.pth'
    done = workplace.tool(
        *('test.py', 'seg', checkpoint, '--work-dir', 'seg_test', '--tta'),
        *('--out', 'label_maps', '--show-dir', 'seg_images'),
    )
    assert done.returncode == 0, done.stderr
    assert {'mIoU', 'aAcc', 'mAcc'} <= {*metrics(workplace.folder / 'seg_test')}
    assert '|         wall        |' in done.stdout  # figures per class
    for path in (workplace.data / 'ade' / 'images' / 'validation').iterdir():
        with Image.open(path) as image:
            size = image.size
        with Image.open(workplace.folder / 'label_maps' / f'{path.stem}.png') as labels:
            assert labels.size == size
            assert labels.getextrema()[0] >= 1  # 0 is no class in ADE20K's files
    drawn = workplace.folder / 'seg_images' / 'vis_data' / 'vis_image'
    assert len([*drawn.iterdir()]) == 4


def test_classifier(workplace):
    code = f"""
from mala_mm.engine import cli
data = ['--data-root', {str(workplace.data / 'imagenet')!r}]
train, test = 'mala_mm.engine.train', 'mala_mm.engine.test'
assert cli.run(train, ['cls.py', '--work-dir', 'cls', '--auto-scale-lr', *data]) == 0
assert cli.run(test, ['cls.py', 'cls/epoch_1.pth', '--work-dir', 'cls_test', '--tta',
                           '--out', 'cls.pkl', *data]) == 0
"""
    done = workplace.run(sys.executable, '-c', code)
    assert done.returncode == 0, done.stderr
    entries = training_log(workplace.folder / 'cls')
    assert [entry['step'] for entry in entries] == [1, 2]
    # 1e-3 is for a batch of 1024, here it is 2; warm-up takes ten iterations.
    expected = 1e-3 * 2 / 1024 * (1e-3 + (1 - 1e-3) / 9)
    assert math.isclose(entries[-1]['lr'], expected, rel_tol=1e-6)
    assert 'accuracy/top1' in metrics(workplace.folder / 'cls_test')
    assert len(pickle.loads((workplace.folder / 'cls.pkl').read_bytes())) == 4
