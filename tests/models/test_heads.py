"""The classifier tail."""

import subprocess
import sys

import pytest
import torch
from mmengine.registry import MODELS
from torch import nn

from mala_mm.models import ProjectionNeck


def randomised(neck):
    """Statistics and scales of a trained norm, for a fresh one changes nothing."""
    generator = torch.Generator().manual_seed(0)
    for tensor in (neck.norm.weight, neck.norm.bias, neck.norm.running_mean):
        tensor.data = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    neck.norm.running_var = 0.5 + torch.rand(neck.norm.running_var.shape, generator=generator)
    return neck


def test_equation():
    """Conv1x1, norm, SiLU and the mean over all pixels, of the last map only."""
    neck = randomised(ProjectionNeck(8, 12)).double().eval()
    x = torch.randn(2, 8, 3, 5, dtype=torch.float64)
    (out,) = neck([torch.full((2, 4, 6, 10), torch.nan), x])
    weight = neck.proj.weight.flatten(1)  # (out, in)
    y = torch.einsum('oi,bihw->bohw', weight, x) + neck.proj.bias.view(-1, 1, 1)
    norm = neck.norm
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    y = (y - norm.running_mean.view(-1, 1, 1)) * scale.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)
    y = y * torch.sigmoid(y)
    # Sums of 8 and 15 values in float64.
    torch.testing.assert_close(out, y.sum((2, 3)) / 15, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('width', [1024, 2048, 2560])
def test_parameter_count(width):
    neck = ProjectionNeck(640, width)
    assert sum(p.numel() for p in neck.parameters()) == 640 * width + 3 * width


def test_initialisation():
    torch.manual_seed(0)
    neck = ProjectionNeck(64, 256)
    neck.init_weights()
    # The standard error of the standard deviation of 16384 values is 0.55 %; truncated at two
    # units, that is at 100 standard deviations.
    assert neck.proj.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert not neck.proj.bias.any() and not neck.norm.bias.any()
    assert torch.equal(neck.norm.weight, torch.ones(256))


def test_norm_cfg():
    assert type(ProjectionNeck(8, 8).norm) is nn.BatchNorm2d
    assert isinstance(ProjectionNeck(8, 8, norm_cfg=dict(type='SyncBN')).norm, nn.SyncBatchNorm)


def test_builds_by_name():
    neck = MODELS.build(dict(type='mala_mm.ProjectionNeck', in_channels=8, out_channels=16))
    assert type(neck) is ProjectionNeck


def test_needs_no_mmpretrain():
    """The tail registers where only mmengine and mmcv are installed."""
    script = (
        'import sys\n'
        'sys.modules.update(dict.fromkeys(("mmpretrain", "mmdet", "mmseg")))\n'
        'from mmengine.registry import MODELS\n'
        'MODELS.build(dict(type="mala_mm.ProjectionNeck", in_channels=8, out_channels=8))\n'
    )
    done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
