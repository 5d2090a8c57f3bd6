"""The Triton kernels of residual and norm against plain PyTorch."""

import pytest
import torch

from benchmarks import accuracy
from mala_mm.ops.fused.norm import residual_norm
from mala_mm.ops.fused.triton import norm as launches

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ('total', 'y', 'dx', 'dweight', 'dbias', 'dbranch')


def inputs(device, shape, dtypes, branch, keep, seed=0):
    """x, branch, keep, weight, bias and the gradients of sum and norm; x is far from mean 0."""
    generator = torch.Generator().manual_seed(seed)
    x, other, dtotal, dy = torch.randn(4, *shape, generator=generator)
    maps = [t.contiguous(memory_format=torch.channels_last) for t in (x + 1, other, dtotal, dy)]
    x, other, dtotal, dy = maps
    x, other = x.to(dtypes[0]), other.to(dtypes[1])
    kept = None
    if keep:
        kept = torch.tensor([0.0, 1.25] * len(x))[: len(x), None, None, None].to(dtypes[1])
    weight, bias = torch.randn(2, shape[1], generator=generator)
    found = (x, other if branch else None, kept, weight, bias, dtotal, dy)
    return tuple(None if t is None else t.to(device) for t in found)


def outcomes(tensors, dtype, backend, exact=False, both=True):
    x, branch, keep, weight, bias, dtotal, dy = tensors
    if exact:
        double = [None if t is None else t.double() for t in tensors]
        x, branch, keep, weight, bias, dtotal, dy = double
        dtype = torch.float64
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    if branch is not None:
        branch = branch.detach().clone().requires_grad_()
        leaves.append(branch)
    total, y = residual_norm(
        leaves[0], leaves[1], leaves[2], 1e-6, branch, keep, dtype, backend=backend
    )
    outs = [total, y] if both else [y]
    grads = [dtotal.to(total.dtype), dy.to(y.dtype)][2 - len(outs) :]
    return [total.detach(), y.detach(), *torch.autograd.grad(outs, leaves, grads)]


def check(tensors, dtype, both=True):
    exact = outcomes(tensors, dtype, 'reference', exact=True, both=both)
    plain = outcomes(tensors, dtype, 'reference', both=both)
    ours = outcomes(tensors, dtype, 'triton', both=both)
    for name, a, b, c in zip(NAMES, ours, plain, exact):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        if a.dtype == BF16 and a.device.type == 'cpu':
            # the interpreter cuts off the bits that bfloat16 has not: a unit, twice as much, and
            # once more where the rounded sum is what is normalised
            assert accuracy.relative_error(a, c) <= 2 * torch.finfo(BF16).eps, name
            continue
        found = accuracy.measure(a, b, c, a.dtype)
        assert found.passed, f'{name}: {found}'


@pytest.mark.parametrize('keep', [True, False])
@pytest.mark.parametrize('branch', [True, False])
@pytest.mark.parametrize(
    'dtypes',
    # of x, the branch and the norm: plain float32; bf16, cast or under autocast; fp16 under
    # autocast, where layer scales keep the sum in float32
    [(FP32, FP32, FP32), (BF16, BF16, BF16), (FP32, FP32, FP16), (FP32, FP16, FP16)],
    ids=str,
)
def test_every_form_and_type(device, dtypes, branch, keep):
    if keep and not branch:
        keep = False
    check(inputs(device, (3, 24, 5, 7), dtypes, branch, keep), dtypes[2])


@pytest.mark.parametrize('shape', [(1, 4, 1, 1), (2, 320, 3, 5), (1, 96, 17, 31)], ids=str)
def test_every_size(device, shape):
    """One token; channels beyond a power of two; several programs."""
    if shape[1] == 96:
        assert launches.shares(torch.empty(shape, device=device))[0] > 1
    check(inputs(device, shape, (FP32, FP32), True, False), FP32)


def test_one_channel_is_normalised_to_the_bias(device):
    tensors = inputs(device, (2, 1, 3, 2), (FP32, FP32), False, False)
    total, y, dx, dweight, dbias = outcomes(tensors, FP32, 'triton')
    _, _, _, _, bias, dtotal, dy = tensors
    assert torch.equal(total, tensors[0]) and torch.equal(y, bias.expand_as(y[0]).expand_as(y))
    assert torch.equal(dx, dtotal) and dweight == 0
    torch.testing.assert_close(dbias, dy.sum()[None])


def test_only_the_norm_is_used(device):
    """The sum has no gradient of its own."""
    check(inputs(device, (2, 16, 3, 4), (FP32, FP32), True, True), FP32, both=False)


def test_any_strides(device):
    x, branch, keep, weight, bias, dtotal, dy = inputs(
        device, (2, 16, 3, 4), (FP32, FP32), True, True
    )
    memory = torch.full((2, 33, 3, 4), float('nan'), device=device)
    tensors = (memory[:, 17:].copy_(x), branch.contiguous(), keep, weight, bias)
    check((*tensors, torch.ones((), device=device).expand(x.shape), dy), FP32)


def test_two_runs_are_bitwise_equal(device):
    tensors = inputs(device, (1, 96, 17, 31), (FP32, FP32), True, False)
    first, second = (outcomes(tensors, FP32, 'triton') for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_refuses_a_second_derivative(device):
    x, _, _, weight, bias, _, _ = inputs(device, (1, 8, 2, 2), (FP32, FP32), False, False)
    x.requires_grad_()
    _, y = residual_norm(x, weight, bias, 1e-6, backend='triton')
    with pytest.raises(RuntimeError, match='no second derivative'):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize('branch', [True, False])
def test_opcheck(device, branch):
    x, other, keep, weight, bias, _, dy = inputs(device, (2, 8, 2, 3), (FP32, FP32), branch, branch)
    torch.use_deterministic_algorithms(False)
    ops = torch.ops.mala_mm
    torch.library.opcheck(ops.residual_norm, (x, other, keep, weight, bias, 1e-6, FP32))
    args = (None, dy, x, keep, weight, 1e-6, FP32, FP32)
    torch.library.opcheck(ops.residual_norm_backward, args)
