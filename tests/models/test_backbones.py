import copy
import math
import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing
from torch.nn.modules.batchnorm import _BatchNorm

from mala_mm.models import RAVLT, MAViT
from tests.checkpoint.published import ARCHS as PUBLISHED

# Trunk parameters without output norms, counted from the published definition.
TRUNK_PARAMS = dict(tiny=13345408, small=24038848, base=46688928, large=93559008)
SMALL_ARCH = dict(embed_dims=(8, 16, 24, 32), depths=(1, 2, 2, 1), num_heads=(1, 2, 3, 2))


def small_backbone(cls=MAViT, seed=0, **kwargs):
    torch.manual_seed(seed)
    return cls(**{'arch': SMALL_ARCH, **kwargs})


def randomise(model, seed=0):
    """Give every parameter and statistic a value that has an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.normal_(0, 0.5, generator=generator)
                if name.endswith('running_var'):
                    tensor.abs_().add_(0.5)
    return model


# Of the papers and the released code: drop path, and the layer scale of each stage.
RATES = dict(
    tiny=(0.1, (1, 1, 1, 1)),
    small=(0.15, (1, 1, 1, 1)),
    base=(0.4, (1, 1, 1e-6, 1e-6)),
    large=(0.55, (1e-6, 1e-6, 1e-6, 1e-6)),
)


@pytest.mark.parametrize('arch', RATES)
def test_sizes_are_the_published_ones(arch):
    # The blocks are asked rather than the table that they are built from.
    drop_path_rate, scales = RATES[arch]
    with torch.device('meta'):
        model = MAViT(arch)
    published = zip(*PUBLISHED[arch], strict=True)  # typed from the specification
    for stage, (dim, depth, num_heads) in zip(model.stages, published, strict=True):
        assert len(stage) == depth
        assert {block.attn.num_heads for block in stage} == {num_heads}
        assert {block.norm1.weight.numel() for block in stage} == {dim}
        assert {block.ffn.fc1.out_channels for block in stage} == {int(3.5 * dim)}
    assert model.stages[-1][-1].drop_path.drop_prob == pytest.approx(drop_path_rate)
    shallow = dict(MAViT.arch_zoo[arch], depths=(1, 1, 1, 1))  # its values need memory
    for stage, scale in zip(MAViT(shallow).stages, scales, strict=True):
        for gamma in (stage[0].gamma1, stage[0].gamma2):
            assert torch.equal(gamma.weight, torch.full_like(gamma.weight, scale))


@pytest.mark.parametrize('cls', [MAViT, RAVLT])
@pytest.mark.parametrize('arch', ['tiny', 'small', 'base', 'large'])
def test_parameter_counts_are_the_published_ones(cls, arch):
    with torch.device('meta'):
        trunk = cls(arch, output_norm=False)
        dense = cls(arch)
    assert sum(p.numel() for p in trunk.parameters()) == TRUNK_PARAMS[arch]
    norms = sum(2 * dims for dims in dense.embed_dims)
    assert sum(p.numel() for p in dense.parameters()) == TRUNK_PARAMS[arch] + norms


def test_each_family_has_its_published_attention():
    for cls, linear in ((MAViT, 'mala'), (RAVLT, 'rala')):
        model = small_backbone(cls)
        assert model.attn_types == (linear, linear, 'softmax', 'softmax')
        for stage, attn_type in zip(model.stages, model.attn_types):
            assert {block.attn.attn_type for block in stage} == {attn_type}


@pytest.mark.parametrize('num_stages', [1, 2, 3, 5])
def test_a_pyramid_of_another_height_ends_in_two_stages_of_softmax(num_stages):
    each = (8,) * num_stages
    arch = dict(embed_dims=each, depths=(1,) * num_stages, num_heads=(1,) * num_stages)
    model = MAViT(arch, out_indices=(num_stages - 1,)).eval()
    softmax = min(2, num_stages)
    assert model.attn_types == ('mala',) * (num_stages - softmax) + ('softmax',) * softmax
    (out,) = model(torch.randn(1, 3, 64, 64))
    assert out.shape[2:] == (16 >> (num_stages - 1),) * 2


@pytest.mark.parametrize('cls', [MAViT, RAVLT])
def test_attention_changes_the_output_but_not_the_parameters(cls):
    hybrid = randomise(small_backbone(cls)).eval()
    linear = small_backbone(cls, attn_types=['linear'] * 4).eval()
    linear.load_state_dict(hybrid.state_dict())
    x = torch.randn(1, 3, 64, 64)
    for a, b in zip(hybrid(x), linear(x)):
        assert a.shape == b.shape
        assert not torch.allclose(a, b, rtol=1e-3)


def test_paper_form_is_one_argument():
    published = randomise(small_backbone()).eval()
    paper = small_backbone(attn_cfg=dict(form='paper')).eval()
    paper.load_state_dict(published.state_dict())
    x = torch.randn(1, 3, 64, 64)
    assert not torch.allclose(published(x)[0], paper(x)[0], rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(
    'size', [(17, 17), (17, 1400), (31, 33), (64, 96), (97, 61), (256, 309), (224, 224)]
)
def test_any_size_gives_maps_at_strides_4_to_32(size):
    model = small_backbone().eval()
    outputs = model(torch.randn(1, 3, *size))
    for stride, dims, y in zip((4, 8, 16, 32), model.embed_dims, outputs):
        assert y.shape == (1, dims, math.ceil(size[0] / stride), math.ceil(size[1] / stride))
        # mmcv's RoIAlign reads a channels_last map wrongly, without complaint.
        assert y.is_contiguous()
        assert y.isfinite().all()


@torch.no_grad()
def test_random_sizes_between_17_and_1400():
    model = small_backbone(arch=dict(SMALL_ARCH, depths=(1, 1, 1, 1))).eval()
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        # Log-uniform, so that small and large sides both occur.
        h, w = (17 * (1400 / 17) ** torch.rand(2, generator=generator)).long().tolist()
        if h * w > 300_000:
            w = 300_000 // h
        outputs = model(torch.randn(1, 3, h, w))
        assert [y.shape[2:] for y in outputs] == [
            (math.ceil(h / s), math.ceil(w / s)) for s in (4, 8, 16, 32)
        ]
        assert all(y.isfinite().all() for y in outputs)


@torch.no_grad()
def test_tiny_runs_at_the_largest_size():
    outputs = MAViT('tiny').eval()(torch.randn(1, 3, 1400, 1400))
    assert [y.shape[2:] for y in outputs] == [(350, 350), (175, 175), (88, 88), (44, 44)]
    assert all(y.isfinite().all() for y in outputs)


@torch.no_grad()
def test_one_instance_at_changing_sizes_equals_fresh_instances():
    model = randomise(small_backbone()).eval()
    for size in ((33, 65), (64, 64), (65, 33), (33, 65)):
        x = torch.randn(1, 3, *size)
        fresh = small_backbone().eval()
        fresh.load_state_dict(model.state_dict())
        for a, b in zip(model(x), fresh(x)):
            assert torch.equal(a, b)


@torch.no_grad()
def test_images_of_a_batch_do_not_see_each_other():
    model = randomise(small_backbone()).double().eval()
    x = torch.randn(3, 3, 50, 70, dtype=torch.float64)
    for i, together in enumerate(zip(*[y.unbind() for y in model(x)])):
        for a, b in zip(together, model(x[i : i + 1])):
            torch.testing.assert_close(a[None], b)


@pytest.mark.parametrize('cls', [MAViT, RAVLT])
@pytest.mark.parametrize('out_indices', [(0, 1, 2, 3), (1, 2, 3), (2,), (0, 1)])
def test_every_parameter_gets_a_gradient(cls, out_indices):
    model = small_backbone(cls, out_indices=out_indices)
    outputs = model(torch.randn(2, 3, 64, 64))
    assert [y.shape[1] for y in outputs] == [SMALL_ARCH['embed_dims'][i] for i in out_indices]
    sum((y * torch.randn_like(y)).sum() for y in outputs).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_output_norms_can_be_left_out():
    model = small_backbone(output_norm=False, out_indices=(3,))
    assert not any(name.startswith('norm') for name, _ in model.named_children())
    assert len(model(torch.randn(2, 3, 64, 64))) == 1


@pytest.mark.parametrize('frozen_stages', [-1, 0, 1, 2, 4])
def test_frozen_stages_keep_parameters_and_statistics(frozen_stages):
    model = small_backbone(frozen_stages=frozen_stages)
    assert model.train() is model
    frozen = [] if frozen_stages < 0 else ['stem.']
    frozen += [f'stages.{i}.' for i in range(frozen_stages)]
    frozen += [f'downsamples.{i}.' for i in range(frozen_stages - 1)]
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    outputs = model(torch.randn(2, 3, 64, 64))
    sum((y * torch.randn_like(y)).sum() for y in outputs).backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        is_frozen = name.startswith(tuple(frozen))
        assert torch.equal(value, before[name]) == is_frozen, name
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != name.startswith(tuple(frozen)), name
    # The first trainable stage is in training mode even behind frozen ones.
    if frozen_stages < 4:
        assert model.stages[max(frozen_stages, 0)].training


@pytest.mark.parametrize('norm_type', ['BN', 'SyncBN'])
def test_norm_eval_holds_batch_statistics(norm_type):
    """SyncBN included, which a test for BatchNorm2d would miss."""
    for norm_eval in (True, False):
        model = small_backbone(norm_cfg=dict(type=norm_type), norm_eval=norm_eval).train()
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        assert len(norms) == 7
        assert all(m.training != norm_eval for m in norms)
        assert model.stages[0].training


def test_norm_cfg_can_stop_the_norms_gradient():
    model = small_backbone(norm_cfg=dict(type='BN', requires_grad=False))
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    assert not any(p.requires_grad for m in norms for p in m.parameters())


def test_drop_path_rises_linearly_over_all_blocks():
    for out_indices in ((0, 1, 2, 3), (0, 1)):
        model = small_backbone(drop_path_rate=0.5, out_indices=out_indices)
        rates = [block.drop_path.drop_prob for stage in model.stages for block in stage]
        assert rates == pytest.approx([0.1 * i for i in range(6)][: len(rates)])
    with torch.device('meta'):
        for arch, rate in (('tiny', 0.1), ('small', 0.15), ('base', 0.4), ('large', 0.55)):
            assert MAViT(arch).stages[-1][-1].drop_path.drop_prob == pytest.approx(rate)
    assert MAViT('tiny', drop_path_rate=0.0).stages[-1][-1].drop_path.drop_prob == 0


def test_drop_path_acts_in_training_only():
    model = randomise(small_backbone(drop_path_rate=0.9, norm_eval=True))
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        model.train()
        assert not torch.equal(model(x)[3], model(x)[3])
        model.eval()
        assert torch.equal(model(x)[3], model(x)[3])


def test_checkpointed_blocks_give_the_same_gradients():
    gradients = []
    for with_cp in (False, True):
        model = randomise(small_backbone(with_cp=with_cp, drop_path_rate=0.3)).double().train()
        torch.manual_seed(1)
        x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
        sum(y.square().sum() for y in model(x)).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=lambda m, n=name: f'{n}: {m}')


def test_checkpointed_blocks_keep_less():
    def saved_bytes(model):
        total = 0

        def pack(tensor):
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(2, 3, 64, 64))
        return total

    assert saved_bytes(small_backbone(with_cp=True)) < 0.5 * saved_bytes(small_backbone())


def test_initialisation():
    model = MAViT('base')
    model.init_weights()
    weight = model.stages[2][0].attn.qkvo.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.stages[2][0].attn.qkvo.bias.abs().max() == 0
    assert (model.norm3.weight == 1).all()
    for stage, value in zip(model.stages, (1, 1, 1e-6, 1e-6)):
        for block in stage:
            assert (block.gamma1.weight == value).all() and (block.gamma2.weight == value).all()


def test_half_precision_model_stays_finite_and_close():
    model = randomise(small_backbone()).eval()
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        expected = model(x)
        outputs = copy.deepcopy(model).bfloat16()(x.bfloat16())
        with torch.autocast('cpu', torch.bfloat16):
            autocast = model(x)
    # bfloat16 keeps 8 bits; some thirty layers in sequence lose a few of them.
    for a, b, c in zip(expected, outputs, autocast):
        assert b.dtype == torch.bfloat16
        scale = a.abs().max()
        assert (a - b).abs().max() < 0.1 * scale
        assert (a - c).abs().max() < 0.1 * scale


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        (dict(arch='tinny'), r"arch must be one of .*'tiny'.*got 'tinny'"),
        (dict(arch=dict(depths=(1, 1))), r'an arch dict needs .*num_heads.*got \[.depths.\]'),
        (dict(arch=dict(SMALL_ARCH, num_heads=(1, 2))), r"arch\['num_heads'\] must have 4 entries"),
        (dict(attn_types=('mala', 'softmax')), r'attn_types must name 4 operators'),
        (dict(attn_types=('mala', 'mala', 'softmax', 'rela')), r"'rala'.*'rela'"),
        (dict(attn_types='mala'), r'attn_types must name 4 operators'),
        (dict(out_indices=(0, 4)), r'out_indices must be .* from 0 to 3, got \(0, 4\)'),
        (dict(out_indices=3), r'out_indices must be a sequence'),
        (dict(out_indices=()), r'out_indices must be a sequence'),
        (dict(frozen_stages=5), r'frozen_stages must be an int from -1 to 4, got 5'),
    ],
)
def test_wrong_arguments_name_the_valid_ones(kwargs, message):
    with pytest.raises(ValueError, match=message):
        small_backbone(**kwargs)


def test_wrong_arch_type():
    with pytest.raises(TypeError, match='got int'):
        MAViT(4)


def test_callers_arguments_are_not_changed():
    arch, norm_cfg, attn_cfg = dict(SMALL_ARCH), dict(type='BN'), dict(form='paper')
    kwargs = dict(arch=arch, norm_cfg=norm_cfg, attn_cfg=attn_cfg, out_indices=[0, 2])
    before = copy.deepcopy(kwargs)
    MAViT(**kwargs)
    assert kwargs == before


@pytest.mark.slow
@pytest.mark.parametrize('cls', [MAViT, RAVLT])
def test_compiles_whole_and_once_for_all_sizes(cls):
    """``torch.compile`` without a graph break; after the first size none is compiled anew."""
    torch._dynamo.reset()
    model = small_backbone(cls, arch={**SMALL_ARCH, 'depths': (1, 1, 1, 1)}).train()
    counter = torch._dynamo.testing.CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    graphs = set()
    for size in ((64, 96), (96, 64), (70, 101)):
        x = torch.randn(2, 3, *size)
        outs = [f(x) for f in (compiled, model)]
        # Not the squares: behind a norm their mean is constant, its gradient a rest of rounding.
        directions = [torch.randn_like(y) for y in outs[0]]
        losses = [sum((y * d).mean() for y, d in zip(maps, directions)) for maps in outs]
        weight = model.stages[0][0].attn.qkvo.weight
        a, b = (torch.autograd.grad(loss, weight)[0] for loss in losses)
        torch.testing.assert_close(losses[0], losses[1])
        # float32 through some 40 layers, each with some 10 roundings of 6e-8, in another order
        assert (a - b).norm() <= 40 * 10 * 6e-8 * b.norm()
        graphs.add(counter.frame_count)
    assert len(graphs) == 1, 'compiled anew for another size'


BUILD = """
from mmengine.config import ConfigDict
from {registry} import MODELS
cfg = dict(arch='tiny', out_indices=(0, 1))
{extra}
for name in {names}:
    model = MODELS.build(ConfigDict(type=name, **cfg))
    assert type(model).__module__.startswith('mala_mm.models.backbones.'), type(model)
"""


@pytest.mark.parametrize(
    'registry', ['mmengine.registry', 'mmdet.registry', 'mmseg.registry', 'mmpretrain.registry']
)
def test_builds_by_name_in_a_clean_process(registry):
    """With the prefix nothing has to be imported; the bare name needs ``import mala_mm``."""
    scripts = [
        BUILD.format(registry=registry, extra='', names=['mala_mm.MAViT', 'mala_mm.RAVLT']),
        BUILD.format(registry=registry, extra='import mala_mm', names=['MAViT', 'RAVLT']),
    ]
    for script in scripts:
        result = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr


def test_import_is_light():
    """Importing the package loads neither the libraries above mmcv, nor its compiled ops."""
    script = (
        'import sys, mala_mm\n'
        "heavy = ['mmdet', 'mmseg', 'mmpretrain', 'mmcv._ext', 'triton', 'matplotlib']\n"
        'print([name for name in heavy if name in sys.modules])'
    )
    result = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True)
    assert result.stdout.strip() == '[]', result.stdout + result.stderr


def test_images_in_groups_make_no_difference(monkeypatch):
    """At inference on the CPU a stage takes some images at a time."""
    model = randomise(small_backbone()).eval()
    x = torch.randn(5, 3, 64, 96)
    with torch.no_grad():
        expected = model(x)
        monkeypatch.setattr('mala_mm.models.layers.inference.BAND_ELEMENTS', 1)
        outputs = model(x)
    for a, b in zip(outputs, expected):
        # float32 through some forty layers, summed in another order
        assert (a - b).abs().max() <= 40 * 10 * 6e-8 * b.abs().max()
        assert a.is_contiguous()
