"""Are the kernels right on this device: a job per variant, a row per way to run it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks import accuracy
from benchmarks.gpu.clock import device
from mala_mm import ops
from mala_mm.ops.fused.depthwise import depthwise
from mala_mm.ops.fused.dispatch import eager
from mala_mm.ops.fused.norm import residual_norm
from mala_mm.ops.fused.triton import launch
from mala_mm.ops.registry import merge_heads, split_heads

DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}
NAMES = ('out', 'dq', 'dk', 'dv', 'do', 'dlepe')


def fused(qkvo, lepe, heads, kind='mala', form='published', rotary=True):
    """The kernels, gated."""
    spec = dict(kind=kind, form=form, rotary=rotary)
    return ops.gated_attention(qkvo, lepe, heads, backend='triton', **spec)


def formula(qkvo, lepe, heads, kind='mala', form='published', rotary=True):
    """The same as it is written, in the type of its inputs."""
    size = tuple(qkvo.shape[2:])
    q, k, v, gate = (split_heads(x, heads) for x in qkvo.chunk(4, 1))
    y = (eager(kind, q, k, v, size, rotary=rotary, form=form) + split_heads(lepe, heads)) * gate
    return merge_heads(y, size, token_major=qkvo.stride(1) == 1)


def inputs(batch, heads, head_dim, size, dtype, token_major=True, seed=0) -> list[torch.Tensor]:
    """Packed projection, local position and gradient; v has mean 1, so that MALA cancels."""
    generator = torch.Generator().manual_seed(seed)
    channels = heads * head_dim
    qkvo = torch.randn(batch, 4 * channels, *size, generator=generator)
    qkvo[:, 2 * channels : 3 * channels] += 1
    lepe, grad = (torch.randn(batch, channels, *size, generator=generator) for _ in range(2))
    form = torch.channels_last if token_major else torch.contiguous_format
    return [x.to(device(), dtype).to(memory_format=form) for x in (qkvo, lepe, grad)]


def results(function, tensors, dtype, heads, **spec) -> list[torch.Tensor]:
    """Output and the gradients of q, k, v, o and lepe."""
    qkvo, lepe = (x.detach().to(dtype, copy=True).requires_grad_() for x in tensors[:2])
    out = function(qkvo, lepe, heads, **spec)
    gradients = torch.autograd.grad(out, (qkvo, lepe), tensors[2].to(dtype))
    return [out.detach(), *gradients[0].chunk(4, 1), gradients[1]]


def check(
    kind: str,
    form: str,
    dtype: str,
    head_dim: int,
    token_major: bool,
    size: tuple[int, int],
    heads: int = 2,
) -> Iterator[dict]:
    """One variant at one size: accuracy first, then that every way to run it gives the same bits.

    Yields:
        dict: ``way``, ``passed`` and what was measured or why it failed.
    """
    variant = dict(kind=kind, form=form, dtype=dtype, head_dim=head_dim, token_major=token_major)
    variant['size'] = list(size)
    spec = dict(kind=kind, form=form)
    kind_of = DTYPES[dtype]
    tensors = inputs(2, heads, head_dim, size, kind_of, token_major)
    ours = results(fused, tensors, kind_of, heads, **spec)
    yield variant | {'way': 'accuracy'} | _accuracy(ours, tensors, kind_of, heads, spec)
    for way, run in WAYS.items():
        if device() == 'cpu' and way not in INTERPRETED:
            continue
        try:
            passed, note = run(tensors, kind_of, heads, spec, ours)
        except Exception as error:
            passed, note = False, f'{type(error).__name__}: {error}'[:400]
        yield variant | {'way': way, 'passed': passed, 'note': note}


def around(layer: str, dtype: str, channels: int, size: tuple[int, int]) -> Iterator[dict]:
    """One of the kernels around the attention, accuracy and repeated bits, in rows as of ``check``.

    Args:
        layer (str): One of :data:`AROUND`.
        dtype (str): Of the maps; weights stay in float32, as under autocast.
        channels (int): Channels of the maps.
        size (tuple[int, int]): Height and width.
    """
    of, kind = AROUND[layer], DTYPES[dtype]
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(4, 2, channels, *size, generator=generator).to(device(), kind)
    maps = [x.contiguous(memory_format=torch.channels_last) for x in maps]
    taps = of[0] if of else 1
    weight = torch.randn(channels, 1, taps, taps, generator=generator).to(device())
    bias = torch.randn(channels, generator=generator).to(device())

    def run(dtype: torch.dtype, backend: str) -> list[torch.Tensor]:
        wide = dtype == torch.float64
        leaves = [x.to(dtype) for x in maps[:2]] + [
            x.double() if wide else x for x in (weight, bias)
        ]
        leaves = [x.detach().requires_grad_() for x in leaves]
        x, branch, w, b = leaves
        if of:
            outs = (depthwise(x, w, b, *of[1:], backend),)
            leaves = [x, w, b]
        else:
            outs = residual_norm(x, w.flatten(), b, 1e-6, branch, backend=backend)
        grads = torch.autograd.grad(outs, leaves, [y.to(dtype) for y in maps[2 : 2 + len(outs)]])
        return [*(x.detach() for x in outs), *grads]

    ours, plain = run(kind, 'triton'), run(kind, 'reference')
    names = ('out', 'dx', 'dweight', 'dbias') if of else AROUND_NORM
    errors, passed = {}, True
    for name, a, b, c in zip(names, ours, plain, run(torch.float64, 'reference'), strict=True):
        found = accuracy.measure(a, b, c, a.dtype)
        errors[name] = [found.error, found.plain, found.allowed]
        passed &= found.passed
    row = dict(kind=layer, form='', dtype=dtype, head_dim=channels, token_major=True)
    row['size'] = list(size)
    yield row | {'way': 'accuracy', 'passed': passed, 'errors': errors}
    same = all(map(torch.equal, ours, run(kind, 'triton')))
    yield row | {'way': 'again', 'passed': same, 'note': '' if same else 'differs'}


AROUND = {
    'feed-forward': (3, True, True),
    'conditional position': (3, False, True),
    'local position': (5, False, False),
    'residual and norm': None,
}
"""Depthwise convolutions by their size, GELU and residual; None is the norm."""
AROUND_NORM = ('total', 'norm', 'dx', 'dbranch', 'dweight', 'dbias')


def accuracies(ours, tensors, dtype, heads, **spec) -> dict[str, accuracy.Accuracy]:
    """What the kernels lose in each result, beside the formula.

    Where the formula overflows in float16, it is given what it would lose with bfloat16's range.
    """
    exact = results(formula, tensors, torch.float64, heads, **spec)
    plain = results(formula, tensors, dtype, heads, **spec)
    if dtype == torch.float16 and not all(x.isfinite().all() for x in plain):
        coarse = results(formula, tensors, torch.bfloat16, heads, **spec)
        finer = torch.finfo(torch.float16).eps / torch.finfo(torch.bfloat16).eps
        plain = [c + (x.double() - c) * finer for x, c in zip(coarse, exact)]
    return {
        name: accuracy.measure(a, b, c, dtype)
        for name, a, b, c in zip(NAMES, ours, plain, exact, strict=True)
    }


def _accuracy(ours, tensors, dtype, heads, spec) -> dict:
    found = accuracies(ours, tensors, dtype, heads, **spec)
    errors = {name: [x.error, x.plain, x.allowed] for name, x in found.items()}
    return {'passed': all(x.passed for x in found.values()), 'errors': errors}


def _same(a: list, b: list) -> tuple[bool, str]:
    wrong = [n for n, x, y in zip(NAMES, a, b, strict=True) if not torch.equal(x, y)]
    return not wrong, f'differs in {", ".join(wrong)}' if wrong else ''


def _again(tensors, dtype, heads, spec, ours):
    return _same(results(fused, tensors, dtype, heads, **spec), ours)


def _graph(tensors, dtype, heads, spec, ours):
    """Captured, and replayed on other values than at the capture."""
    still = [x.clone() for x in tensors]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results(fused, still, dtype, heads, **spec)
    torch.cuda.current_stream().wait_stream(stream)
    for x in still:
        x.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(fused, still, dtype, heads, **spec)
    for x, y in zip(still, tensors):
        x.copy_(y)
    graph.replay()
    return _same(found, ours)


def _compiled(mode):
    def run(tensors, dtype, heads, spec, ours):
        torch._dynamo.reset()
        function = torch.compile(fused, fullgraph=True, mode=mode)
        for _ in range(3):  # 'reduce-overhead' records at the second call and replays at the third
            found = [x.clone() for x in results(function, tensors, dtype, heads, **spec)]
        return _same(found, ours)

    return run


def _stream(tensors, dtype, heads, spec, ours):
    """On another stream, as the first of its kind there."""
    launch.forget_plans()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = results(fused, tensors, dtype, heads, **spec)
    torch.cuda.current_stream().wait_stream(stream)
    return _same(found, ours)


def _nan(tensors, dtype, heads, spec, ours):
    """Where the formula's results are NaN, so are the kernels'."""
    wrong = []
    channels = tensors[1].shape[1]
    for part, name in enumerate('qkvo'):
        poisoned = [x.clone() for x in tensors]
        poisoned[0][0, part * channels, -1, 0] = float('nan')
        found = results(fused, poisoned, dtype, heads, **spec)
        exact = results(formula, poisoned, torch.float64, heads, **spec)
        wrong += [
            f'{n} of {name}'
            for n, x, y in zip(NAMES, found, exact)
            if not bool((x.isnan() | ~y.isnan()).all())
        ]
    return not wrong, f'NaN lost in {", ".join(wrong)}' if wrong else ''


def _guard(tensors, dtype, heads, spec, ours):
    """Tensors on the second device while the first is current."""
    if torch.cuda.device_count() < 2:
        return True, 'one device only: not tried'
    other = [x.to('cuda:1') for x in tensors]
    found = results(fused, other, dtype, heads, **spec)
    return _same([x.to('cuda:0') for x in found], ours)


WAYS = {
    'again': _again,
    'NaN': _nan,
    'graph': _graph,
    'second stream': _stream,
    'compile': _compiled(None),
    'reduce-overhead': _compiled('reduce-overhead'),
    'second device': _guard,
}
INTERPRETED = ('again', 'NaN')
