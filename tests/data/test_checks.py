"""Wrong paths and class lists end in one sentence with the file, the value and the remedy."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from mala_mm.data.checks import (
    check_dataset,
    check_evaluator,
    check_num_classes,
    coco_files,
)
from mala_mm.demo import SCENE_CLASSES, THING_CLASSES
from mala_mm.errors import UserError

needs = {
    name: pytest.importorskip(f'{name}.datasets', reason=f'needs {name}')
    for name in ('mmdet', 'mmseg', 'mmpretrain')
}


@pytest.fixture
def coco(demo):
    return dict(
        type='CocoDataset',
        data_root=f'{demo.root}/coco/',
        ann_file='annotations/instances_train2017.json',
        data_prefix=dict(img='train2017/'),
        metainfo=dict(classes=THING_CLASSES),
    )


@pytest.fixture
def ade(demo):
    return dict(
        type='BaseSegDataset',
        data_root=f'{demo.root}/ade',
        data_prefix=dict(img_path='images/training', seg_map_path='annotations/training'),
        metainfo=dict(classes=SCENE_CLASSES),
        reduce_zero_label=True,
    )


@pytest.fixture
def imagenet(demo):
    return dict(
        type='ImageNet',
        data_root=f'{demo.root}/imagenet',
        split='train',
        metainfo=dict(classes=THING_CLASSES),
    )


@pytest.fixture
def sets(coco, ade, imagenet):
    return dict(mmdet=coco, mmseg=ade, mmpretrain=imagenet)


def refusal(cfg, scope, **changes):
    """The sentence that a configuration is refused with."""
    with pytest.raises(UserError) as error:
        check_dataset({**cfg, **changes}, scope)
    sentence = str(error.value)
    assert not sentence.endswith('.') and '\n' not in sentence
    return sentence


@pytest.mark.parametrize('scope', ['mmdet', 'mmseg', 'mmpretrain'])
def test_good_sets_pass(sets, scope):
    from mmengine.config import ConfigDict

    cfg = sets[scope]
    check_dataset(cfg, scope)
    check_dataset(ConfigDict(cfg), scope)
    check_dataset({**cfg, 'type': f'{scope}.{cfg["type"]}'})
    check_dataset(dict(type='RepeatDataset', times=2, dataset=cfg), scope)


@pytest.mark.parametrize('scope', ['mmdet', 'mmseg', 'mmpretrain'])
def test_missing_data_root(sets, scope):
    sentence = refusal(sets[scope], scope, data_root='no/such/root')
    assert 'no/such/root does not exist' in sentence and 'data_root' in sentence


@pytest.mark.parametrize('wrapper', ['RepeatDataset', 'ConcatDataset', 'MultiImageMixDataset'])
def test_wrapped_sets_are_looked_into(coco, wrapper):
    bad = {**coco, 'ann_file': 'gone.json'}
    inner = dict(datasets=[coco, bad]) if wrapper == 'ConcatDataset' else dict(dataset=bad)
    assert 'gone.json does not exist' in refusal(dict(type=wrapper, **inner), 'mmdet')


def test_unknown_and_remote_sets_pass(coco):
    check_dataset(dict(type='NoSuchDataset', data_root='nowhere'), 'mmdet')
    check_dataset({**coco, 'data_root': 's3://bucket/coco'}, 'mmdet')
    remote = dict(backend='petrel')
    check_dataset({**coco, 'data_root': 'bucket', 'backend_args': remote}, 'mmdet')


def test_coco_paths(coco):
    assert 'x.json does not exist' in refusal(coco, 'mmdet', ann_file='x.json')
    assert 'no ann_file' in refusal(coco, 'mmdet', ann_file='')
    sentence = refusal(coco, 'mmdet', data_prefix=dict(img='pictures'))
    assert 'image folder' in sentence and 'pictures does not exist' in sentence
    sentence = refusal(coco, 'mmdet', data_prefix=dict(img='val2017'))
    assert '16 of 16 images' in sentence and 'the first is 000000000001.jpg' in sentence


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('{"images": [', 'not valid JSON'),
        ('[1, 2]', "no list 'images'"),
        ('{"images": [], "categories": {}}', "no list 'categories'"),
        ('{"images": [{"id": 1}], "categories": []}', 'has no file_name, height, width'),
        ('{"images": [], "categories": [], "annotations": null}', 'annotations=None'),
        ('{"images": [], "categories": [], "annotations": []}', 'has no annotations'),
        ('\ufeff{"images": [], "categories": []}', 'byte-order mark'),
        ('[' * 100_000, 'nested too deeply'),
        ('{"images": [' + '9' * 5000 + '], "categories": []}', 'Exceeds the limit'),
    ],
)
def test_coco_files_that_are_none(coco, tmp_path, text, message):
    path = tmp_path / 'annotations.json'
    path.write_text(text, encoding='utf-8')
    sentence = refusal(coco, 'mmdet', ann_file=str(path))
    assert message in sentence and str(path) in sentence


def test_coco_classes(coco):
    sentence = refusal(coco, 'mmdet', metainfo={})  # the 80 classes of COCO
    assert '80 classes' in sentence and '8 categories' in sentence and 'person' in sentence
    assert repr(THING_CLASSES) in sentence  # the remedy can be pasted
    fewer = dict(classes=THING_CLASSES[:-1])
    sentence = refusal(coco, 'mmdet', metainfo=fewer)
    assert 'tree is not configured' in sentence and 'subset=True' in sentence
    check_dataset({**coco, 'metainfo': dict(fewer, subset=True)}, 'mmdet')
    sentence = refusal(coco, 'mmdet', metainfo=dict(classes=(*THING_CLASSES, 'cat')))
    assert 'cat is not in the file' in sentence
    # a forgotten comma
    assert "classes=('ball',)" in refusal(coco, 'mmdet', metainfo=dict(classes='ball'))


def test_classes_from_a_file(coco, tmp_path):
    path = tmp_path / 'classes.txt'
    path.write_text('\n'.join(THING_CLASSES) + '\n')
    check_dataset({**coco, 'metainfo': dict(classes=str(path))}, 'mmdet')


def test_edited_annotation_file_is_read_again(coco, demo, tmp_path):
    content = json.loads((demo.root / 'coco/annotations/instances_train2017.json').read_text())
    path = tmp_path / 'annotations.json'
    path.write_text(json.dumps(content))
    check_dataset({**coco, 'ann_file': str(path)}, 'mmdet')
    content['images'][0]['file_name'] = 'gone.jpg'
    path.write_text(json.dumps(content))
    assert 'gone.jpg' in refusal(coco, 'mmdet', ann_file=str(path))


def test_seg_paths(ade, demo, tmp_path):
    labels = 'annotations/training'
    sentence = refusal(ade, 'mmseg', data_prefix=dict(img_path='img', seg_map_path=labels))
    assert 'image folder' in sentence and 'ade/img does not exist' in sentence
    sentence = refusal(ade, 'mmseg', data_prefix=dict(img_path='images/training', seg_map_path='x'))
    assert 'label folder' in sentence and 'ade/x does not exist' in sentence
    swapped = dict(img_path='images/training', seg_map_path='annotations/validation')
    sentence = refusal(ade, 'mmseg', data_prefix=swapped)
    assert (
        '16 of 16 images have no label map' in sentence and 'scene_train_00000001.png' in sentence
    )
    assert 'no images *.bmp' in refusal(ade, 'mmseg', img_suffix='.bmp')
    assert 'split.txt does not exist' in refusal(ade, 'mmseg', ann_file='split.txt')
    split = tmp_path / 'split.txt'
    split.write_text('scene_train_00000002\nscene_train_00000099\n')
    sentence = refusal(ade, 'mmseg', ann_file=str(split))
    assert '1 of 2 images' in sentence and 'scene_train_00000099.jpg' in sentence
    split.write_text('scene_train_00000002\n')
    check_dataset({**ade, 'ann_file': str(split)}, 'mmseg')
    # a test set has no labels
    check_dataset({**ade, 'data_prefix': dict(img_path='images/training')}, 'mmseg')


def test_seg_label_values(ade, demo, tmp_path):
    highest = len(SCENE_CLASSES)
    sentence = refusal(ade, 'mmseg', reduce_zero_label=False)
    assert f'the value {highest}' in sentence and f'allows 0 to {highest - 1}' in sentence
    root = tmp_path / 'ade'
    shutil.copytree(demo.root / 'ade', root)
    path = root / 'annotations/training/scene_train_00000003.png'
    labels = np.asarray(Image.open(path)).copy()
    labels[0, 0] = 255  # ignored
    Image.fromarray(labels).save(path)
    check_dataset({**ade, 'data_root': str(root)}, 'mmseg')
    labels[0, 0] = highest + 1
    Image.fromarray(labels).save(path)
    sentence = refusal(ade, 'mmseg', data_root=str(root))
    assert path.name in sentence and f'the value {highest + 1}' in sentence
    Image.fromarray(np.stack([labels] * 3, -1)).save(path)
    assert '3 channels' in refusal(ade, 'mmseg', data_root=str(root))
    path.write_bytes(b'no image')
    assert 'cannot be read' in refusal(ade, 'mmseg', data_root=str(root))
    check_dataset({**ade, 'data_root': str(root)}, 'mmseg', limit=1)  # reads the first map alone


def test_label_values_are_sampled_from_all_of_the_set(ade, demo, tmp_path):
    """Not from its front alone: files are often in the order of the scenes."""
    root = tmp_path / 'ade'
    shutil.copytree(demo.root / 'ade', root)
    paths = sorted((root / 'annotations/training').iterdir())
    for path in paths[-4:]:
        Image.fromarray(np.full((2, 2), len(SCENE_CLASSES) + 1, np.uint8)).save(path)
    with pytest.raises(UserError) as error:
        check_dataset({**ade, 'data_root': str(root)}, 'mmseg', limit=len(paths) // 4)
    assert any(path.name in str(error.value) for path in paths[-4:])


def test_a_label_map_of_another_size_than_its_image(ade, demo, tmp_path):
    root = tmp_path / 'ade'
    shutil.copytree(demo.root / 'ade', root)
    path = sorted((root / 'annotations/training').iterdir())[1]
    Image.fromarray(np.zeros((2, 3), np.uint8)).save(path)
    with pytest.raises(UserError, match=f'{path.name} has 3x2 pixels and its image .* make them'):
        check_dataset({**ade, 'data_root': str(root)}, 'mmseg', limit=None)


def test_seg_classes(ade):
    check_dataset({**ade, 'type': 'ADE20KDataset', 'metainfo': {}}, 'mmseg')
    sentence = refusal(ade, 'mmseg', type='ADE20KDataset')
    assert '150 classes of its own' in sentence and 'BaseSegDataset' in sentence


def test_cls_folders(imagenet, demo, tmp_path):
    sentence = refusal(imagenet, 'mmpretrain', metainfo={})
    assert '1000 classes' in sentence and '8 class folders' in sentence
    assert repr(THING_CLASSES) in sentence
    sentence = refusal(imagenet, 'mmpretrain', metainfo=dict(classes=THING_CLASSES[::-1]))
    assert 'sorted folders' in sentence
    root = tmp_path / 'imagenet'
    shutil.copytree(demo.root / 'imagenet', root)
    shutil.rmtree(root / 'train/box')
    (root / 'train/box').mkdir()
    assert 'train/box holds no image' in refusal(imagenet, 'mmpretrain', data_root=str(root))
    shutil.rmtree(root / 'train')
    assert 'imagenet/train does not exist' in refusal(imagenet, 'mmpretrain', data_root=str(root))
    (root / 'train').mkdir()
    assert 'no class folders' in refusal(imagenet, 'mmpretrain', data_root=str(root))


def test_cls_lists(imagenet, demo, tmp_path):
    cfg = dict(
        type='CustomDataset',
        data_root=imagenet['data_root'],
        data_prefix='train',
        ann_file=str(tmp_path / 'list.txt'),
        metainfo=imagenet['metainfo'],
    )
    assert 'list.txt does not exist' in refusal(cfg, 'mmpretrain')
    ball = next((demo.root / 'imagenet/train/ball').iterdir()).name
    for text, message in (
        ('ball/gone.jpg 0\n', '1 of 1 images'),
        (f'ball/{ball} 8\n', 'class index 8'),
        (f'ball/{ball}\n', 'Line 1'),
        (f'ball/{ball} 0\n\n', 'Line 2'),
        ('', 'is empty'),
    ):
        (tmp_path / 'list.txt').write_text(text)
        assert message in refusal(cfg, 'mmpretrain')
    (tmp_path / 'list.txt').write_text(f'ball/{ball} 0\n')
    check_dataset(cfg, 'mmpretrain')


def heads(**counts):
    """A model with the given num_classes per head."""
    return {name: dict(type='Head', num_classes=count) for name, count in counts.items()}


def test_num_classes_of_every_head(coco, ade, imagenet):
    two_stage = dict(
        rpn_head=dict(num_classes=1),
        roi_head=dict(
            bbox_head=[dict(num_classes=8)] * 3,
            mask_head=dict(num_classes=80),
            semantic_head=dict(num_classes=183),  # HTC's: COCO's things and stuff
        ),
    )
    with pytest.raises(UserError) as error:
        check_num_classes(two_stage, coco, 'mmdet')
    sentence = str(error.value)
    assert sentence.startswith('model.roi_head.mask_head.num_classes is 80, but')
    assert '8 classes' in sentence and 'num_classes=8' in sentence
    two_stage['roi_head']['mask_head']['num_classes'] = 8
    check_num_classes(two_stage, coco, 'mmdet')
    check_num_classes(heads(bbox_head=80), {**coco, 'metainfo': {}}, 'mmdet')

    with pytest.raises(UserError, match='auxiliary_head.num_classes is 150'):
        check_num_classes(heads(decode_head=15, auxiliary_head=150), ade, 'mmseg')
    with pytest.raises(UserError, match=r'auxiliary_head\[1\].num_classes is 2'):
        model = dict(auxiliary_head=[dict(num_classes=15), dict(num_classes=2)])
        check_num_classes(dict(model, **heads(decode_head=15)), ade, 'mmseg')
    check_num_classes(heads(decode_head=150), {**ade, 'type': 'ADE20KDataset', 'metainfo': {}})

    with pytest.raises(UserError, match='model.head.num_classes is 1000'):
        check_num_classes(heads(head=1000), imagenet, 'mmpretrain')
    custom = dict(type='CustomDataset', data_root=imagenet['data_root'], data_prefix='train')
    with pytest.raises(UserError, match='8 classes'):  # counted from the folders
        check_num_classes(heads(head=7), custom, 'mmpretrain')
    check_num_classes(heads(head=8), custom, 'mmpretrain')


@pytest.mark.parametrize(
    ('changes', 'metric', 'sentence'),
    [
        (dict(iscrowd=None), 'bbox', 'has no iscrowd, which the evaluation needs; add'),
        (dict(segmentation=[[1, 1, 9, 9]]), 'segm', 'outlines that the evaluation cannot read'),
        (dict(segmentation=[[1, 1, 9, 9]]), 'bbox', None),
        (dict(area='large'), 'bbox', 'has 1 fault, the first is wrong-type'),
        (dict(), ['bbox', 'segm'], None),
    ],
)
def test_what_the_evaluation_would_break_on(tmp_path, changes, metric, sentence):
    fields = dict(id=1, image_id=1, category_id=1, bbox=[1, 1, 9, 9], area=81, iscrowd=0)
    fields |= dict(segmentation=[[1, 1, 10, 1, 10, 10]]) | changes
    content = dict(
        images=[dict(id=1, file_name='a.png', width=40, height=30)],
        categories=[dict(id=1, name='ball')],
        annotations=[{k: v for k, v in fields.items() if v is not None}],
    )
    path = tmp_path / 'val.json'
    path.write_text(json.dumps(content))
    evaluator = dict(type='CocoMetric', ann_file=str(path), metric=metric)
    if sentence is None:
        check_evaluator(evaluator)
    else:
        with pytest.raises(UserError, match=sentence):
            check_evaluator([evaluator])
    check_evaluator(dict(evaluator, format_only=True))


def test_coco_files_lists_wrapped_sets(coco, demo):
    wrapped = dict(type='ConcatDataset', datasets=[coco, dict(type='RepeatDataset', dataset=coco)])
    ann_file, images = coco_files(wrapped, 'mmdet')[1]
    assert ann_file == str(demo.root / 'coco/annotations/instances_train2017.json')
    assert images == str(demo.root / 'coco/train2017') + '/'


def test_real_data_passes(real_data):
    check_dataset(
        dict(
            type='mmdet.CocoDataset',
            data_root=str(real_data / 'coco'),
            ann_file='annotations/instances_val2017.json',
            data_prefix=dict(img='val2017'),
        )
    )
    check_dataset(
        dict(
            type='mmseg.ADE20KDataset',
            data_root=str(real_data / 'ade20k'),
            data_prefix=dict(img_path='images/validation', seg_map_path='annotations/validation'),
        )
    )
