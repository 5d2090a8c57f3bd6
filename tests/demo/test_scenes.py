"""Scenes: deterministic, consistent with their annotations, and as varied as they claim."""

import numpy as np
import pytest

from mala_mm.demo import SCENE_CLASSES, SCENE_PALETTE, STUFF_CLASSES, THING_CLASSES, THING_PALETTE
from mala_mm.demo.scenes import MIN_AREA, SceneConfig, make_portrait, make_scene
from mala_mm.demo.shapes import SPRITES, sprite
from mala_mm.errors import UserError


@pytest.fixture(scope='module')
def scenes():
    """Forty scenes of the default configuration."""
    return [make_scene(SceneConfig(), 0, 'train', index) for index in range(40)]


def test_classes_have_one_colour_each():
    assert len(THING_PALETTE) == len(THING_CLASSES)
    assert len(set(SCENE_PALETTE)) == len(SCENE_CLASSES) == len(SCENE_PALETTE)
    # The folder order of the ImageNet layout is alphabetical.
    assert list(THING_CLASSES) == sorted(THING_CLASSES)
    assert set(SPRITES) == {*THING_CLASSES, 'rock'}


def test_same_seed_same_scene():
    config = SceneConfig(sides=(96, 160))
    first, second = (make_scene(config, 7, 'train', 5) for _ in range(2))
    assert np.array_equal(first.image, second.image)
    assert np.array_equal(first.labels, second.labels)
    assert len(first.instances) == len(second.instances)
    for a, b in zip(first.instances, second.instances, strict=True):
        assert a.label == b.label and np.array_equal(a.mask, b.mask)


def test_seed_split_and_index_each_change_the_scene():
    config = SceneConfig(sides=(64, 64))
    keys = [(0, 'train', 0), (1, 'train', 0), (0, 'val', 0), (0, 'train', 1), (0, 'val', 1)]
    images = {make_scene(config, *key).image.tobytes() for key in keys}
    assert len(images) == len(keys)


def test_labels_agree_with_masks_and_boxes(scenes):
    offset = len(STUFF_CLASSES) + 1
    for scene in scenes:
        assert scene.image.dtype == scene.labels.dtype == np.uint8
        assert scene.image.shape == (*scene.labels.shape, 3)
        assert scene.labels.max() <= len(SCENE_CLASSES)
        claimed = np.zeros(scene.labels.shape, int)
        for instance in scene.instances:
            claimed += instance.mask
            assert (scene.labels[instance.mask] == offset + instance.label).all()
            x, y, w, h = instance.box
            inner = instance.mask[y : y + h, x : x + w]
            assert inner.sum() == instance.area >= MIN_AREA
            # tight: each side of the box touches the mask
            assert inner[0].any() and inner[-1].any() and inner[:, 0].any() and inner[:, -1].any()
        assert claimed.max(initial=0) <= 1  # masks are disjoint
        assert np.array_equal(claimed == 1, scene.labels >= offset)


def test_occlusion_is_flagged_and_limited(scenes):
    config = SceneConfig()
    occluded = 0
    for instance in (i for scene in scenes for i in scene.instances):
        full = instance.cover >= 0.5
        assert not (instance.mask & ~full).any()
        assert instance.occluded == (instance.area < full.sum())
        assert instance.area >= config.min_visible * full.sum()
        occluded += instance.occluded
    assert occluded > 20


def test_default_set_is_varied(scenes):
    instances = [i for scene in scenes for i in scene.instances]
    areas = np.array([i.area for i in instances if not i.crowd])
    # COCO's small, medium and large
    assert (areas < 32**2).any() and (areas > 96**2).any()
    assert ((areas >= 32**2) & (areas <= 96**2)).any()
    assert any(i.crowd for i in instances)
    assert any(not scene.instances for scene in scenes)
    assert {i.label for i in instances} == set(range(len(THING_CLASSES)))
    assert {int(v) for scene in scenes for v in np.unique(scene.labels)} == set(
        range(len(SCENE_CLASSES) + 1)
    )
    shapes = {scene.labels.shape for scene in scenes}
    assert len(shapes) > 30 and any(h % 2 for h, _ in shapes) and any(w % 32 for _, w in shapes)
    assert all(224 <= side <= 384 for shape in shapes for side in shape)


def test_knobs_make_it_easy():
    config = SceneConfig(
        sides=(128, 128),
        objects=(1, 3),
        object_size=(0.3, 0.6),
        thing_classes=('tree', 'car'),
        overlap=0,
        truncation=0,
        crowd=0,
        empty=0,
        clutter=0,
    )
    assert config.scene_classes == (*STUFF_CLASSES, 'tree', 'car')
    labels = set()
    for index in range(20):
        scene = make_scene(config, 0, 'val', index)
        assert scene.image.shape == (128, 128, 3)
        assert scene.labels.min() > 0
        assert 1 <= len(scene.instances) <= 3
        assert not any(i.occluded or i.crowd for i in scene.instances)
        labels |= {i.label for i in scene.instances}
    assert labels == {0, 1}


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(sides=(256,)), 'sides must be two numbers'),
        (dict(sides=(300, 200)), r'got \(300, 200\)'),
        (dict(objects=(0, 3)), 'objects'),
        (dict(object_size=(0.1, 2)), 'object_size'),
        (dict(crowd=1.5), 'crowd must lie in 0..1, got 1.5'),
        (dict(clutter=-1), 'clutter'),
        (dict(thing_classes=('ball', 'cat')), "got \\('ball', 'cat'\\)"),
        (dict(thing_classes=('ball', 'ball')), 'distinct'),
        (dict(thing_classes=()), 'thing_classes'),
    ],
)
def test_bad_config_names_the_value(options, message):
    with pytest.raises(UserError, match=message):
        SceneConfig(**options)


def test_bad_split_or_index():
    with pytest.raises(UserError, match="got 'test'"):
        make_scene(SceneConfig(), 0, 'test', 0)
    with pytest.raises(UserError, match='negative'):
        make_scene(SceneConfig(), 0, 'val', -1)


@pytest.mark.parametrize('name', SPRITES)
@pytest.mark.parametrize('size', [6, 61])
def test_sprites_fit_their_size(name, size):
    for seed in range(4):
        rgba = sprite(np.random.default_rng(seed), name, size, 1.0)
        # A square may be rotated, so its extent grows by at most sqrt(2); one pixel of border.
        assert 0.35 * size < max(rgba.shape[:2]) <= 1.42 * size + 2
        assert rgba.min() >= 0 and rgba.max() <= 1
        assert rgba[..., 3].max() > 0.9
        assert rgba[[0, -1], :, 3].max() > 0 and rgba[:, [0, -1], 3].max() > 0


def test_light_comes_from_its_side():
    brighter = 0
    for seed in range(10):
        left, right = (
            sprite(np.random.default_rng(seed), 'ring', 60, light)[..., :3].sum((0, 2))
            for light in (-1.0, 1.0)
        )
        half = len(left) // 2
        brighter += (
            left[:half].sum() > right[:half].sum() and left[half:].sum() < right[half:].sum()
        )
    assert brighter == 10


def test_portraits_hold_one_object_and_differ_from_scenes():
    config = SceneConfig(sides=(96, 128), clutter=0)
    first = make_portrait(config, 0, 'train', 0, 'star')
    assert first.dtype == np.uint8 and first.shape[0] == first.shape[1] <= 128
    assert np.array_equal(first, make_portrait(config, 0, 'train', 0, 'star'))
    assert not np.array_equal(first, make_portrait(config, 0, 'val', 0, 'star'))
