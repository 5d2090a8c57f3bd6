"""The causal form: masked matrix, recurrence and chunks are one function."""

import re

import pytest
import torch

from mala_mm.ops import causal_attention, causal_step, empty_state, masked_attention
from mala_mm.ops.causal import CAUSAL_KINDS

from .operators.explicit import phi


def inputs(tokens=23, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, tokens, 8, generator=generator).to(dtype) for _ in range(3)]


def recurrence(q, k, v, **options):
    state, outs = empty_state(q), []
    for i in range(q.shape[2]):
        y, state = causal_step(*(x[:, :, i : i + 1] for x in (q, k, v)), state, **options)
        outs.append(y)
    return torch.cat(outs, 2), state


@pytest.mark.parametrize('kind', CAUSAL_KINDS)
def test_each_token_is_the_last_of_the_sequence_up_to_it(kind):
    """The equations with sums up to i, written as loops."""
    q, k, v = inputs(7)
    out = masked_attention(q, k, v, kind=kind, scale=0.3)
    for i in range(7):
        products = torch.einsum('bhd,bhjd->bhj', phi(q[:, :, i]), phi(k[:, :, : i + 1]))
        if kind == 'linear':
            scores = products / (products.sum(-1, keepdim=True) + 1e-6)
        else:
            z = 0.3 * products.sum(-1, keepdim=True)
            scores = (1 + 1 / (z + 1e-6)) * 0.3 * products - z / (i + 1)
        # a row of scores sums to 1, but for eps
        torch.testing.assert_close(
            scores.sum(-1), torch.ones_like(scores[..., 0]), rtol=1e-5, atol=1e-5
        )
        expected = torch.einsum('bhj,bhjd->bhd', scores, v[:, :, : i + 1])
        torch.testing.assert_close(out[:, :, i], expected)


@pytest.mark.parametrize('kind', CAUSAL_KINDS)
def test_three_ways_agree_with_their_gradients(kind):
    options = dict(kind=kind, scale=0.3)
    results = []
    for way in (
        lambda *qkv: (masked_attention(*qkv, **options), None),
        lambda *qkv: recurrence(*qkv, **options),
        lambda *qkv: causal_attention(*qkv, chunk=5, **options),
        lambda *qkv: causal_attention(*qkv, **options),
    ):
        qkv = [x.requires_grad_() for x in inputs()]
        out, state = way(*qkv)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
        results.append((out, *torch.autograd.grad(out, qkv, weights), state))
    for out, dq, dk, dv, state in results[1:]:
        for name, a, b in zip(('y', 'dq', 'dk', 'dv'), (out, dq, dk, dv), results[0]):
            torch.testing.assert_close(a, b, msg=lambda m, name=name: f'{name}: {m}')
        assert state.length == 23
        for a, b in zip(state[:3], results[1][-1][:3]):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize('kind', CAUSAL_KINDS)
def test_gradcheck(kind):
    qkv = [x[:1, :1, :5].requires_grad_() for x in inputs()]
    assert torch.autograd.gradcheck(lambda *x: causal_attention(*x, kind=kind, chunk=2)[0], qkv)


def test_pieces_of_any_length_make_the_whole():
    q, k, v = inputs()
    expected, last = causal_attention(q, k, v)
    state, outs = None, []
    for part in zip(*(x.split([1, 9, 3, 10], 2) for x in (q, k, v))):
        y, state = causal_attention(*part, state=state, chunk=4)
        outs.append(y)
    torch.testing.assert_close(torch.cat(outs, 2), expected)
    torch.testing.assert_close(state.kv, last.kv)


def test_the_future_is_not_seen():
    q, k, v = inputs()
    before, _ = causal_attention(q, k, v, chunk=4)
    for x in (q, k, v):
        x[:, :, 10:] = 9
    after, _ = causal_attention(q, k, v, chunk=4)
    assert torch.equal(before[:, :, :10], after[:, :, :10])
    assert not torch.allclose(before[:, :, 10:], after[:, :, 10:])


def test_no_matrix_of_all_tokens_is_built():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, torch.Tensor):
                    self.numbers = max(self.numbers, x.numel())
            return out

    q, k, v = inputs(2000, torch.float32)
    with torch.no_grad(), Largest() as largest:
        out, _ = causal_attention(q, k, v)
    assert largest.numbers == out.numel()  # 2,000 x 2,000 scores would be 250 times as many


def test_half_types_are_summed_in_float32():
    q, k, v = inputs(3000, torch.bfloat16)
    out, state = causal_attention(q, k, v, kind='linear')
    assert out.dtype == torch.bfloat16 and state.kv.dtype == torch.float32
    exact, _ = causal_attention(*(x.double() for x in (q, k, v)), kind='linear')
    # half a unit in the last place of the output, and float32's own roundings
    assert (out.double() - exact).norm() <= 1.1 * torch.finfo(torch.bfloat16).eps / 2 * exact.norm()


def test_what_does_not_fit_is_named():
    q, k, v = inputs(4)
    with pytest.raises(ValueError, match=r"kind must be one of \('linear', 'mala'\), got 'rala'"):
        causal_attention(q, k, v, kind='rala')
    with pytest.raises(ValueError, match='chunk must be a positive integer, got 0'):
        causal_attention(q, k, v, chunk=0)
    with pytest.raises(ValueError, match=r'state must be of shape \(2, 1, 8, 8\).*\(2, 3, 8, 8\)'):
        causal_attention(q[:, :1], k[:, :1], v[:, :1], state=empty_state(q))
    with pytest.raises(ValueError, match=r'a step takes one token.*\(2, 3, 4, 8\)'):
        causal_step(q, k, v, empty_state(q))
    with pytest.raises(ValueError, match='at least one token'):
        causal_attention(q[:, :, :0], k[:, :, :0], v[:, :, :0])
    with pytest.raises(ValueError, match='share one shape'):
        causal_attention(q, k[:, :, 1:], v)
    with pytest.raises(TypeError, match='q must be a Tensor, got list'):
        causal_attention([1.0], k, v)
    with pytest.raises(ValueError, match='scale must be a positive number'):
        causal_step(q[:, :, :1], k[:, :, :1], v[:, :, :1], empty_state(q), scale=0)


def test_the_example_of_the_readme_runs(repo):
    text = (repo / 'mala_mm/ops/README.md').read_text()
    (code,) = re.findall(r'## Sequences\n.*?```python\n(.*?)```', text, re.DOTALL)
    exec(code, {})
