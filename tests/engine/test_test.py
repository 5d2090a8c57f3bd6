"""What evaluation changes in a config: test-time augmentation, drawings, label maps."""

import pytest
from mmengine.config import Config

from mala_mm.engine.config import load_config
from mala_mm.engine.test import augment, draw_predictions, save_label_maps
from mala_mm.errors import UserError

DET = 'configs/det/mavit/retinanet_mavit-t_fpn_amp-1x_coco.py'
MASKS = 'configs/det/mavit/mask-rcnn_mavit-t_fpn_amp-1x_coco.py'
SEG = 'configs/seg/mavit/upernet_mavit-t_8xb2-amp-160k_ade20k-512x512.py'
CLS = 'configs/cls/mavit/mavit-t_8xb128_in1k.py'


@pytest.mark.parametrize(('name', 'tta'), [(DET, 'DetTTAModel'), (CLS, 'AverageClsScoreTTA')])
def test_flips_where_a_config_says_nothing(repo, name, tta):
    cfg = load_config(repo / name)
    model = cfg.model
    *steps, pack = cfg.test_dataloader.dataset.pipeline
    keys = tuple(pack.get('meta_keys', ()))
    augment(cfg)
    assert (cfg.model.type, cfg.model.module) == (tta, model)
    *kept, augmented = cfg.test_dataloader.dataset.pipeline
    assert kept == steps and augmented.type == 'TestTimeAug'
    flips, (packs,) = augmented.transforms
    assert [flip.prob for flip in flips] == [1.0, 0.0]
    if keys:  # the predictions are flipped back by these
        assert packs.meta_keys == (*keys, 'flip', 'flip_direction')
    assert pack.get('meta_keys', ()) == keys  # other loaders share the pipeline


def test_masks_are_not_merged(repo):
    with pytest.raises(UserError, match='--tta merges boxes alone'):
        augment(load_config(repo / MASKS))


def test_what_a_config_says_is_taken_also_in_a_wrapped_data_set(repo):
    cfg = load_config(repo / SEG)
    cfg.test_dataloader.dataset = dict(type='RepeatDataset', dataset=cfg.test_dataloader.dataset)
    augment(cfg)
    assert cfg.test_dataloader.dataset.dataset.pipeline == cfg.tta_pipeline
    assert cfg.model.type == cfg.tta_model.type == 'SegTTAModel'
    cfg.pop('tta_model')
    with pytest.raises(UserError, match='--tta needs tta_model and tta_pipeline'):
        augment(cfg)


def test_drawings_go_to_the_folder(repo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = str(tmp_path / 'images')
    hooks = {}
    for name in (DET, SEG, CLS):
        cfg = load_config(repo / name)
        draw_predictions(cfg, 'images')
        hooks[name] = cfg.default_hooks.visualization
        assert hooks[name].interval == 1
    assert (hooks[DET].draw, hooks[DET].test_out_dir) == (True, folder)
    assert (hooks[CLS].enable, hooks[CLS].out_dir) == (True, folder)
    assert hooks[SEG].draw
    cfg.default_hooks.pop('visualization')
    with pytest.raises(UserError, match='--show-dir needs default_hooks.visualization'):
        draw_predictions(cfg, 'images')


@pytest.mark.parametrize('several', [False, True])
def test_label_maps_of_every_metric(several):
    metrics = (
        [dict(type='IoUMetric'), dict(type='IoUMetric')] if several else dict(type='IoUMetric')
    )
    cfg = Config(dict(test_evaluator=metrics))
    save_label_maps(cfg, 'maps')
    found = cfg.test_evaluator if several else [cfg.test_evaluator]
    assert [metric.output_dir for metric in found] == ['maps'] * len(found)
