"""The written data sets: complete, reproducible, and read alike by the libraries that use them."""

import contextlib
import hashlib
import io
import json

import cv2
import numpy as np
import pytest

from mala_mm.demo import SCENE_CLASSES, THING_CLASSES, writers
from mala_mm.demo.scenes import SceneConfig, make_scene
from mala_mm.demo.writers import MARK, polygon, rle, write_demo_data
from mala_mm.errors import UserError

TINY = SceneConfig(sides=(48, 64), objects=(1, 3), object_size=(0.2, 0.5))


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob('*'))
        if path.is_file()
    }


def coco_api(path):
    from pycocotools.coco import COCO

    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(str(path))


def annotations(demo, split):
    """(scene, [annotation, ...]) for each image of the COCO layout."""
    api = coco_api(demo.root / f'coco/annotations/instances_{split}2017.json')
    for index, image in enumerate(api.loadImgs(sorted(api.getImgIds()))):
        anns = api.loadAnns(api.getAnnIds(image['id']))
        yield demo.scene(split, index), image, anns, api


def test_same_seed_same_bytes(tmp_path):
    layouts = ('coco', 'ade', 'imagenet')
    for name in ('one', 'two'):
        write_demo_data(tmp_path / name, layouts, dict(train=3, val=2), TINY, seed=5)
    one = digests(tmp_path / 'one')
    assert one == digests(tmp_path / 'two')
    write_demo_data(tmp_path / 'three', layouts, dict(train=3, val=2), TINY, seed=6)
    three = digests(tmp_path / 'three')
    files = [name for name in one if name.endswith('.jpg') and not name.startswith('imagenet')]
    assert files and not any(one[name] == three[name] for name in files)


def test_count_does_not_change_an_image(tmp_path):
    for name, train in (('few', 2), ('many', 4)):
        write_demo_data(tmp_path / name, ('coco', 'ade'), dict(train=train, val=2), TINY)
    few, many = digests(tmp_path / 'few'), digests(tmp_path / 'many')
    files = [name for name in few if name.endswith(('.jpg', '.png'))]
    assert len(files) == 3 * (2 + 2)  # two jpegs and a label map for each image
    assert all(few[name] == many[name] for name in files)
    val = 'coco/annotations/instances_val2017.json'
    assert few[val] == many[val]


def test_splits_share_no_image(demo):
    for layout in ('coco', 'imagenet'):
        files = [p for p in (demo.root / layout).rglob('*.jpg')]
        assert len(files) == sum(demo.counts.values())
        assert len({p.read_bytes() for p in files}) == len(files)


def same_but_border(decoded, mask):
    """A polygon may round the pixels on its outline either way, and no others."""
    kernel = np.ones((3, 3), np.uint8)
    border = cv2.dilate(mask.astype(np.uint8), kernel) != cv2.erode(mask.astype(np.uint8), kernel)
    return not ((decoded != mask) & ~border).any()


@pytest.mark.parametrize('split', ['train', 'val'])
def test_coco_annotations_are_the_scenes(demo, split):
    mask_utils = pytest.importorskip('pycocotools.mask')
    images = crowds = empty = polygons = rgb = bgr = 0
    for scene, image, anns, api in annotations(demo, split):
        images += 1
        height, width = scene.labels.shape
        assert (image['height'], image['width']) == (height, width)
        read = cv2.imread(str(demo.root / f'coco/{split}2017' / image['file_name']))
        assert read.shape == (height, width, 3)
        rgb += np.abs(read[..., ::-1].astype(int) - scene.image).mean()
        bgr += np.abs(read.astype(int) - scene.image).mean()
        assert len(anns) == len(scene.instances)
        empty += not anns
        for ann, instance in zip(anns, scene.instances, strict=True):
            assert api.cats[ann['category_id']]['name'] == THING_CLASSES[instance.label]
            assert ann['iscrowd'] == instance.crowd
            assert ann['area'] == instance.area and tuple(ann['bbox']) == instance.box
            decoded = api.annToMask(ann).astype(bool)
            if isinstance(ann['segmentation'], dict):
                assert np.array_equal(decoded, instance.mask)
                assert tuple(mask_utils.toBbox(api.annToRLE(ann))) == instance.box
            else:
                polygons += 1
                assert not instance.crowd and not instance.occluded
                assert same_but_border(decoded, instance.mask)
            crowds += ann['iscrowd']
    assert images == demo.counts[split]
    assert crowds and empty and polygons
    assert rgb < bgr / 2  # the channels are in order


def test_coco_ids_are_unique_over_both_splits(demo):
    contents = [
        json.loads((demo.root / f'coco/annotations/instances_{split}2017.json').read_text())
        for split in ('train', 'val')
    ]
    for key in ('images', 'annotations'):
        ids = [entry['id'] for content in contents for entry in content[key]]
        assert len(ids) == len(set(ids))
    assert set(contents[0]) == {'info', 'licenses', 'images', 'annotations', 'categories'}
    assert [c['name'] for c in contents[1]['categories']] == list(THING_CLASSES)


def test_rle_is_cocos():
    mask_utils = pytest.importorskip('pycocotools.mask')
    rng = np.random.default_rng(0)
    masks = [np.zeros((3, 5), bool), np.ones((4, 2), bool)]
    masks += [rng.random((7, 9)) < p for p in (0.1, 0.5, 0.9)]
    for mask in masks:
        decoded = mask_utils.decode(json.loads(json.dumps(rle(mask))))
        assert np.array_equal(decoded.astype(bool), mask)


def test_polygon_of_a_rectangle_follows_its_pixels():
    cover = np.zeros((10, 12), np.float32)
    cover[0:4, 3:8] = 1  # touches the upper edge
    outline = np.reshape(polygon(cover), (-1, 2))
    assert outline.min(0).tolist() == [3, 0] and outline.max(0).tolist() == [8, 4]
    cover[1:3, 5] = 0
    assert polygon(cover) is None  # a hole
    assert polygon(np.zeros((4, 4), np.float32)) is None


def test_ade_layout(demo):
    rows = (demo.root / 'ade/objectInfo.txt').read_text().splitlines()
    table = [row.split('\t') for row in rows[1:]]
    assert [row[-1] for row in table] == list(SCENE_CLASSES)
    assert abs(sum(float(row[1]) for row in table) - 1) < 1e-4 * len(table)  # four decimals each
    for split, folder in (('train', 'training'), ('val', 'validation')):
        files = sorted((demo.root / 'ade/images' / folder).glob('*.jpg'))
        maps = sorted((demo.root / 'ade/annotations' / folder).glob('*.png'))
        assert [p.stem for p in files] == [m.stem for m in maps]
        present = np.zeros(len(SCENE_CLASSES) + 1, int)
        for index, path in enumerate(maps):
            labels = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
            assert np.array_equal(labels, demo.scene(split, index).labels)
            present[np.unique(labels)] += 1
        column = 2 if split == 'train' else 3
        assert [int(row[column]) for row in table] == present[1:].tolist()


def test_imagenet_layout(demo):
    for split, count in demo.counts.items():
        folders = sorted((demo.root / 'imagenet' / split).iterdir())
        assert [f.name for f in folders] == list(THING_CLASSES)
        for folder in folders:
            assert len(list(folder.glob('*.jpg'))) == count // len(THING_CLASSES)


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    def fail(config, seed, split, index):
        if index == 1:
            raise RuntimeError('disk full')
        return make_scene(config, seed, split, index)

    monkeypatch.setattr(writers, 'make_scene', fail)
    with pytest.raises(RuntimeError, match='disk full'):
        write_demo_data(tmp_path / 'out', ('coco',), dict(train=2, val=1), TINY)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_overwrite_keeps_the_old(tmp_path, monkeypatch):
    out = write_demo_data(tmp_path / 'out', ('coco',), dict(train=1, val=1), TINY)
    before = digests(out)

    def fail(*args):
        raise RuntimeError('disk full')

    monkeypatch.setattr(writers, 'make_scene', fail)
    with pytest.raises(RuntimeError, match='disk full'):
        write_demo_data(out, ('coco',), dict(train=2, val=1), TINY, overwrite=True)
    assert digests(out) == before and [p.name for p in tmp_path.iterdir()] == ['out']


def test_overwrite_replaces_only_its_own(tmp_path):
    counts = dict(train=1, val=1)
    out = write_demo_data(tmp_path / 'out', ('coco', 'ade'), counts, TINY)
    with pytest.raises(UserError, match='not empty.*--overwrite'):
        write_demo_data(out, ('coco',), counts, TINY)
    write_demo_data(out, ('coco',), counts, TINY, overwrite=True)
    assert not (out / 'ade').exists()
    assert json.loads((out / MARK).read_text())['layouts'] == ['coco']
    foreign = tmp_path / 'data'
    foreign.mkdir()
    (foreign / 'precious.txt').write_text('mine')
    with pytest.raises(UserError, match='not written by this tool'):
        write_demo_data(foreign, ('coco',), counts, TINY, overwrite=True)
    with pytest.raises(UserError, match='is a file'):
        write_demo_data(foreign / 'precious.txt', ('coco',), counts, TINY)
    assert (foreign / 'precious.txt').read_text() == 'mine'


def test_bad_arguments(tmp_path):
    with pytest.raises(UserError, match="got \\['voc'\\]"):
        write_demo_data(tmp_path / 'out', ('voc',))
    with pytest.raises(UserError, match="'val': 0"):
        write_demo_data(tmp_path / 'out', counts=dict(train=1, val=0))
    assert list(tmp_path.iterdir()) == []


def test_mmdet_reads_it(demo):
    datasets = pytest.importorskip('mmdet.datasets', reason='needs mmdet')
    from mmdet.utils import register_all_modules

    register_all_modules(init_default_scope=True)
    pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    ]
    options = dict(
        data_root=str(demo.root / 'coco'),
        ann_file='annotations/instances_train2017.json',
        data_prefix=dict(img='train2017'),
        metainfo=dict(classes=THING_CLASSES),
        pipeline=pipeline,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        dataset = datasets.CocoDataset(**options, test_mode=True)
        filtered = datasets.CocoDataset(**options, filter_cfg=dict(filter_empty_gt=True))
        subset = dict(classes=THING_CLASSES[:2], subset=True)  # see check_dataset
        few = datasets.CocoDataset(**{**options, 'metainfo': subset}, test_mode=True)
    assert len(dataset) == demo.counts['train'] > len(filtered) > 0
    labels = {i['bbox_label'] for n in range(len(few)) for i in few.get_data_info(n)['instances']}
    assert labels == {0, 1}
    crowds = 0
    for index in range(len(dataset)):
        item, scene = dataset[index], demo.scene('train', index)
        expected = scene.instances
        assert item['img'].shape == scene.image.shape
        assert item['gt_bboxes_labels'].tolist() == [i.label for i in expected]
        assert item['gt_ignore_flags'].tolist() == [i.crowd for i in expected]
        crowds += item['gt_ignore_flags'].sum()
        for mask, instance in zip(item['gt_masks'].masks, expected, strict=True):
            assert same_but_border(mask.astype(bool), instance.mask)
    assert crowds


def test_mmseg_reads_it(demo):
    datasets = pytest.importorskip('mmseg.datasets', reason='needs mmseg')
    from mmseg.utils import register_all_modules

    register_all_modules(init_default_scope=True)
    dataset = datasets.ADE20KDataset(
        data_root=str(demo.root / 'ade'),
        data_prefix=dict(img_path='images/training', seg_map_path='annotations/training'),
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations', reduce_zero_label=True),
        ],
    )
    assert len(dataset) == demo.counts['train']
    for index in range(len(dataset)):
        item, scene = dataset[index], demo.scene('train', index)
        # 0 becomes the ignored label 255, classes begin at 0
        assert np.array_equal(item['gt_seg_map'], scene.labels - np.uint8(1))


def test_mmpretrain_reads_it(demo):
    datasets = pytest.importorskip('mmpretrain.datasets', reason='needs mmpretrain')
    dataset = datasets.ImageNet(
        data_root=str(demo.root / 'imagenet'), split='val', metainfo=dict(classes=THING_CLASSES)
    )
    assert len(dataset) == demo.counts['val']
    for index in range(len(dataset)):
        info = dataset.get_data_info(index)
        assert f'/{THING_CLASSES[info["gt_label"]]}/' in info['img_path']
