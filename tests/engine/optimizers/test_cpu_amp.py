"""bfloat16 on a CPU."""

import pytest
import torch
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import OPTIM_WRAPPERS
from torch import nn

from mala_mm.engine.optimizers import CPUAmpOptimWrapper


class Model(nn.Module):
    """Notes the types between its parts."""

    def __init__(self, detector):
        super().__init__()
        self.backbone = nn.Conv2d(3, 4, 1)
        self.neck = nn.Conv2d(4, 4, 1)
        if detector:
            self.bbox_head = nn.Identity()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.neck(self.backbone(x))
        self.between = x.dtype
        x = self.head(x.mean((2, 3)))
        self.after = x.dtype
        return x.float().square().mean()


def train_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = OPTIM_WRAPPERS.build(dict(type='mala_mm.CPUAmpOptimWrapper', optimizer=optimizer))
    assert isinstance(wrapper, CPUAmpOptimWrapper)
    with wrapper.optim_context(model):
        loss = model(torch.ones(1, 3, 2, 2))
    wrapper.update_params(loss)
    return loss


def test_whole_models_run_in_bfloat16():
    model = Model(detector=False)
    before = model.head.weight.detach().clone()
    assert train_step(model).dtype == torch.float32
    assert model.between == model.after == torch.bfloat16
    assert model.head.weight.dtype == torch.float32
    assert not torch.equal(model.head.weight, before)
    model(torch.ones(1, 3, 2, 2))
    assert model.after == torch.float32  # autocast ended


class Wrapper(MMDistributedDataParallel):
    """A wrapper for distributed training, without a process group."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module

    def forward(self, *args):
        return self.module(*args)


@pytest.mark.parametrize('wrap', [lambda model: model, Wrapper])
def test_heads_of_detectors_stay_in_float32(wrap):
    model = Model(detector=True)
    inside = []

    def watch(part, forward):
        def watched(*args):
            out = forward(*args)
            inside.append(out.dtype)
            return out

        part._conv_forward = watched

    for part in (model.backbone, model.neck):
        watch(part, part._conv_forward)
    train_step(wrap(model))
    assert inside == [torch.bfloat16, torch.bfloat16]
    assert model.between == model.after == torch.float32
    assert 'forward' not in vars(model.backbone)  # nothing is left behind
