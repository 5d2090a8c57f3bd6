"""The operators with these kernels, as compilers and exporters see them."""

import pytest
import torch
import torch._dynamo.testing

from benchmarks.gpu.checks import NAMES, fused, inputs, results
from mala_mm.ops.fused import library


@pytest.mark.parametrize('name', ['attention', 'gated_attention'])
def test_opcheck(device, name):
    spec = ('mala', 'published', 32**-0.5, 1e-6, True, 'triton')
    qkvo, lepe, _ = (x.requires_grad_() for x in inputs(1, 1, 32, (3, 5), torch.float32))
    q, k, v, _ = (library.split_heads(x, 1).detach() for x in qkvo.chunk(4, 1))
    args = (q, k, v, 3, 5, *spec) if name == 'attention' else (qkvo, lepe, 1, *spec)
    torch.use_deterministic_algorithms(False)  # it compares the states' unused memory too
    torch.library.opcheck(getattr(torch.ops.mala_mm, name).default, args)


def test_compiles_once_for_all_sizes(device):
    """``torch.compile`` sees one operator: no graph break, and one graph for every H x W."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend('aot_eager')

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def mixer(qkvo, lepe, heads):
        return fused(qkvo, lepe, heads)

    frames = set()
    for size in ((3, 5), (4, 7), (6, 2)):
        qkvo, lepe, grad = inputs(1, 1, 32, size, torch.float32)
        out = results(mixer, (qkvo, lepe, grad), torch.float32, 1)
        plain = results(fused, (qkvo, lepe, grad), torch.float32, 1)
        for name, a, b in zip(NAMES, out, plain):
            assert torch.equal(a, b), name
        frames.add(counter.frame_count)
    assert len(frames) == 1, 'compiled anew for another size'


def test_export_keeps_the_kernels_that_were_named(device):
    class Mixer(torch.nn.Module):
        def forward(self, qkvo, lepe):
            return fused(qkvo, lepe, heads=1)

    qkvo, lepe, _ = inputs(1, 1, 32, (3, 5), torch.float32)
    program = torch.export.export(Mixer(), (qkvo, lepe))
    assert 'mala_mm.gated_attention' in program.graph_module.code
    assert torch.equal(program.module()(qkvo, lepe), fused(qkvo, lepe, heads=1))
