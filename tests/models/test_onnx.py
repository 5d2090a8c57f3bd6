"""ONNX Runtime computes what torch does, at sizes that the export has not seen."""

import pytest
import torch

from mala_mm.models import MAViT

onnxruntime = pytest.importorskip('onnxruntime', reason='needs requirements/export.txt')
pytest.importorskip('onnxscript', reason='needs requirements/export.txt')

ARCH = dict(embed_dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2))
SIZES = ((64, 96), (70, 33), (128, 160))  # neither square nor multiples of 32


@pytest.mark.slow
def test_three_sizes(tmp_path):
    """With an operator of its own in each stage."""
    torch.manual_seed(0)
    model = MAViT(ARCH, attn_types=('mala', 'rala', 'linear', 'softmax')).eval()
    for parameter in model.parameters():  # layer scales of 1e-6 would hide the mixers
        torch.nn.init.normal_(parameter, std=0.2)
    height, width = torch.export.Dim('height', min=32), torch.export.Dim('width', min=32)
    torch.onnx.export(
        model,
        (torch.randn(1, 3, *SIZES[0]),),
        tmp_path / 'model.onnx',
        dynamo=True,
        dynamic_shapes=[{2: height, 3: width}],
        verbose=False,
    )
    session = onnxruntime.InferenceSession(tmp_path / 'model.onnx')
    (name,) = (x.name for x in session.get_inputs())
    for size in SIZES:
        x = torch.randn(1, 3, *size)
        found = [torch.from_numpy(y) for y in session.run(None, {name: x.numpy()})]
        with torch.no_grad():
            expected = model(x)
        assert [y.shape for y in found] == [y.shape for y in expected]
        for y, wanted in zip(found, expected):
            torch.testing.assert_close(y, wanted, atol=1e-4, rtol=1e-4)
