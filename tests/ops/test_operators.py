"""The contract that every registered operator keeps, whatever it computes."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mala_mm.ops import OPERATORS, Operator, build_operator
from mala_mm.ops.fused.library import KINDS, make_problem

SIZE = (3, 5)
HEADS, HEAD_DIM = 2, 8
# Options that make another operator of one.
ABLATED = dict(kernel='relu', beta='learned', gamma='learned', unit_query=True)
CASES = {**{name: (name, {}) for name in OPERATORS}, 'mala-ablated': ('mala', ABLATED)}


@pytest.fixture(params=CASES)
def operator(request):
    """Each operator, with parameters that are the same for all heads."""
    torch.manual_seed(0)
    name, options = CASES[request.param]
    operator = build_operator(name, HEADS, HEAD_DIM, **options)
    for parameter in operator.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    return operator


def inputs(operator, *leading, size=SIZE, dtype=torch.float32, seed=0):
    """The arguments of ``operator.equations``, and of the operator itself."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, head_dim = 2, operator.num_heads, operator.head_dim
    tokens = size[0] * size[1]
    qkv = torch.randn(3, batch, heads, tokens, head_dim, generator=generator, dtype=torch.float64)
    arguments = [*qkv.to(dtype), size]
    if operator.needs_input:
        x = torch.randn(batch, heads * head_dim, *size, generator=generator, dtype=torch.float64)
        arguments.append(x.to(dtype))
    return arguments


def test_any_strides_give_the_same(operator):
    q, k, v, *rest = inputs(operator)
    expected = operator(q, k, v, *rest)
    assert expected.shape == q.shape
    for layout in (
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),  # channel-first
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # token-major
        lambda x: torch.stack([x, x], -1)[..., 0],  # every other element
    ):
        out = operator(layout(q), layout(k), layout(v), *rest)
        # the same sums of 15 and 8 products in another order, float32
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_is_kept_and_its_rounding_is_all_that_is_lost(operator, dtype):
    arguments = inputs(operator, dtype=dtype)
    out = operator.to(dtype)(*arguments)
    assert out.dtype == dtype
    exact = operator.double()(*(x.double() if torch.is_tensor(x) else x for x in arguments))
    error = (out.double() - exact).norm() / exact.norm()
    # Half types: half a unit in the last place of the output and, for softmax, which PyTorch
    # computes in the inputs' type, of its probabilities. Others: roundings in sums of N and of d.
    roundings = 2 if dtype in (torch.bfloat16, torch.float16) else SIZE[0] * SIZE[1] + HEAD_DIM
    assert error <= roundings * torch.finfo(dtype).eps / 2


def test_shapes_are_known_without_memory(operator):
    operator = operator.to('meta')
    arguments = [x.to('meta') if torch.is_tensor(x) else x for x in inputs(operator)]
    out = operator(*arguments)
    assert out.shape == arguments[0].shape and out.device.type == 'meta'


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_finite_at_any_magnitude(operator, dtype):
    """Forward and backward, with queries and keys from 1e-4 to 1e4 times their usual size."""
    for factor_q, factor_k in ((1e-4, 1e4), (1e4, 1e-4), (1e4, 1e4), (1e-4, 1e-4)):
        q, k, v, *rest = inputs(operator)
        q, k, v = (
            (x * factor).to(dtype).requires_grad_()
            for x, factor in ((q, factor_q), (k, factor_k), (v, 1))
        )
        rest = [x.to(dtype) if torch.is_tensor(x) else x for x in rest]
        out = operator.to(dtype)(q, k, v, *rest)
        assert out.isfinite().all(), (factor_q, factor_k)
        out.float().sum().backward()
        for name, x in (('dq', q), ('dk', k), ('dv', v)):
            assert x.grad.isfinite().all(), (name, factor_q, factor_k)


def test_heads_are_exchangeable(operator):
    q, k, v, size, *rest = inputs(operator)
    out = operator(q, k, v, size, *rest)
    rest = [
        x.unflatten(1, (HEADS, HEAD_DIM)).flip(1).flatten(1, 2) for x in rest
    ]  # the layer's input holds the heads' channels one after the other
    flipped = operator(q.flip(1), k.flip(1), v.flip(1), size, *rest)
    torch.testing.assert_close(flipped.flip(1), out)


def test_images_do_not_see_each_other(operator):
    q, k, v, size, *rest = inputs(operator)
    out = operator(q, k, v, size, *rest)
    alone = operator(q[1:], k[1:], v[1:], size, *(x[1:] for x in rest))
    torch.testing.assert_close(alone, out[1:])


def test_gradients_reach_everything(operator):
    arguments = [x.requires_grad_() if torch.is_tensor(x) else x for x in inputs(operator)]
    out = operator(*arguments)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
    for x in (*filter(torch.is_tensor, arguments), *operator.parameters()):
        assert x.grad.isfinite().all() and x.grad.abs().max() > 0


def test_gradcheck(operator):
    size = (2, 3)
    operator = operator.double()
    arguments = inputs(operator, size=size, dtype=torch.float64)
    tensors = [x[:1].requires_grad_() for x in arguments if torch.is_tensor(x)]
    assert torch.autograd.gradcheck(
        lambda q, k, v, *rest: operator.equations(q, k, v, size, *rest), tensors
    )


def test_scores_are_the_weights_of_the_values(operator):
    """Rows of scores, in any order and repeated, times the values are the rows of the output."""
    rows = [14, 0, 7, 7]
    q, k, v, size, *rest = inputs(operator, dtype=torch.float64)
    operator = operator.double()
    if operator.no_scores:
        with pytest.raises(ValueError, match=f'{operator.name!r} has no scores: .* with scores'):
            operator.scores(q, k, size, rows, *rest)
        return
    scores = operator.scores(q, k, size, rows, *rest)
    assert scores.shape == (2, HEADS, len(rows), SIZE[0] * SIZE[1]) and not scores.requires_grad
    torch.testing.assert_close(scores @ v, operator.equations(q, k, v, size, *rest)[:, :, rows])
    half = operator.float().scores(q.half(), k.half(), size, rows, *(x.half() for x in rest))
    # the inputs' rounding to 11 bits, enlarged by products of d and sums of N
    torch.testing.assert_close(half.double(), scores, rtol=0.05, atol=0.05 * scores.abs().max())
    for wrong in ([15], [-1], [0.5], []):
        with pytest.raises(ValueError, match='rows must be'):
            operator.scores(q, k, size, wrong, *rest)


def test_the_state_is_what_the_queries_read(operator):
    q, k, v, size, *_ = inputs(operator, dtype=torch.float64)
    if type(operator).state is Operator.state:
        with pytest.raises(ValueError, match=f'{operator.name!r} has no KV state; .* are'):
            operator.state(q, k, v, size)
        return
    state = operator.double().state(q, k, v, size)
    assert state.shape == (2, HEADS, HEAD_DIM, HEAD_DIM)
    # it is linear in the values, a sum over the tokens
    once_more = operator.state(q, k, 2 * v, size)
    torch.testing.assert_close(once_more, 2 * state)
    if getattr(operator, 'fused', operator.name in KINDS):  # and the one that every backend keeps
        problem = (operator.scale, operator.eps, operator.rotary, operator.form)
        spec = make_problem(operator.name, HEAD_DIM, size, *problem).spec
        kept = torch.ops.mala_mm.attention(q.float(), k.float(), v.float(), *size, *spec, 'cpu')[1]
        # sums of 15 products in float32
        torch.testing.assert_close(
            kept[:, :, :HEAD_DIM].double(), state, rtol=1e-5, atol=1e-5 * state.abs().max()
        )


def test_multiply_adds_are_those_of_a_trace(operator):
    arguments = [x[:1] if torch.is_tensor(x) else x for x in inputs(operator)]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        operator.equations(*arguments)
    assert operator.macs(SIZE[0] * SIZE[1]) == counter.get_total_flops() // 2 > 0


def test_compiles_and_exports_without_a_break(operator):
    arguments = inputs(operator)
    expected = operator(*arguments)
    torch._dynamo.reset()
    compiled = torch.compile(operator, fullgraph=True, backend='aot_eager')
    torch.testing.assert_close(compiled(*arguments), expected)
    program = torch.export.export(operator, tuple(arguments))
    torch.testing.assert_close(program.module()(*arguments), expected)


@pytest.mark.parametrize('memory_format', [torch.contiguous_format, torch.channels_last])
def test_gated_is_the_written_out_mixer(operator, memory_format):
    """Section by section: split, heads, attention, local position, gate."""
    channels = HEADS * HEAD_DIM
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, channels, *SIZE, generator=generator)
    qkvo = torch.randn(2, 4 * channels, *SIZE, generator=generator)
    qkvo = qkvo.to(memory_format=memory_format)
    q, k, v, o = qkvo.split(channels, 1)
    heads = [t.reshape(2, HEADS, HEAD_DIM, -1).transpose(2, 3) for t in (q, k, v)]
    y = operator.double().equations(
        *(t.double() for t in heads), SIZE, *([x.double()] if operator.needs_input else [])
    )
    y = y.transpose(2, 3).reshape(2, channels, *SIZE)
    expected = (y + 2 * v) * o
    out = operator.float().gated(qkvo, lambda v: 2 * v, x)
    assert out.is_contiguous(memory_format=memory_format)
    # 15 sums of 8 products in float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_inputs_of_another_layer_are_refused(operator):
    q, k, v, size, *rest = inputs(operator)
    with pytest.raises(ValueError, match='share one shape'):
        operator(q, k[:, :1], v, size, *rest)
    with pytest.raises(ValueError, match=r'got size \(5, 5\) for N = 15'):
        operator(q, k, v, (5, 5), *rest)


def test_every_operator_names_its_paper(operator):
    assert operator.paper.endswith(tuple('0123456789')) and 'https://' in operator.paper
