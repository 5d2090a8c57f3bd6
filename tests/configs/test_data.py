"""The data side of the configs: pipelines, data sets, and the classifiers' inference API."""

from argparse import ArgumentParser

import numpy as np
import pytest
import torch
from mmcv.image import imwrite
from mmengine.config import DictAction
from mmengine.registry import DATASETS, MODELS, TRANSFORMS
from mmengine.runner import save_checkpoint

from .recipe_grid import CONFIGS, GRID, RECIPES, scope_of


def first_of(name):
    return next(e for e in GRID if e.recipe is RECIPES[name])


def random_image(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def write_folders(root, names):
    """One image per folder, of a grey that tells its place in the list."""
    for index, name in enumerate(names):
        imwrite(np.full((40, 50, 3), index, np.uint8), str(root / name / 'image.png'))


def test_multi_scale_training():
    """Both branches occur, and each keeps the sides within the published limits."""
    from mmdet.structures.bbox import HorizontalBoxes
    from mmdet.structures.mask import BitmapMasks

    cfg = first_of('mask-rcnn_{}_fpn_amp-ms-crop-3x_coco').load()
    with scope_of(cfg):
        transforms = [TRANSFORMS.build(t) for t in cfg.train_dataloader.dataset.pipeline[2:]]
    ratios = []
    np.random.seed(0)
    for seed in range(12):
        results = dict(
            img=random_image(480, 640, seed),
            img_id=0,
            img_path='',
            img_shape=(480, 640),
            ori_shape=(480, 640),
            gt_bboxes=HorizontalBoxes(torch.tensor([[200.0, 150, 440, 330]])),
            gt_bboxes_labels=np.zeros(1, np.int64),
            gt_ignore_flags=np.zeros(1, bool),
            gt_masks=BitmapMasks(np.ones((1, 480, 640), np.uint8), 480, 640),
        )
        for transform in transforms:
            results = transform(results)
        height, width = results['inputs'].shape[1:]
        short, long = sorted((height, width))
        assert short in range(480, 801, 32) or long == 1333
        assert long <= 1333
        assert results['data_samples'].gt_instances.masks.masks.shape[-2:] == (height, width)
        ratios.append(round(width / height, 2))
    whole = ratios.count(1.33)
    assert 0 < whole < len(ratios)


def test_classifier_pipelines(tmp_path):
    """ImageNet's layout: training and validation yield what the published recipe feeds."""
    names = ['n01', 'n02', 'n03']
    for split in ('train', 'val'):
        write_folders(tmp_path / split, names)
    cfg = first_of('{}_8xb128_in1k').load()
    with scope_of(cfg):
        for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
            assert loader.batch_size == 128
            loader.dataset.merge(dict(data_root=str(tmp_path), metainfo=dict(classes=names)))
            dataset = DATASETS.build(loader.dataset)
            assert [int(dataset[i]['data_samples'].gt_label) for i in range(3)] == [0, 1, 2]
            assert dataset[0]['inputs'].shape == (3, 224, 224)
    augment, erase = cfg.train_dataloader.dataset.pipeline[3:5]
    assert (augment.type, augment.policies) == ('RandAugment', 'timm_increasing')
    assert (augment.magnitude_level, augment.magnitude_std) == (9, 0.5)
    assert (augment.num_policies, augment.total_level) == (2, 10)
    assert (erase.type, erase.erase_prob, erase.mode) == ('RandomErasing', 0.25, 'rand')


def imagenet_v2(root, classes):
    """The test set of a classifier config after the options that its recipe names."""
    cfg = first_of('{}_8xb128_in1k').load()
    dataset = 'test_dataloader.dataset'
    cfg.merge_from_dict(
        {
            f'{dataset}.type': 'mala_mm.ImageNetV2',
            f'{dataset}.data_root': str(root),
            f'{dataset}.split': '',
            f'{dataset}.metainfo': dict(classes=classes),
        }
    )
    with scope_of(cfg):
        return DATASETS.build(cfg.test_dataloader.dataset)


def test_imagenet_v2(tmp_path):
    names = [str(number) for number in range(12)]
    write_folders(tmp_path, names)
    dataset = imagenet_v2(tmp_path, names)
    assert len(dataset) == 12
    for item in map(dataset.__getitem__, range(12)):
        # The grey of the image is the number of its class.
        assert item['inputs'].unique().tolist() == [int(item['data_samples'].gt_label)]


def test_imagenet_v2_refuses_other_names(tmp_path):
    write_folders(tmp_path, ['0', '1', 'n02'])
    with pytest.raises(ValueError, match="named 0 to 2, got 'n02'"):
        imagenet_v2(tmp_path, ['a', 'b', 'c'])


def test_image_classification_inferencer(tmp_path, monkeypatch):
    """A config and a checkpoint are all that mmpretrain's inferencer needs, from any folder."""
    from mmpretrain import ImageClassificationInferencer

    entry = next(e for e in GRID if str(e) == 'ravlt-t_8xb128_in1k')
    cfg = entry.load()
    classes = tuple(f'class {i}' for i in range(1000))
    with scope_of(cfg):
        torch.manual_seed(0)
        model = MODELS.build({**cfg.model, 'data_preprocessor': cfg.data_preprocessor}).eval()
        pipeline = [TRANSFORMS.build(t) for t in cfg.test_dataloader.dataset.pipeline[1:]]
    # Initialised classifiers give every image about the same small logits.
    model.head.fc.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    checkpoint = tmp_path / 'classifier.pth'
    meta = dict(dataset_meta=dict(classes=classes))
    save_checkpoint(dict(state_dict=model.state_dict(), meta=meta), str(checkpoint))
    image = random_image(180, 240)
    imwrite(image, str(tmp_path / 'image.png'))

    monkeypatch.chdir(tmp_path)
    inferencer = ImageClassificationInferencer(
        str(CONFIGS / entry.file), pretrained=str(checkpoint), device='cpu'
    )
    (result,) = inferencer('image.png')

    sample = dict(img=image, img_shape=image.shape[:2], ori_shape=image.shape[:2])
    for transform in pipeline:
        sample = transform(sample)
    batch = {key: [value] for key, value in sample.items()}
    with torch.no_grad():
        (expected,) = model.test_step(batch)
    np.testing.assert_array_equal(result['pred_scores'], expected.pred_score.numpy())
    assert result['pred_label'] == result['pred_scores'].argmax()
    assert result['pred_class'] == classes[result['pred_label']]


def test_command_starts_from_a_classifier(tmp_path):
    """The options in a header load the backbone of a classifier, whose tail stays aside."""
    classifier, detector = (
        next(e for e in GRID if str(e) == name)
        for name in ('ravlt-t_8xb128_in1k', 'retinanet_ravlt-t_fpn_amp-1x_coco')
    )
    cfg = classifier.load()
    with scope_of(cfg):
        model = MODELS.build(cfg.model)
    model.backbone.init_weights()
    checkpoint = tmp_path / 'classifier.pth'
    save_checkpoint(dict(state_dict=model.state_dict(), meta={}), str(checkpoint))

    command = (CONFIGS / detector.file).read_text().splitlines()[2]
    parser = ArgumentParser()
    parser.add_argument('--cfg-options', nargs='+', action=DictAction)
    words = command.replace('CLASSIFIER', str(checkpoint)).split()
    options = parser.parse_args(words[words.index('--cfg-options') :]).cfg_options
    cfg = detector.load()
    cfg.merge_from_dict(options)
    backbone = MODELS.build(cfg.model.backbone)
    backbone.init_weights()
    weights = backbone.state_dict()
    own = {f'norm{i}.{kind}' for i in (1, 2, 3) for kind in ('weight', 'bias')}
    assert set(weights) == own | set(model.backbone.state_dict())
    for name, value in model.backbone.state_dict().items():
        assert torch.equal(weights[name], value), name
