"""The check that tiny models can overfit: what it trains on, and how it judges."""

import json
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from mala_mm.engine import cli, overfit
from mala_mm.engine.config import load_config
from mala_mm.errors import UserError


@pytest.mark.long
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize(('task', 'folder'), [('det', 'coco'), ('seg', 'ade20k')])
def test_tiny_models_overfit_real_images(task, folder, repo, real_data, tmp_path):
    command = [sys.executable, 'tools/overfit_check.py', task, '--work-dir', str(tmp_path)]
    result = subprocess.run(
        [*command, '--data-root', str(real_data / folder)], cwd=repo, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


@pytest.mark.parametrize(
    ('task', 'recipe', 'parts'),
    [
        ('det', 'det/mavit/mask-rcnn_mavit-t_fpn_amp-1x_coco', ('neck', 'roi_head')),
        ('seg', 'seg/mavit/upernet_mavit-t_8xb2-amp-160k_ade20k-512x512', ('type',)),
    ],
)
def test_model_is_that_of_the_recipe_without_regularisation(repo, task, recipe, parts):
    cfg = load_config(repo / 'configs/overfit' / overfit.CONFIGS[task])
    model = load_config(repo / f'configs/{recipe}.py').model
    for part in parts:
        assert cfg.model[part] == model[part]
    for head in ('decode_head', 'auxiliary_head'):
        if head in model:
            assert cfg.model[head].loss_decode == model[head].loss_decode
            assert cfg.model[head].dropout_ratio == 0
    assert cfg.model.backbone.arch == model.backbone.arch == 'tiny'
    assert cfg.model.backbone.drop_path_rate == cfg.optim_wrapper.optimizer.weight_decay == 0
    for loader in (cfg.train_dataloader, cfg.test_dataloader):
        assert not [step for step in loader.dataset.pipeline if 'Random' in step.type]


def test_coco_images_with_small_objects_or_crowds_are_left_out(tmp_path):
    (tmp_path / 'annotations').mkdir()
    images = [dict(id=i, width=640, height=480) for i in range(11)]
    # At 320 pixels 20 are 40 of these.
    objects = [dict(image_id=i, area=40.0**2, iscrowd=0) for i in range(11) for _ in range(2)]
    objects[0]['area'] -= 1  # image 0: too small
    objects[6]['iscrowd'] = 1  # image 3
    del objects[11]  # image 5 keeps one object
    path = tmp_path / 'annotations/instances_train2017.json'
    path.write_text(json.dumps(dict(images=images, annotations=objects)))
    chosen = json.loads(Path(overfit.select_coco(tmp_path, tmp_path, 320)).read_text())
    assert [image['id'] for image in chosen['images']] == [1, 2, 4, 6, 7, 8, 9, 10]
    assert [a['image_id'] for a in chosen['annotations']] == sorted([1, 2, 4, 6, 7, 8, 9, 10] * 2)
    path.write_text(json.dumps(dict(images=images[:8], annotations=objects)))
    with pytest.raises(UserError, match='only 5 suitable training images, 8 are needed'):
        overfit.select_coco(tmp_path, tmp_path, 320)


def test_ade_scenes_with_the_fewest_classes_are_chosen(tmp_path):
    folder = tmp_path / 'annotations/training'
    folder.mkdir(parents=True)
    for i, classes in enumerate((5, 1, 4, 3, 2, 6)):
        labels = np.arange(64).reshape(8, 8) % (classes + 1)  # and 0, which is no class
        cv2.imwrite(str(folder / f'{i}.png'), labels.astype(np.uint8))
    chosen = Path(overfit.select_ade(tmp_path, tmp_path)).read_text().split()
    assert chosen == ['1', '4', '3', '2']


def test_a_figure_at_its_bar_does_not_pass(capsys):
    overfit.judge('seg', dict(aAcc=96.0, mIoU=60.5))
    assert 'pixel accuracy in %: 96.000 (to pass: more than 95)' in capsys.readouterr().out
    with pytest.raises(UserError, match=r'mIoU .* is 60.000 and not above 60; look'):
        overfit.judge('seg', dict(aAcc=96.0, mIoU=60.0))


def test_missing_data_is_named(capsys):
    assert cli.run('mala_mm.engine.overfit', ['det', '--data-root', 'nowhere']) == 1
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and 'nowhere' in error and '--data-root' in error
