"""The operators as citizens of PyTorch, with the backend that runs here: the CPU's."""

import io

import pytest
import torch
import torch._dynamo.testing

from mala_mm import ops
from mala_mm.ops.fused import library

SPECS = {
    'mala': ('mala', 'published', 8**-0.5, 1e-6, True, 'cpu'),
    'rala': ('rala', 'published', 8**-0.5, 1e-6, False, 'cpu'),
}


def packed(height=3, width=5, token_major=True):
    generator = torch.Generator().manual_seed(0)
    qkvo = torch.randn(2, 64, height, width, generator=generator)
    lepe = torch.randn(2, 16, height, width, generator=generator)
    if token_major:
        qkvo = qkvo.to(memory_format=torch.channels_last)
    return qkvo.requires_grad_(), lepe.requires_grad_()


@pytest.mark.parametrize('kind', SPECS)
@pytest.mark.parametrize('token_major', [True, False])
def test_opcheck(kind, token_major):
    """Schema, fake implementation, autograd registration, and AOT dispatch with dynamic shapes."""
    qkvo, lepe = packed(token_major=token_major)
    torch.library.opcheck(torch.ops.mala_mm.gated_attention.default, (qkvo, lepe, 2, *SPECS[kind]))
    q, k, v, _ = (library.split_heads(x, 2).detach().requires_grad_() for x in qkvo.chunk(4, 1))
    torch.library.opcheck(torch.ops.mala_mm.attention.default, (q, k, v, 3, 5, *SPECS[kind]))


def test_the_layout_of_the_caller_is_kept():
    for token_major in (True, False):
        qkvo, lepe = packed(token_major=token_major)
        out = ops.gated_attention(qkvo, lepe, 2, backend='cpu')
        out.sum().backward()
        assert out.is_contiguous(memory_format=torch.channels_last) == token_major
        assert qkvo.grad.stride() == qkvo.stride()


@pytest.mark.parametrize('name', ['attention', 'gated_attention'])
def test_second_derivative_is_refused(name):
    qkvo, lepe = packed()
    if name == 'attention':
        q, k, v, _ = (library.split_heads(x, 2) for x in qkvo.chunk(4, 1))
        out = ops.mala_attention(q, k, v, size=(3, 5), backend='cpu')
    else:
        out = ops.gated_attention(qkvo, lepe, 2, backend='cpu')
    (gradient,) = torch.autograd.grad(out.square().sum(), qkvo, create_graph=True)
    with pytest.raises(RuntimeError, match="pass backend='reference' to differentiate twice"):
        gradient.sum().backward()


def test_reference_differentiates_twice():
    qkvo, lepe = packed()
    out = ops.gated_attention(qkvo, lepe, 2, backend='reference')
    (gradient,) = torch.autograd.grad(out.square().sum(), qkvo, create_graph=True)
    gradient.square().sum().backward()
    assert qkvo.grad.isfinite().all() and qkvo.grad.abs().max() > 0


def test_gradients_flow_where_only_some_inputs_need_them():
    qkvo, lepe = packed()
    q, k, v, _ = (library.split_heads(x, 2).detach() for x in qkvo.chunk(4, 1))
    k.requires_grad_()
    ops.mala_attention(q, k, v, size=(3, 5), backend='cpu').sum().backward()
    assert k.grad.isfinite().all()
    with torch.no_grad():
        assert not ops.gated_attention(qkvo, lepe, 2, backend='cpu').requires_grad


@pytest.mark.parametrize('backend', ['cpu', 'reference'])
def test_the_gradient_through_the_local_position_joins_that_of_the_values(backend):
    """A function of v in place of a map: the same gradients, without a gradient per slice."""
    qkvo, lepe = packed()
    weight = lepe.detach()[:, :, :1, :1].clone().requires_grad_()

    def gradients(mixer):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            grads = torch.autograd.grad(mixer().square().sum(), (qkvo, weight))
        return grads, {event.key for event in profile.key_averages()}

    shared, few = gradients(
        lambda: ops.gated_attention(qkvo, lambda v: v * weight, 2, backend=backend)
    )
    sliced, many = gradients(
        lambda: ops.gated_attention(qkvo, qkvo.chunk(4, 1)[2] * weight, 2, backend=backend)
    )
    for a, b in zip(shared, sliced):
        torch.testing.assert_close(a, b)
    if backend == 'cpu':
        slicing = {'SplitBackward0', 'aten::cat'}
        assert slicing <= many and not slicing & few


def test_a_trace_with_a_function_of_the_values_can_be_saved():
    class Mixer(torch.nn.Module):
        def forward(self, qkvo):
            return ops.gated_attention(qkvo, lambda v: 2 * v, 2, backend='reference')

    qkvo, _ = packed()
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(Mixer(), qkvo), file)
    file.seek(0)
    torch.testing.assert_close(torch.jit.load(file)(qkvo), Mixer()(qkvo))


def test_a_function_of_the_values_can_be_differentiated_twice():
    qkvo, lepe = packed()
    qkvo = qkvo.detach().double().requires_grad_()
    weight = lepe.detach().double()[:, :, :1, :1]
    assert torch.autograd.gradgradcheck(
        lambda x: ops.gated_attention(x, lambda v: v.tanh() * weight, 2, backend='reference'),
        qkvo,
        fast_mode=True,
    )


@pytest.mark.parametrize('backend', ['cpu', 'reference'])
@pytest.mark.parametrize('kind', library.KINDS)
def test_compiles_once_for_all_sizes(kind, backend):
    """No graph break, and one graph for every H x W, forward and backward."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend('aot_eager')

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def mixer(qkvo, lepe):
        return ops.gated_attention(qkvo, lepe, 2, kind=kind, backend=backend)

    compiled = set()
    for size in ((3, 5), (4, 7), (6, 2), (9, 11)):
        qkvo, lepe = packed(*size)
        expected = ops.gated_attention(qkvo, lepe, 2, kind=kind)
        out = mixer(qkvo, lepe)
        torch.testing.assert_close(out, expected)
        a, b = (torch.autograd.grad(x.square().sum(), qkvo)[0] for x in (out, expected))
        # sums of up to 99 terms in float32, each rounded by 6e-8, in two orders
        assert (a - b).norm() <= 99 * 6e-8 * b.norm()
        compiled.add(counter.frame_count)
    assert len(compiled) == 1, 'compiled anew for another size'


def test_separate_inputs_compile_once_for_all_sizes():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend('aot_eager')

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def attention(x):
        q, k, v = (library.split_heads(part, 2) for part in x.chunk(3, 1))
        return ops.mala_attention(q, k, v, size=tuple(x.shape[2:]))

    compiled = set()
    for size in ((3, 5), (4, 7), (6, 2)):
        x = torch.randn(1, 48, *size, requires_grad=True)
        attention(x).sum().backward()
        compiled.add(counter.frame_count)
    assert len(compiled) == 1, 'compiled anew for another size'


def test_export_holds_nothing_of_this_package():
    class Mixer(torch.nn.Module):
        def forward(self, qkvo, lepe):
            return ops.gated_attention(qkvo, lepe, 2)

    qkvo, lepe = (x.detach() for x in packed(token_major=False))
    height, width = torch.export.Dim('height', min=2), torch.export.Dim('width', min=2)
    shapes = ({2: height, 3: width}, {2: height, 3: width})
    program = torch.export.export(Mixer(), (qkvo, lepe), dynamic_shapes=shapes)
    assert 'mala_mm' not in program.graph_module.code
    other = [x.detach() for x in packed(4, 7, token_major=False)]
    expected = ops.gated_attention(*other, 2, backend='reference')
    torch.testing.assert_close(program.module()(*other), expected)


def test_export_keeps_a_backend_that_was_named():
    class Mixer(torch.nn.Module):
        def forward(self, qkvo, lepe):
            return ops.gated_attention(qkvo, lepe, 2, backend='cpu')

    qkvo, lepe = (x.detach() for x in packed())
    program = torch.export.export(Mixer(), (qkvo, lepe))
    assert 'mala_mm.gated_attention' in program.graph_module.code
    torch.testing.assert_close(
        program.module()(qkvo, lepe), ops.gated_attention(qkvo, lepe, 2, backend='cpu')
    )


def test_onnx_takes_the_form_of_pytorch():
    onnx = pytest.importorskip('onnx', reason='ONNX export is optional')
    pytest.importorskip('onnxscript', reason="PyTorch's ONNX exporter needs it")

    class Mixer(torch.nn.Module):
        def forward(self, qkvo, lepe):
            return ops.gated_attention(qkvo, lepe, 2)

    qkvo, lepe = (x.detach() for x in packed(token_major=False))
    program = torch.onnx.export(Mixer(), (qkvo, lepe), dynamo=True, verbose=False)
    file = io.BytesIO(program.model_proto.SerializeToString())
    model = onnx.load(file)
    assert {node.domain for node in model.graph.node} <= {'', 'ai.onnx', 'pkg.onnxscript.torch_lib'}


class Ops(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the ops of this package that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == 'mala_mm':
            self.names.append(function._schema.name.partition('::')[2])
        return function(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_ops():
    """Counters and tracers work on ops; a plain call spares the dispatcher."""
    qkvo, lepe = packed()
    with Ops() as ops_inside:
        out = ops.gated_attention(qkvo, lepe, 2, backend='cpu')
        out.sum().backward()
    assert ops_inside.names == ['gated_attention', 'gated_attention_backward']
    plain = ops.gated_attention(qkvo, lepe, 2, backend='cpu')
    assert type(plain.grad_fn).__name__ == 'FusedAttentionBackward'


@pytest.mark.parametrize('kind', SPECS)
def test_the_short_way_computes_what_the_ops_compute(kind):
    qkvo, lepe = packed()
    q, k, v, _ = (library.split_heads(x, 2).detach().requires_grad_() for x in qkvo.chunk(4, 1))
    for name, inputs, rest in (
        ('gated_attention', (qkvo, lepe), (2,)),
        ('attention', (q, k, v), (3, 5)),
    ):
        arguments = (*inputs, *rest, *SPECS[kind])
        long = getattr(torch.ops.mala_mm, name)(*arguments)[0]
        short = getattr(library, name)(*arguments)
        grad = torch.randn_like(long)
        gradients = [torch.autograd.grad(out, inputs, grad) for out in (long, short)]
        assert torch.equal(long, short) and short.stride() == long.stride()
        assert all(map(torch.equal, *gradients))
        with torch.no_grad():
            assert torch.equal(getattr(library, name)(*arguments), short)


@pytest.mark.parametrize('batch, size', [(0, (3, 5)), (2, (0, 5)), (2, (3, 0))])
@pytest.mark.parametrize('kind', library.KINDS)
def test_no_images_and_no_tokens(kind, batch, size):
    qkvo = torch.randn(batch, 64, *size, requires_grad=True)
    lepe = torch.randn(batch, 16, *size, requires_grad=True)
    out = ops.gated_attention(qkvo, lepe, 2, kind=kind, backend='cpu')
    assert out.shape == lepe.shape
    out.sum().backward()
    assert qkvo.grad.shape == qkvo.shape and lepe.grad.shape == lepe.shape


def test_the_gradient_of_a_sum_is_read_where_it_lies():
    """Autograd expands it: all strides are 0."""
    gradients = []
    for dense in (False, True):
        qkvo, lepe = packed()
        out = ops.gated_attention(qkvo, lepe, 2, backend='cpu')
        grad = torch.ones(()).expand(out.shape)
        out.backward(torch.ones_like(out) if dense else grad)
        gradients.append((qkvo.grad, lepe.grad))
    assert all(map(torch.equal, *gradients))
