"""Counts against tracing the plain form, against hand formulas and against the papers' columns."""

import copy

import pytest
import torch
from mmengine.config import Config, ConfigDict
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mala_mm.analysis import attention_macs, build_on_meta, count_complexity
from mala_mm.errors import UserError
from mala_mm.models import RAVLT, MAViT

ARCH = dict(embed_dims=(8, 16, 16, 32), depths=(1, 2, 1, 1), num_heads=(1, 2, 2, 4))


def trace(function, *args) -> int:
    """Multiply-adds that PyTorch itself counts while a function computes on the CPU."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops() // 2


def test_operators_are_counted_by_their_own_formula():
    """The contract test of the operators holds it against a trace."""
    assert attention_macs('softmax', num_tokens=30, num_heads=3, head_dim=8) == 2 * 30**2 * 8 * 3


def test_unknown_operator_is_refused_by_name():
    with pytest.raises(ValueError, match=r"one of .*'mala'.*, got 'performer'"):
        attention_macs('performer', 4, 1, 4)


@pytest.mark.parametrize('cls', [MAViT, RAVLT])
def test_backbone_equals_a_trace_of_its_computation(cls):
    # Odd sizes: the maps of the stages are 10x12, 5x6, 3x3 and 2x2.
    backbone = cls(ARCH, attn_cfg=dict(backend='reference')).eval()
    counted = count_complexity(backbone, (37, 45))
    assert counted.total.macs == trace(backbone, torch.rand(1, 3, 37, 45))
    assert counted.attn_types == backbone.attn_types
    assert counted.total.params == sum(p.numel() for p in backbone.parameters())

    linear = cls(ARCH, attn_types=backbone.attn_types[:1] * 4)
    assert counted.total.macs_linear == count_complexity(linear, (37, 45)).total.macs
    assert counted.total.macs_linear != counted.total.macs


def test_backbone_is_split_by_stage():
    backbone = MAViT(ARCH, out_indices=(0, 2))  # the last stage is not built
    counted = count_complexity(backbone, (64, 64))
    assert [part.name for part in counted.parts] == ['stem', 'stage1', 'stage2', 'stage3']
    for i, part in enumerate(counted.parts[1:]):
        modules = [backbone.stages[i], *backbone.downsamples[max(i - 1, 0) : i]]
        modules += [getattr(backbone, f'norm{i}')] if i in (0, 2) else []
        assert part.params == sum(p.numel() for m in modules for p in m.parameters())
    tokens = 8 * 8
    # Stage 2: its downsampling, two blocks of position, projections, lepe and FFN (width 3.5 C).
    block = tokens * 16 * (9 + 4 * 16 + 25 + 16 + 2 * 56) + tokens * 56 * 9
    assert counted.parts[2].layers == tokens * 8 * 16 * 9 + 2 * block
    assert counted.parts[2].attention == 2 * attention_macs('mala', tokens, 2, 8)


def test_the_callers_model_is_left_as_it_was():
    backbone = MAViT(ARCH).train()
    before = copy.deepcopy(backbone.state_dict())
    count_complexity(backbone, (32, 32))
    assert backbone.training
    assert {x.device.type for x in backbone.state_dict().values()} == {'cpu'}
    assert all(torch.equal(x, before[name]) for name, x in backbone.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in backbone.modules())
    assert not any('forward' in vars(m) for m in backbone.modules())


def test_with_cp_and_amp_change_nothing():
    plain = count_complexity(MAViT(ARCH), (32, 32)).total
    assert count_complexity(MAViT(ARCH, with_cp=True), (32, 32)).total == plain
    with torch.autocast('cpu', torch.bfloat16):
        assert count_complexity(MAViT(ARCH), (32, 32)).total == plain


@pytest.mark.parametrize('shape', [(0, 32), (32,), (3, 32, 32)])
def test_bad_shape_is_refused(shape):
    with pytest.raises(UserError, match='positive height and width'):
        count_complexity(MAViT(ARCH), shape)


def test_other_models_are_refused_by_name():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = MAViT(ARCH)

    with pytest.raises(UserError, match='Odd cannot be counted'):
        count_complexity(Odd(), (32, 32))


def test_config_without_a_model_is_refused():
    with pytest.raises(UserError, match=r"neither model nor backbone, only \['lr'\]"):
        build_on_meta(Config(dict(lr=1)))


def test_backbone_of_another_package_is_counted_as_one_part():
    pytest.importorskip('mmpretrain')
    model = build_on_meta(
        Config(dict(model=dict(type='mmpretrain.ResNet', depth=18), default_scope='mmpretrain'))
    )
    counted = count_complexity(model, (224, 224))
    assert [part.name for part in counted.parts] == ['backbone']
    assert counted.attn_types == ()
    # The field's 1.8 GFLOPs: 1.814 G less the 0.0005 G of the classifier that is not there.
    assert counted.total.macs == counted.total.layers == 1_813_561_344


def small_detector(cascade: bool) -> ConfigDict:
    """A two-stage detector whose RoI heads are cheap enough to run on 1000 regions."""
    pytest.importorskip('mmdet')
    name = 'cascade-mask-rcnn' if cascade else 'mask-rcnn'
    cfg = Config.fromfile(f'configs/det/mavit/{name}_mavit-s_fpn_amp-ms-crop-3x_coco.py')
    model = cfg.model
    model.backbone.update(arch=ARCH)
    model.neck.update(in_channels=list(ARCH['embed_dims']), out_channels=4)
    model.rpn_head.update(in_channels=4, feat_channels=4)
    roi = model.roi_head
    for head in roi.bbox_head if cascade else [roi.bbox_head]:
        head.update(in_channels=4, fc_out_channels=4, num_classes=3)
        if cascade:
            head.update(conv_out_channels=4)
    roi.mask_head.update(in_channels=4, conv_out_channels=4, num_classes=3, num_convs=1)
    for extractor in (roi.bbox_roi_extractor, roi.mask_roi_extractor):
        extractor.update(out_channels=4)
    return cfg


@pytest.mark.parametrize('cascade', [False, True])
def test_roi_heads_equal_mmdets_own_forward(cascade, repo, monkeypatch):
    monkeypatch.chdir(repo)
    cfg = small_detector(cascade)
    parts = {p.name: p for p in count_complexity(build_on_meta(cfg), (64, 64)).parts}

    from mmengine.registry import MODELS, DefaultScope
    from mmengine.structures import InstanceData

    with DefaultScope.overwrite_default_scope('mmdet'):
        configs = dict(train_cfg=cfg.model.train_cfg.rcnn, test_cfg=cfg.model.test_cfg.rcnn)
        roi_head = MODELS.build({**cfg.model.roi_head, **configs}).eval()
    x = [torch.rand(1, 4, n, n) for n in (16, 8, 4, 2)]
    boxes = torch.tensor([[0.0, 0.0, 32.0, 32.0]]).repeat(1000, 1)
    rois = torch.cat([boxes.new_zeros(1000, 1), boxes], dim=1)

    def forward():
        if not cascade:  # feeds the first 100 proposals to the mask head
            roi_head(x, [InstanceData(bboxes=boxes)], [])
            return
        for stage in range(3):  # its own raw forward would feed all 1000 to every mask head
            roi_head._bbox_forward(stage, x, rois)
            roi_head._mask_forward(stage, x, rois[:100])

    counted = parts['roi_head.bbox_head'].macs + parts['roi_head.mask_head'].macs
    assert counted == trace(forward) > 0


def test_auxiliary_heads_have_parameters_but_cost_nothing(repo, monkeypatch):
    pytest.importorskip('mmseg')
    monkeypatch.chdir(repo)
    cfg = Config.fromfile('configs/seg/mavit/upernet_mavit-t_8xb2-amp-160k_ade20k-512x512.py')
    model = build_on_meta(cfg)
    counted = count_complexity(model, (512, 2048))
    parts = {part.name: part for part in counted.parts}
    assert list(parts)[-2:] == ['decode_head', 'auxiliary_head']
    assert parts['auxiliary_head'].params > 0 == parts['auxiliary_head'].macs
    assert parts['decode_head'].macs > 0
    assert counted.total.params == sum(p.numel() for p in model.parameters())
