"""What is recorded of a model, and how places in it and in the image are found."""

import cv2
import numpy as np
import pytest
import torch

from mala_mm.analysis.inside import (
    attn_types_of,
    find_images,
    load_model,
    preprocess,
    read_image,
    record,
)
from mala_mm.errors import UserError
from mala_mm.ops.registry import merge_heads


def test_the_layers_are_those_of_the_model(seen):
    places = [(layer.stage, layer.block, layer.operator.name) for layer in seen.layers]
    linear = [(1, 1, 'mala'), (1, 2, 'mala'), (2, 1, 'mala')]
    assert places == [*linear, (3, 1, 'softmax'), (4, 1, 'softmax')]
    assert [layer.size for layer in seen.layers] == [(16, 24)] * 2 + [(8, 12), (4, 6), (2, 3)]
    assert seen.prediction.pred_score.shape == (3,)


def test_queries_keys_and_values_are_what_the_layer_computes_with(model, seen):
    """Attention, local position and gate on them are what reaches the projection."""
    layer = seen.choose(1, 2)[0]
    mixer = dict(model.named_modules())[layer.name]
    gates = []
    hook = mixer.qkvo.register_forward_hook(lambda *args: gates.append(args[-1].chunk(4, 1)[3]))
    with torch.no_grad():
        model.backbone(preprocess(model, seen.image)['inputs'])
        hook.remove()
        y = layer.operator.equations(layer.q, layer.k, layer.v, layer.size)
        y, v, gated = (merge_heads(x, layer.size, False) for x in (y, layer.v, layer.gated))
        expected = (y + mixer.lepe(v)) * gates[0]
    # sums of 384 products in float32
    torch.testing.assert_close(gated, expected, rtol=1e-4, atol=1e-4 * expected.abs().max())


def test_a_point_is_the_token_under_it(seen):
    (layer,) = seen.choose(1, 1)
    for point, token in (((0, 0), 0), ((3, 3), 0), ((4, 0), 1), ((95, 63), 16 * 24 - 1)):
        assert seen.token_at(layer, point) == token
        marked = np.zeros(16 * 24)
        marked[token] = 1
        spread = seen.spread(layer, marked)
        assert spread.shape == (64, 96) and spread[point[1], point[0]] == 1
        assert spread.sum() == 16
    with pytest.raises(UserError, match=r'x from 0 to 95 and y from 0 to 63, got \(96, 0\)'):
        seen.token_at(layer, (96, 0))


def test_places_that_are_not_there_are_refused(seen):
    with pytest.raises(UserError, match='stage must be one of 1, 2, 3, 4, got 5'):
        seen.choose(5)
    with pytest.raises(UserError, match=r'block must be one of 1 to 2 in stage 1, .*, got 3'):
        seen.choose(1, 3)
    with pytest.raises(UserError, match='head must be one of 1 to 4 in stage 4, got 0'):
        seen.choose(4)[0].check_head(0)
    assert [layer.block for layer in seen.choose(block=-1)] == [2, 1, 1, 1]


def test_images_are_scaled_with_their_point(folder, tmp_path):
    image, point = read_image(folder / 'photo.png', 128, (89, 0))
    assert image.shape == (96, 128, 3) and point == (127, 0)
    _, middle = read_image(folder / 'photo.png', None)
    assert middle == (48, 32)
    (tmp_path / 'broken.png').write_bytes(b'no image')
    assert find_images([tmp_path]) == [tmp_path / 'broken.png']
    for path, sentence in (
        (tmp_path / 'broken.png', 'cannot be read as an image'),
        (tmp_path / 'nope.png', 'cannot be read as an image'),
    ):
        with pytest.raises(UserError, match=sentence):
            read_image(path)
    with pytest.raises(UserError, match=r'got \(90, 0\)'):
        read_image(folder / 'photo.png', 64, (90, 0))
    with pytest.raises(UserError, match='at least 32 pixels, got 8'):
        read_image(folder / 'photo.png', 8)
    with pytest.raises(UserError, match='holds no image'):
        (tmp_path / 'empty').mkdir()
        find_images([tmp_path / 'empty'])
    with pytest.raises(UserError, match='does not exist'):
        find_images([tmp_path / 'nope'])


def test_the_checkpoint_says_which_operators_it_is_of(folder):
    assert attn_types_of(folder / 'linear.pth') == ['linear'] * 4
    model = load_model(folder / 'tiny.py', folder / 'linear.pth')
    assert model.backbone.attn_types == ('linear',) * 4
    options = {'model.backbone.attn_types': ['rala'] * 4}
    with pytest.warns(UserWarning, match='attention linear'):
        model = load_model(folder / 'tiny.py', folder / 'linear.pth', options)
    assert model.backbone.attn_types == ('rala',) * 4


def test_gray_images_and_bare_backbones(tmp_path):
    cv2.imwrite(str(tmp_path / 'gray.png'), np.full((40, 40), 200, np.uint8))
    (tmp_path / 'backbone.py').write_text(
        "backbone = dict(type='mala_mm.RAVLT', arch=dict("
        'embed_dims=(8, 8, 8, 8), depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1)))'
    )
    model = load_model(tmp_path / 'backbone.py')
    found = record(model, read_image(tmp_path / 'gray.png', 64)[0])
    assert found.prediction is None
    assert [layer.operator.name for layer in found.layers] == ['rala'] * 2 + ['softmax'] * 2


def test_a_model_without_our_attention_is_refused(tmp_path):
    (tmp_path / 'resnet.py').write_text(
        "default_scope = 'mmpretrain'\nmodel = dict(type='ImageClassifier', "
        "backbone=dict(type='ResNet', depth=18))"
    )
    with pytest.raises(UserError, match='no attention layer of this package'):
        load_model(tmp_path / 'resnet.py')
