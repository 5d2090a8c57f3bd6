"""validate_coco finds each planted fault, and none in good files."""

import json

import pytest
from PIL import Image

from mala_mm.data.checks import validate_coco
from mala_mm.errors import UserError

SQUARE = [2, 2, 12, 2, 12, 12, 2, 12]


def annotation(**changes):
    base = dict(id=1, image_id=1, category_id=1, bbox=[2, 2, 10, 10], area=100, iscrowd=0)
    return {**base, 'segmentation': [SQUARE], **changes}


def findings(tmp_path, annotations=(), images=None, categories=None, image_dir=None):
    """Kinds and places of what is found in a file with one image of 40x30 and one category."""
    content = dict(
        images=images or [dict(id=1, file_name='a.png', width=40, height=30)],
        categories=categories or [dict(id=1, name='ball')],
        annotations=list(annotations),
    )
    path = tmp_path / 'annotations.json'
    path.write_text(json.dumps(content))
    return [(finding.kind, finding.where) for finding in validate_coco(path, image_dir)]


def test_generated_files_are_clean(demo):
    for split in ('train', 'val'):
        path = demo.root / f'coco/annotations/instances_{split}2017.json'
        assert validate_coco(path, demo.root / f'coco/{split}2017') == []


def test_real_files_are_clean(real_data):
    for split in ('train', 'val'):
        path = real_data / f'coco/annotations/instances_{split}2017.json'
        assert validate_coco(path, real_data / f'coco/{split}2017') == []


@pytest.mark.parametrize(
    ('changes', 'kind'),
    [
        (dict(), None),
        (dict(segmentation=[]), None),  # boxes alone
        (dict(bbox=[-0.5, 0, 40.9, 30.9]), None),  # rounding
        (dict(area=0), 'zero-area'),
        (dict(bbox=[2, 2, 0, 10]), 'zero-area'),
        (dict(bbox=[2, 2, 10, 0]), 'zero-area'),
        (dict(bbox=[2, 2, 10, float('nan')]), 'zero-area'),
        (dict(bbox=[35, 2, 10, 10]), 'out-of-bounds'),
        (dict(bbox=[-3, 2, 10, 10]), 'out-of-bounds'),
        (dict(segmentation=[[2, 2, 50, 2, 50, 12]]), 'out-of-bounds'),
        (dict(image_id=7), 'unknown-image'),
        (dict(category_id=7), 'unknown-category'),
        (dict(iscrowd=1), 'crowd-without-rle'),
        (dict(iscrowd=1, segmentation=[]), 'crowd-without-rle'),
        (dict(iscrowd=1, segmentation=dict(counts=[100, 1100], size=[30, 40])), None),
        (dict(segmentation=dict(counts=[100, 1100], size=[40, 30])), 'bad-rle'),
        (dict(segmentation=dict(counts=[100, 1000], size=[30, 40])), 'bad-rle'),
        (dict(segmentation=dict(counts=[1200])), 'bad-rle'),
        (dict(segmentation=[[2, 2, 12, 2]]), 'degenerate-polygon'),
        (dict(segmentation=[SQUARE, [2, 2, 12, 2, 12, 12, 2]]), 'degenerate-polygon'),
        (dict(segmentation=[[2, 2, 7, 2, 12, 2]]), 'degenerate-polygon'),
        (dict(segmentation=[[2, 2, 12, None, 12, 12]]), 'degenerate-polygon'),
    ],
)
def test_annotation_faults(tmp_path, changes, kind):
    expected = [(kind, 'annotation 1')] if kind else []
    assert findings(tmp_path, [annotation(**changes)]) == expected


def test_missing_fields(tmp_path):
    incomplete = annotation()
    del incomplete['area']
    assert findings(tmp_path, [incomplete]) == [('missing-field', 'annotation 1')]
    assert findings(tmp_path, [dict(area=1)]) == [('missing-field', 'annotations[0]')]
    assert findings(tmp_path, images=[dict(id=1, file_name='a.png')]) == [
        ('missing-field', 'image 1')
    ]
    assert findings(tmp_path, categories=[dict(name='ball')]) == [
        ('missing-field', 'categories[0]')
    ]


def test_duplicate_ids(tmp_path):
    image, category = dict(id=1, file_name='a', width=40, height=30), dict(id=1, name='ball')
    found = findings(tmp_path, [annotation(), annotation()], [image] * 2, [category] * 2)
    assert found == [
        ('duplicate-id', 'image 1'),
        ('duplicate-id', 'category 1'),
        ('duplicate-id', 'annotation 1'),
    ]


def test_images(tmp_path):
    folder = tmp_path / 'images'
    folder.mkdir()
    Image.new('RGB', (40, 30)).save(folder / 'a.png')
    Image.new('RGB', (30, 40)).save(folder / 'b.png')
    (folder / 'c.png').write_bytes(b'no image')
    images = [
        dict(id=i, file_name=f'{name}.png', width=40, height=30) for i, name in enumerate('abcd', 1)
    ]
    assert findings(tmp_path, images=images, image_dir=folder) == [
        ('wrong-size', 'image 2'),
        ('unreadable-image', 'image 3'),
        ('missing-image', 'image 4'),
    ]
    with pytest.raises(UserError, match='nowhere does not exist'):
        findings(tmp_path, image_dir=tmp_path / 'nowhere')
