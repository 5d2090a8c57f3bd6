"""What is exported computes what the model does, elsewhere and at other sizes."""

import numpy as np
import pytest
import torch

from mala_mm.engine import export
from mala_mm.engine.config import load_config
from mala_mm.errors import UserError
from mala_mm.models import MAViT

CLASSIFIER = 'configs/cls/mavit/mavit-t_8xb128_in1k.py'
RETINANET = 'configs/det/mavit/retinanet_mavit-t_fpn_amp-1x_coco.py'
MASK_RCNN = 'configs/det/mavit/mask-rcnn_mavit-t_fpn_amp-1x_coco.py'
SEMANTIC_FPN = 'configs/seg/mavit/fpn_mavit-t_8xb2-80k_ade20k-512x512.py'
SMALL = dict(embed_dims=[64, 128, 256, 512], depths=[1] * 4, num_heads=[1, 2, 4, 8], mlp_ratio=1)


@pytest.fixture
def recipe(repo, tmp_path):
    """A function that returns the arguments for a recipe with one block a stage."""
    from mmengine.registry import MODELS, init_default_scope

    def prepare(config, *options):
        cfg = load_config(repo / config)
        cfg.model.backbone.arch = dict(SMALL)
        path = tmp_path / 'small.py'
        cfg.dump(path)
        init_default_scope(cfg.default_scope)
        torch.manual_seed(0)
        checkpoint = tmp_path / 'small.pth'
        torch.save({'state_dict': MODELS.build(cfg.model).state_dict()}, checkpoint)
        return [str(path), str(checkpoint), *options]

    return prepare


def test_a_classifier_in_onnx_at_any_size(recipe, tmp_path, capsys):
    onnxruntime = pytest.importorskip('onnxruntime')
    out = tmp_path / 'model.onnx'
    export.main(recipe(CLASSIFIER, '--dynamic', '--out', str(out)))
    assert 'of the model for images of 1x64x96, 4x128x64, 1x160x224' in capsys.readouterr().out
    session = onnxruntime.InferenceSession(out)
    name = session.get_inputs()[0].name
    images = np.random.default_rng(0).uniform(0, 255, (3, 3, 57, 71)).astype('float32')
    (logits,) = session.run(None, {name: images})
    assert logits.shape == (3, 1000)
    # One image alone gives what it gives among others: float32 sums, 1e-6 of the largest.
    (alone,) = session.run(None, {name: images[1:2]})
    assert np.abs(alone[0] - logits[1]).max() < 1e-5 * np.abs(logits).max()


def test_a_backbone_as_a_program_of_torch(recipe, tmp_path):
    out = tmp_path / 'backbone.pt2'
    export.main(recipe(MASK_RCNN, '--part', 'backbone', '--dynamic', '--out', str(out)))
    program = torch.export.load(out)
    targets = {str(n.target) for n in program.graph.nodes if n.op == 'call_function'}
    assert 'aten.convolution.default' in targets or 'aten.conv2d.default' in targets
    assert not any('mala_mm' in target for target in targets)
    maps = program.module()(torch.rand(1, 3, 75, 103) * 255)
    assert [tuple(m.shape[2:]) for m in maps] == [(19, 26), (10, 13), (5, 7), (3, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ('config', 'options', 'outputs'),
    [
        (RETINANET, ['--dynamic'], 10),  # scores and boxes at five levels
        (MASK_RCNN, ['--part', 'neck', '--dynamic'], 5),
        (SEMANTIC_FPN, ['--size', '96', '128'], 1),
    ],
    ids=['retinanet', 'neck', 'segmentor'],
)
def test_detectors_and_segmentors_in_onnx(recipe, tmp_path, config, options, outputs):
    onnxruntime = pytest.importorskip('onnxruntime')
    out = tmp_path / 'model.onnx'
    export.main(recipe(config, *options, '--out', str(out)))
    session = onnxruntime.InferenceSession(out)
    results = session.run(
        None, {session.get_inputs()[0].name: np.zeros((2, 3, 96, 128), 'float32')}
    )
    assert len(results) == outputs
    if config == SEMANTIC_FPN:
        assert results[0].shape == (2, 150, 96, 128)


@pytest.mark.parametrize(
    ('config', 'options', 'sentence'),
    [
        (MASK_RCNN, ['--dynamic'], 'gathers regions within the model'),
        (SEMANTIC_FPN, ['--dynamic'], 'give --size H W, or --part backbone'),
        (SEMANTIC_FPN, ['--part', 'neck', '--size', '64', '64'], 'detectors with a neck'),
        (CLASSIFIER, ['--size', '16', '64'], 'must be 33 x 33 at least'),
        (CLASSIFIER, ['--dynamic', '--to', 'torch'], 'must end in .pt2'),
    ],
)
def test_what_cannot_be_exported(recipe, tmp_path, config, options, sentence):
    out = tmp_path / 'model.onnx'
    with pytest.raises(UserError, match=sentence):
        export.main(recipe(config, *options, '--out', str(out)))
    assert not out.exists()


def test_what_differs_is_not_written(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(export, 'TOLERANCE', 0.0)
    out = tmp_path / 'model.pt2'
    monkeypatch.setattr(export.Exportable, 'training', False, raising=False)
    real = export.Exportable.forward
    export_program = export.export

    def then_change(module, size):
        program = export_program(module, size)
        monkeypatch.setattr(
            export.Exportable, 'forward', lambda self, x: tuple(y * 1.01 for y in real(self, x))
        )
        return program

    monkeypatch.setattr(export, 'export', then_change)
    with pytest.raises(UserError, match='must equal the model to'):
        export.main(recipe(CLASSIFIER, '--size', '64', '64', '--out', str(out)))
    assert list(tmp_path.glob('model*')) == []


def test_the_exporter_that_traces_is_refused(tmp_path):
    model = MAViT(dict(SMALL)).eval()
    with pytest.raises(RuntimeError, match='dynamo=True'):
        torch.onnx.export(model, (torch.rand(1, 3, 64, 64),), tmp_path / 'x.onnx', dynamo=False)


def test_a_trace_loads_without_this_package(tmp_path):
    """It is made of PyTorch's operators alone; its size is fixed, as that of any trace."""
    model = MAViT(dict(SMALL)).eval()
    image = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        traced = torch.jit.trace(model, image)
        assert 'mala_mm::' not in str(traced.inlined_graph)
        for a, b in zip(traced(image), model(image), strict=True):
            assert (a - b).abs().max() < 1e-5 * b.abs().max()
