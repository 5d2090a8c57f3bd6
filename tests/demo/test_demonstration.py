import subprocess
import sys

import pytest
from mmengine.config import Config

from mala_mm.demo import STUFF_CLASSES, STUFF_PALETTE, THING_CLASSES, THING_PALETTE


@pytest.fixture(scope='module')
def configs(repo):
    return {path.stem: Config.fromfile(path) for path in (repo / 'configs/demo').glob('*.py')}


def test_class_names_and_colours_are_those_of_the_generator(configs):
    """Configs cannot import, so they spell them out."""
    classifier = configs['mavit-t_scenes']
    things = classifier.train_dataloader.dataset.metainfo.classes
    assert set(things) < set(THING_CLASSES)
    detector = configs['mask-rcnn_mavit-t_fpn_scenes']
    assert detector.train_dataloader.dataset.metainfo.classes == things
    segmentor = configs['upernet_mavit-t_scenes']
    for loader in (segmentor.train_dataloader, segmentor.test_dataloader):
        assert loader.dataset.metainfo.classes == (*STUFF_CLASSES, *things)
        colours = [THING_PALETTE[THING_CLASSES.index(name)] for name in things]
        assert [tuple(c) for c in loader.dataset.metainfo.palette] == [*STUFF_PALETTE, *colours]


def test_models_are_those_of_the_recipes(configs, repo):
    """Nothing but class counts, sampling and head widths is smaller than in the recipe."""
    recipe = Config.fromfile(repo / 'configs/det/mavit/mask-rcnn_mavit-t_fpn_amp-1x_coco.py').model
    model = configs['mask-rcnn_mavit-t_fpn_scenes'].model
    assert model.type == recipe.type == 'MaskRCNN'
    assert model.neck == recipe.neck
    for part in ('bbox_head', 'mask_head'):
        assert {**model.roi_head[part], 'num_classes': 80} == recipe.roi_head[part]
    for name in ('mask-rcnn_mavit-t_fpn_scenes', 'upernet_mavit-t_scenes', 'mavit-t_scenes'):
        backbone = configs[name].model.backbone
        assert (backbone.type, backbone.arch) == ('mala_mm.MAViT', 'tiny')


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_demo_reaches_what_it_promises(repo, tmp_path):
    result = subprocess.run(
        [sys.executable, 'tools/demo.py', '--out', str(tmp_path)],
        cwd=repo,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    for name in ('detections', 'scenes', 'training'):
        assert (tmp_path / f'images/{name}.png').stat().st_size > 10_000
