"""The registry of operators: one file and one line make an operator known everywhere."""

import pytest
import torch

from mala_mm import ops
from mala_mm.analysis import attention_macs, count_complexity
from mala_mm.models import MAViT
from mala_mm.ops import OPERATORS, Operator, build_operator, register_operator
from mala_mm.ops.__main__ import operator_table
from mala_mm.ops.fused import cpu, library, triton
from mala_mm.ops.fused.cpu import compiled, tiles

ARCH = dict(embed_dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2))


@pytest.fixture
def toy():
    """An operator that lives in this file alone, with a parameter and the layer's input."""

    @register_operator('toy')
    class Toy(Operator):
        """The mean of all values, weighted, and the layer's input."""

        paper = 'None, https://example.org/1'
        needs_input = True

        def __init__(self, num_heads, head_dim, *, strength=1.0):
            super().__init__(num_heads, head_dim)
            self.strength = strength
            self.weight = torch.nn.Parameter(torch.zeros(num_heads, 1, 1))

        def equations(self, q, k, v, size, x):
            bypass = x.flatten(2).unflatten(1, (self.num_heads, -1)).transpose(2, 3)
            return self.strength * self.weight * (q * k * v).mean(2, keepdim=True) + bypass

        def macs(self, num_tokens):
            return 7 * num_tokens

    yield Toy
    del OPERATORS['toy']


def test_one_line_is_enough(toy):
    """It trains in a stage, is counted, listed and exported."""
    types = ('toy', 'mala', 'softmax', 'softmax')
    torch.manual_seed(0)
    model = MAViT(ARCH, attn_types=types, attn_cfg=dict(strength=2.0, rotary=False))
    assert model.stages[0][0].attn.operator.strength == 2.0
    assert not model.stages[1][0].attn.operator.rotary
    weight = model.stages[0][0].attn.operator.weight
    before = weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sum(out.square().mean() for out in model(torch.randn(2, 3, 64, 64))).backward()
    optimizer.step()
    assert (weight - before).abs().max() > 0
    assert 'stages.0.0.attn.operator.weight' in model.state_dict()

    assert attention_macs('toy', 30, 1, 4) == 210
    counted = count_complexity(model, (64, 64))
    stage1 = next(part for part in counted.parts if part.name == 'stage1')
    assert stage1.attention == 7 * 16 * 16
    assert '| [`toy`](https://example.org/1 "None") | strength | no | 1 |' in operator_table()
    with pytest.raises(ValueError, match=r"'toy'.*got .'tow'"):
        MAViT(ARCH, attn_types=('tow',) * 4)

    model.eval()
    image = torch.randn(1, 3, 64, 64)
    program = torch.export.export(model, (image,))
    for a, b in zip(program.module()(image), model(image)):
        torch.testing.assert_close(a, b)


def test_the_table_of_the_readme_is_that_of_the_registry(repo):
    assert operator_table() in (repo / 'mala_mm/ops/README.md').read_text()


def test_the_fused_family_is_closed(toy, monkeypatch):
    """A kind without kernels is refused by name, by every backend and at every depth."""
    q = torch.randn(1, 1, 6, 32)
    with pytest.raises(ValueError, match=r"kind must be one of .*'mala'.*, got 'toy'"):
        library.make_problem('toy', 32, (2, 3))
    with pytest.raises(ValueError, match=r"kind must be one of .*'mala'.*, got 'toy'"):
        torch.ops.mala_mm.attention(q, q, q, 2, 3, 'toy', 'published', 1.0, 1e-6, True, 'cpu')

    monkeypatch.setattr(library, 'KINDS', (*library.KINDS, 'toy'))
    monkeypatch.setattr('mala_mm.ops.fused.dispatch.KINDS', library.KINDS)
    problem = library.make_problem('toy', 32, (2, 3))
    qkvo, lepe = torch.randn(1, 128, 2, 3), torch.randn(1, 32, 2, 3)
    for backend in ('cpu', 'triton'):
        with pytest.raises(ValueError, match=rf"backend '{backend}' needs a kind .*got 'toy'"):
            ops.gated_attention(qkvo, lepe, 1, kind='toy', backend=backend)
    assert ops.choose_backend('auto', q, problem) == 'reference'

    # past the backends' borders: in C, in the tiles and in Triton's launcher
    states = torch.empty(1, 1, 36, 32)
    if compiled.why_not(q) is None:
        with pytest.raises(ValueError, match=r"kernels\.c .* kind 'toy'"):
            compiled.forward(problem, q, q, q, torch.empty_like(q), states)
    with pytest.raises(ValueError, match="tiles .* kind 'toy'"):
        tiles.forward(problem, q, q, q, torch.empty_like(q), states)
    for module in (cpu, triton):
        assert "got 'toy'" in module.why_not(problem, q)


def test_an_unknown_operator_or_option_is_named():
    with pytest.raises(ValueError, match=r"one of .*'mala'.*got 'mela'"):
        build_operator('mela', 1, 8)
    with pytest.raises(ValueError, match=r"'rala' has no option 'form'.*scale, eps, rotary"):
        build_operator('rala', 1, 8, form='paper')
    with pytest.raises(ValueError, match="did you mean 'rotary'"):
        build_operator('mala', 1, 8, rotery=False)
    with pytest.raises(ValueError, match=r"form must be one of .*'paper'.*got 'exact'"):
        build_operator('mala', 1, 8, form='exact')
    with pytest.raises(ValueError, match=r"backend must be one of .*got 'cuda'"):
        build_operator('linear', 1, 8, backend='cuda')
    assert build_operator('mala', 1, 8, eps=0).eps == 0
    wrong = (('eps', -1.0), ('eps', 'small'), ('scale', 0), ('scale', True), ('rotary', 1))
    for option, value in wrong:
        with pytest.raises(ValueError, match=f'{option} must be .*got {value!r}'):
            build_operator('mala', 1, 8, **{option: value})
    with pytest.raises(ValueError, match='scale must be'):
        build_operator('softmax', 1, 8, scale=float('nan'))
    with pytest.raises(ValueError, match='num_heads must be a positive integer, got 0'):
        build_operator('softmax', 0, 8)


def test_a_name_belongs_to_one_operator(toy):
    with pytest.raises(ValueError, match=r"'toy' is registered already, by .*Toy"):

        @register_operator('toy')
        class Other(Operator):
            pass

    with pytest.raises(TypeError, match='must be a subclass of Operator'):
        register_operator('function')(lambda q, k, v: v)
    assert OPERATORS['toy'] is toy and 'function' not in OPERATORS


def test_inputs_of_another_width_are_refused():
    operator = build_operator('softmax', 2, 8)
    q = torch.zeros(1, 2, 6, 4)
    with pytest.raises(ValueError, match=r'2 heads of width 8, got .*\(1, 2, 6, 4\)'):
        operator(q, q, q, (2, 3))
    q = torch.zeros(1, 3, 6, 8)
    with pytest.raises(ValueError, match=r'2 heads of width 8, got .*\(1, 3, 6, 8\)'):
        operator(q, q, q, (2, 3))


def test_options_that_no_stage_knows_are_named():
    with pytest.raises(ValueError, match=r"option 'form', which none of the operators .*'rala'"):
        MAViT(ARCH, attn_types=('rala', 'rala', 'softmax', 'softmax'), attn_cfg=dict(form='paper'))
    with pytest.raises(ValueError, match='4 dicts, one per stage'):
        MAViT(ARCH, attn_cfg=[dict(form='paper')])
    per_stage = [dict(form='paper'), dict(eps=1e-4), {}, dict(rotary=False)]
    model = MAViT(ARCH, attn_cfg=per_stage)
    operators = [stage[0].attn.operator for stage in model.stages]
    assert [operators[0].form, operators[1].form] == ['paper', 'published']
    assert [operators[0].eps, operators[1].eps] == [1e-6, 1e-4]
    assert [operators[2].rotary, operators[3].rotary] == [True, False]
    with pytest.raises(ValueError, match="'softmax' has no option 'form'"):
        MAViT(ARCH, attn_cfg=[{}, {}, dict(form='paper'), {}])


def test_tokens_off_the_map(toy):
    """A class token is a token like others where no place matters, and is refused elsewhere."""
    for name in set(OPERATORS) - {'toy'}:
        options = dict(rotary=False) if 'rotary' in OPERATORS[name].option_names() else {}
        operator = build_operator(name, 2, 8, **options).expect_extra_tokens(1)
        q = torch.randn(1, 2, 7, 8)
        x = [torch.randn(1, 16, 7)] if operator.needs_input else []
        out = operator(q, q, q, (2, 3), *x)
        assert out.shape == q.shape and out.isfinite().all()
        with pytest.raises(ValueError, match=r'besides 1 extra, got size \(1, 7\) for N = 7'):
            operator(q, q, q, (1, 7), *x)
        if options:
            with pytest.raises(ValueError, match=f"'{name}' turns .*set rotary=False"):
                build_operator(name, 2, 8).expect_extra_tokens(1)
    with pytest.raises(ValueError, match="'toy' takes the tokens of a map alone, got 1 class"):
        build_operator('toy', 1, 8).expect_extra_tokens(1)
    assert build_operator('toy', 1, 8).expect_extra_tokens(0).num_extra_tokens == 0
