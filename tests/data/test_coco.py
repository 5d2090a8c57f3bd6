"""validate_coco finds each planted fault, and none in good files."""

import gc
import json

import numpy as np
import pytest
from PIL import Image

from mala_mm.data.annotations import check_rle, decode_counts
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
        (dict(bbox=[2, 2, 10, float('nan')]), 'wrong-type'),
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
        (dict(segmentation=[[2, 2, 12, 2]]), 'short-polygon'),
        (dict(segmentation=[SQUARE, [2, 2, 12, 2, 12, 12, 2]]), 'degenerate-polygon'),
        (dict(segmentation=[[2, 2, 7, 2, 12, 2]]), 'degenerate-polygon'),
        (dict(segmentation=[[2, 2, 12, None, 12, 12]]), 'bad-polygon'),
        (dict(segmentation=[[2, 2, 12, float('nan'), 12, 12]]), 'bad-polygon'),
        (dict(segmentation=[SQUARE, 7]), 'bad-polygon'),
        (dict(segmentation=[[0, 0, 400, 0, 400, 20]]), 'far-out-of-bounds'),
        (dict(bbox=[1e300, 2, 10, 10]), 'far-out-of-bounds'),
        (dict(segmentation='polygon'), 'wrong-type'),
        (dict(segmentation=dict(counts='PP', size=[30, 40])), 'bad-rle'),  # 32 pixels, no end
        (dict(segmentation=dict(counts='junk~', size=[30, 40])), 'bad-rle'),
        (dict(segmentation=dict(counts=['a'], size=[30, 40])), 'bad-rle'),
        (dict(segmentation=dict(counts=[1300, -100], size=[30, 40])), 'bad-rle'),
        (dict(segmentation=dict(counts=[1200], size='30x40')), 'bad-rle'),
        (dict(id='1'), 'wrong-type'),
        (dict(image_id=True), 'wrong-type'),
        (dict(image_id=10**30), 'wrong-type'),
        (dict(category_id=[1]), 'wrong-type'),
        (dict(area='100'), 'wrong-type'),
        (dict(iscrowd='no'), 'wrong-type'),
        (dict(bbox=[2, 2, 10]), 'wrong-type'),
        (dict(bbox=[2, 2, 10, 10**400]), 'wrong-type'),
    ],
)
def test_annotation_faults(tmp_path, changes, kind):
    where = 'annotations[0]' if changes.get('id') == '1' else 'annotation 1'
    expected = [(kind, where)] if kind else []
    assert findings(tmp_path, [annotation(**changes)]) == expected


@pytest.mark.parametrize(
    ('changes', 'kind'),
    [
        (dict(width='130'), 'wrong-type'),
        (dict(width=0), 'wrong-type'),
        (dict(height=30.0), 'wrong-type'),
        (dict(width=2**20, height=2**20), 'bad-size'),
        (dict(width=2**15, height=2**15 + 1), 'bad-size'),  # OpenCV decodes up to 2^30 pixels
        (dict(file_name=7), 'wrong-type'),
        (dict(file_name='a\0.png'), 'wrong-type'),
        (dict(file_name='\ud800.png'), 'wrong-type'),
        (dict(file_name=''), 'wrong-type'),
    ],
)
def test_image_faults(tmp_path, changes, kind):
    image = dict(dict(id=1, file_name='a.png', width=40, height=30), **changes)
    box = annotation(segmentation=[])
    assert findings(tmp_path, [box], images=[image]) == [(kind, 'image 1')]


def test_entries_that_are_none(tmp_path):
    found = findings(tmp_path, [annotation(), 7], images=[[1]], categories=['ball'])
    assert found == [
        ('wrong-type', 'images[0]'),
        ('wrong-type', 'categories[0]'),
        ('unknown-image', 'annotation 1'),
        ('unknown-category', 'annotation 1'),
        ('wrong-type', 'annotations[1]'),
        ('missing-segmentation', 'annotations[1]'),
    ]


def test_outlines_of_some(tmp_path):
    bare = annotation(id=2)
    del bare['segmentation']
    assert findings(tmp_path, [annotation(), bare]) == [('missing-segmentation', 'annotations[1]')]
    assert findings(tmp_path, [bare]) == []


def test_compressed_counts(demo):
    """Equal to what pycocotools reads, for what pycocotools wrote."""
    from pycocotools import mask

    random = np.random.default_rng(0)
    for sides in [(1, 1), (7, 9), (300, 400)]:
        for density in (0.0, 0.02, 0.5, 1.0):
            picture = np.asfortranarray(random.random(sides) < density, dtype=np.uint8)
            text = mask.encode(picture)['counts'].decode()
            edges = np.flatnonzero(np.diff(picture.ravel('F'), prepend=0, append=2))
            runs = np.diff(edges, prepend=0)
            assert decode_counts(text) == runs.tolist()
            assert check_rle(dict(size=list(sides), counts=text), sides) is None
            if len(text) > 1:
                assert check_rle(dict(size=list(sides), counts=text[:-1]), sides)


def test_missing_fields(tmp_path):
    incomplete = annotation()
    del incomplete['area']
    assert findings(tmp_path, [incomplete]) == [('missing-field', 'annotation 1')]
    assert findings(tmp_path, [dict(area=1)]) == [('missing-field', 'annotations[0]')]
    assert ('missing-field', 'image 1') in findings(
        tmp_path, [annotation()], images=[dict(id=1, file_name='a.png')]
    )
    assert ('missing-field', 'categories[0]') in findings(
        tmp_path, [annotation()], categories=[dict(name='ball')]
    )


def test_duplicate_ids(tmp_path):
    image, category = dict(id=1, file_name='a', width=40, height=30), dict(id=1, name='ball')
    found = findings(tmp_path, [annotation(), annotation()], [image] * 2, [category] * 2)
    assert found == [
        ('duplicate-id', 'image 1'),
        ('duplicate-id', 'category 1'),
        ('duplicate-name', 'categories[1]'),
        ('duplicate-id', 'annotation 1'),
    ]


def test_images(tmp_path):
    folder = tmp_path / 'images'
    folder.mkdir()
    picture = Image.effect_noise((40, 30), 90)
    rgb, turned = picture.convert('RGB'), Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    rgb.save(folder / '1.png')
    Image.new('RGB', (30, 40)).save(folder / '2.png')
    (folder / '3.png').write_bytes(b'no image')
    (folder / '5.jpg').write_bytes(b'')
    rgb.save(folder / 'whole.jpg')
    (folder / '6.jpg').write_bytes((folder / 'whole.jpg').read_bytes()[:-300])
    (folder / '7.png').write_bytes((folder / '1.png').read_bytes()[:-300])
    rgb.save(folder / '8.jpg', exif=turned)
    rgb.rotate(90, expand=True).save(folder / '9.jpg', exif=turned)
    rgb.convert('P').save(folder / '10.png')
    rgb.convert('CMYK').save(folder / '11.jpg')
    picture.convert('I;16').save(folder / '12.png')
    picture.save(folder / '13.png')  # grayscale
    images = [
        dict(
            id=i, file_name=f'{i}.{"jpg" if i in (5, 6, 8, 9, 11) else "png"}', width=40, height=30
        )
        for i in range(1, 14)
    ]
    assert findings(tmp_path, [annotation()], images=images, image_dir=folder) == [
        ('wrong-size', 'image 2'),
        ('unreadable-image', 'image 3'),
        ('missing-image', 'image 4'),
        ('unreadable-image', 'image 5'),
        ('unreadable-image', 'image 6'),
        ('unreadable-image', 'image 7'),
        ('exif-rotated', 'image 8'),
        ('wrong-size', 'image 8'),  # 30x40 once turned
        ('exif-rotated', 'image 9'),
        ('unusual-mode', 'image 10'),
        ('unusual-mode', 'image 11'),
        ('unusual-mode', 'image 12'),
    ]
    with pytest.raises(UserError, match='nowhere does not exist'):
        findings(tmp_path, image_dir=tmp_path / 'nowhere')


@pytest.mark.parametrize('enabled', [True, False])
def test_the_garbage_collector_stays_as_it_was(tmp_path, enabled):
    """Checks of large files do without it, also where they end in an error."""
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        assert findings(tmp_path, [annotation()]) == []
        with pytest.raises(UserError):
            validate_coco(__file__)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_compressed_counts_do_not_grow_without_end():
    """Each `o` says that another group of bits follows."""
    assert decode_counts('oooooo0') is not None
    assert decode_counts('ooooooo0') is None
