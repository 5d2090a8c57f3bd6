"""Whatever the bytes: checks and loading end in success or in one sentence.

The contract has a second half: what the checks let pass, the libraries load without complaint.
"""

import io
from contextlib import redirect_stdout

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mala_mm.data.annotations import check_rle
from mala_mm.data.checks import check_dataset, check_evaluator
from mala_mm.data.coco import validate_coco
from mala_mm.data.guard import GuardedLoad, guard_pipeline
from mala_mm.data.images import inspect_image
from tests.fuzzing import damaged_bytes, damaged_content, dumps, outcome

pytest.importorskip('mmdet.datasets', reason='needs mmdet')
pytest.importorskip('mmseg.datasets', reason='needs mmseg')
pytest.importorskip('mmpretrain.datasets', reason='needs mmpretrain')

SIDES = (30, 40)  # height, width
POLYGON = [[2, 2, 12, 2, 12, 12, 2, 12], [20.5, 3.0, 25, 3, 22, 9]]
RUNS = dict(size=list(SIDES), counts=[100, 300, 800])
CONTENT = dict(
    images=[dict(id=i, file_name=f'{i}.png', height=SIDES[0], width=SIDES[1]) for i in (1, 2)],
    categories=[dict(id=3, name='ball'), dict(id=5, name='box')],
    annotations=[
        dict(
            *[dict(id=i, image_id=1 + i % 2, category_id=3 + 2 * (i % 2), bbox=[2, 2, 10, 10])],
            area=100,
            iscrowd=int(outline is RUNS),
            segmentation=outline,
        )
        for i, outline in enumerate([POLYGON, RUNS, POLYGON[:1]])
    ],
)


@pytest.fixture(scope='module')
def coco(tmp_path_factory):
    """A data set of two images, whose annotation file is written anew for each case."""
    root = tmp_path_factory.mktemp('coco')
    for image in CONTENT['images']:
        Image.new('RGB', SIDES[::-1]).save(root / image['file_name'])
    return root


def load_all(cfg):
    """All samples, as training loads them."""
    from mmengine.registry import DATASETS

    dataset = DATASETS.build(cfg)
    guard_pipeline(dataset)
    return [dataset[i] for i in range(len(dataset))]


def dataset_cfg(root):
    return dict(
        type='mmdet.CocoDataset',
        serialize_data=False,
        data_root=f'{root}/',
        ann_file='annotations.json',
        data_prefix=dict(img=''),
        metainfo=dict(classes=('ball', 'box')),
        pipeline=[
            dict(type='mmdet.LoadImageFromFile'),
            dict(type='mmdet.LoadAnnotations', with_bbox=True, with_mask=True),
            dict(type='mmdet.PackDetInputs', meta_keys=('img_id',)),
        ],
    )


def hold_contract(root, data):
    path = root / 'annotations.json'
    path.write_bytes(data)
    findings = outcome(validate_coco, path, root)
    for finding in findings or ():
        str(finding).encode()
        assert '\n' not in str(finding)
    cfg = dataset_cfg(root)
    accepted = outcome(lambda: check_dataset(cfg, 'mmdet') or True)
    metric = dict(type='CocoMetric', ann_file=str(path), metric=['bbox', 'segm'])
    evaluated = outcome(lambda: check_evaluator(metric) or True)
    if accepted:
        assert findings is not None
        for sample in outcome(load_all, cfg) or ():
            for instances in ('gt_instances', 'ignored_instances'):
                found = sample['data_samples'].get(instances)
                assert found.bboxes.tensor.isfinite().all()
                assert len(found.masks) == len(found.bboxes)
    if evaluated:
        evaluate(path)


def evaluate(path):
    """What CocoMetric does with its annotation file."""
    from mmdet.datasets.api_wrappers import COCO, COCOeval
    from pycocotools import mask

    with redirect_stdout(io.StringIO()):
        truth = COCO(str(path))
        if not truth.imgs or not truth.cats:
            return
        prediction = dict(
            image_id=min(truth.imgs),
            category_id=min(truth.cats),
            score=0.5,
            bbox=[1, 1, 9, 9],
            segmentation=mask.encode(np.ones(SIDES, np.uint8, 'F')),
        )
        for kind in ('bbox', 'segm'):
            entry = dict(prediction)
            if kind == 'segm':
                del entry['bbox']
            evaluation = COCOeval(truth, truth.loadRes([entry]), kind)
            evaluation.evaluate()
            evaluation.accumulate()


@given(content=damaged_content(CONTENT))
def test_fuzz_annotations(coco, content):
    hold_contract(coco, dumps(content))


@given(data=damaged_bytes(dumps(CONTENT)))
def test_fuzz_annotation_bytes(coco, data):
    hold_contract(coco, data)


@given(
    size=st.lists(st.integers(-1, 40), max_size=3),
    counts=st.one_of(
        st.text(st.characters(min_codepoint=44, max_codepoint=115), max_size=8),
        st.lists(st.one_of(st.integers(-2, 40), st.floats()), max_size=6),
    ),
)
def test_fuzz_run_lengths(size, counts):
    """What passes, pycocotools decodes to as many pixels."""
    from pycocotools import mask

    outline = dict(size=size, counts=counts)
    if check_rle(outline, None) is None:
        if isinstance(counts, list):
            outline = mask.frPyObjects(outline, *size)
        assert mask.decode(outline).shape == tuple(size)


def encoded(mode, suffix, **options):
    stream = io.BytesIO()
    noise = Image.effect_noise(SIDES[::-1], 90).convert('RGB')
    noise.convert(mode).save(stream, suffix, **options)
    return stream.getvalue()


EXIF = Image.Exif()
EXIF[0x0112] = 6
PICTURES = [
    encoded('RGB', 'jpeg'),
    encoded('RGB', 'jpeg', progressive=True),
    encoded('RGB', 'jpeg', exif=EXIF),
    encoded('CMYK', 'jpeg'),
    encoded('RGB', 'png'),
    encoded('P', 'png'),
    encoded('I;16', 'png'),
    encoded('RGB', 'bmp'),
    encoded('P', 'gif'),
    encoded('RGB', 'tiff'),
    encoded('RGB', 'webp'),
    encoded('RGB', 'ppm'),
]


@given(data=st.sampled_from(PICTURES).flatmap(damaged_bytes))
def test_fuzz_images(tmp_path_factory, data):
    """What the checker can read, training can, and the other way round."""
    from mmcv.transforms import LoadImageFromFile

    path = tmp_path_factory.getbasetemp() / 'picture.jpg'
    path.write_bytes(data)
    size, remarks = inspect_image(path)
    assert all('\n' not in text for _, text in remarks)
    loaded = outcome(GuardedLoad(LoadImageFromFile(), 'img_path'), dict(img_path=str(path)))
    assert (loaded is None) == (size is None)
    if loaded is not None:
        assert loaded['img_shape'] == size[::-1]


@pytest.fixture(scope='module')
def seg(tmp_path_factory):
    root = tmp_path_factory.mktemp('seg')
    Image.new('RGB', SIDES[::-1]).save(root / 'a.jpg')
    return root


def label_map(mode):
    stream = io.BytesIO()
    labels = np.arange(SIDES[0] * SIDES[1]).reshape(SIDES) % 4
    if mode == 'float':
        Image.fromarray(labels.astype(np.float32)).save(stream, 'tiff')
    else:
        Image.fromarray(labels.astype(mode)).save(stream, 'png')
    return stream.getvalue()


LABEL_MAPS = [label_map('uint8'), label_map('uint16'), label_map('float'), PICTURES[4], PICTURES[5]]


@given(data=st.sampled_from(LABEL_MAPS).flatmap(damaged_bytes))
def test_fuzz_label_maps(seg, data):
    """What passes, mmseg loads to classes and 255."""
    (seg / 'a.png').write_bytes(data)
    cfg = dict(
        type='mmseg.BaseSegDataset',
        serialize_data=False,
        data_root=str(seg),
        data_prefix=dict(img_path='.', seg_map_path='.'),
        metainfo=dict(classes=tuple('abcd')),
        reduce_zero_label=False,
        pipeline=[
            dict(type='mmseg.LoadImageFromFile'),
            dict(type='mmseg.LoadAnnotations'),
            dict(type='mmseg.PackSegInputs', meta_keys=()),
        ],
    )
    accepted = outcome(lambda: check_dataset(cfg, 'mmseg', limit=None) or True)
    samples = outcome(load_all, cfg)
    if accepted:
        (labels,) = (sample['data_samples'].gt_sem_seg.data for sample in samples)
        assert labels.shape == (1, *SIDES)
        assert set(labels.unique().tolist()) <= {0, 1, 2, 3, 255}


@given(data=damaged_bytes(b'a/1.png 0\na/2.png 1\n'))
def test_fuzz_image_lists(tmp_path_factory, data):
    """What passes, mmpretrain loads."""
    root = tmp_path_factory.getbasetemp()
    (root / 'a').mkdir(exist_ok=True)
    for number in (1, 2):
        (root / f'a/{number}.png').write_bytes(PICTURES[4])
    (root / 'list.txt').write_bytes(data)
    cfg = dict(
        type='mmpretrain.CustomDataset',
        serialize_data=False,
        data_root=str(root),
        ann_file='list.txt',
        metainfo=dict(classes=('ball', 'box')),
        pipeline=[dict(type='LoadImageFromFile'), dict(type='mmpretrain.PackInputs')],
    )
    if outcome(lambda: check_dataset(cfg, 'mmpretrain', limit=None) or True):
        for sample in load_all(cfg):
            assert 0 <= int(sample['data_samples'].gt_label) < 2
