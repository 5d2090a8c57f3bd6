"""How fast copies, single kernels, operators, layers and blocks are: jobs whose rows are times.

Times are microseconds of the device, from graphs of many calls on memory that no cache holds all
of. Beside each stands the time of a copy that moves as many bytes.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import published, traffic
from benchmarks.gpu.checks import AROUND, DTYPES, fused
from benchmarks.gpu.clock import (
    copy_seconds,
    device,
    event_seconds,
    graph_seconds,
    host_seconds,
    peak_bytes,
)
from benchmarks.traffic import Shape
from mala_mm import ops
from mala_mm.ops.fused.depthwise import depthwise
from mala_mm.ops.fused.norm import residual_norm
from mala_mm.ops.fused.triton import launch
from mala_mm.ops.registry import split_heads

CACHE = 2**28
"""Bytes that sets of inputs have together at least: several times any L2 cache."""


def shape_of(name: str) -> Shape:
    """A published shape by its name, or a toy for the dry run."""
    return {x.name: x for x in traffic.SHAPES}.get(name) or Shape('toy', 1, 3, 5, 1, 32)


def copies(nbytes: list[int]) -> Iterator[dict]:
    """Device-to-device copies."""
    for number in nbytes:
        seconds = copy_seconds(number)
        yield {'bytes': number, 'us': 1e6 * seconds, 'GB/s': 2 * number / seconds / 1e9}


@functools.cache
def copy_us(nbytes: int) -> float:
    """Microseconds in which a copy reads and writes ``nbytes`` together."""
    return 1e6 * copy_seconds(nbytes // 2)


def maps(shape: Shape, dtype: torch.dtype, token_major: bool) -> list[list[Tensor]]:
    """Sets of (qkvo, lepe, gradient), together larger than the cache."""
    channels = shape.heads * shape.head_dim
    sets = 1 if device() == 'cpu' else max(2, min(8, -(-CACHE // (6 * shape.unit(dtype)))))
    form = torch.channels_last if token_major else torch.contiguous_format
    found = []
    for _ in range(sets):
        qkvo, lepe, grad = (
            torch.randn(
                shape.batch, n * channels, shape.height, shape.width, device=device(), dtype=dtype
            ).to(memory_format=form)
            for n in (4, 1, 1)
        )
        found.append([qkvo.requires_grad_(), lepe.requires_grad_(), grad])
    return found


# --- single kernels -------------------------------------------------------------------------------


def kernels(shape: str, dtype: str, kind: str = 'mala') -> Iterator[dict]:
    """Every launch of a gated forward and backward by itself, beside its bytes."""
    shape, kind_of = shape_of(shape), DTYPES[dtype]
    sets = maps(shape, kind_of, token_major=True)
    multiprocessors = launch._device(0)[2]
    for direction, model in (('forward', traffic.forward), ('backward', traffic.backward)):
        runs = []
        for qkvo, lepe, grad in sets:
            out = fused(qkvo, lepe, shape.heads, kind)
            if direction == 'forward':
                with launch.recorded() as found:
                    fused(qkvo.detach(), lepe.detach(), shape.heads, kind)
            else:
                with launch.recorded() as found:
                    torch.autograd.grad(out, (qkvo, lepe), grad)
            runs += found
        expected = model(shape, kind_of, multiprocessors, kind, True)
        for place, one in enumerate(runs[0].plan.launches):
            name = one.kernel.__name__
            memory = expected[place].memory if place < len(expected) else None
            row = dict(shape=shape.name, dtype=dtype, kind=kind, direction=direction, kernel=name)
            row |= {'place': place, 'grid': list(one.grid), **one.options, 'bytes': memory}
            if device() != 'cpu':
                again = [functools.partial(r.repeat, r.plan.launches[place]) for r in runs]
                row['us'] = 1e6 * graph_seconds(again)
                row['copy us'] = copy_us(memory)
            yield row


# --- operators ------------------------------------------------------------------------------------


def angles_of(shape: Shape, dtype: torch.dtype) -> published.Turn:
    """The angles that the published form keeps for a stage."""
    rotary = published.Rotary(shape.head_dim).to(device())
    return tuple(x.to(dtype) for x in rotary(shape.height, shape.width))


def competitors(shape: Shape, dtype: torch.dtype, compiled: bool) -> dict[str, Callable]:
    """Functions of (qkvo, lepe): the mixer between its convolutions, and attention alone."""
    size, heads = (shape.height, shape.width), shape.heads
    angles = angles_of(shape, dtype)

    def published_mixer(qkvo, lepe):
        q, k, v, gate = qkvo.chunk(4, 1)
        q, k, v = (
            x.reshape(x.shape[0], heads, -1, shape.tokens).transpose(2, 3).contiguous()
            for x in (q, k, v)
        )
        y = published.mala(q, k, v, angles).transpose(2, 3).reshape(lepe.shape)
        return (y + lepe) * gate

    def core(function):
        def run(qkvo, _):
            return function(*(split_heads(x, heads) for x in qkvo.chunk(4, 1)[:3]))

        return run

    def kernels_of(operator):
        return core(functools.partial(operator, size=size, backend='triton'))

    found = {
        'mixer, kernels': functools.partial(fused, heads=heads),
        'mixer, published': published_mixer,
        'attention, kernels': kernels_of(ops.mala_attention),
        'attention, published': core(lambda q, k, v: published.mala(q, k, v, angles)),
        'RALA, kernels': kernels_of(ops.rala_attention),
        'attention, softmax (SDPA)': core(F.scaled_dot_product_attention),
    }
    if compiled:
        found['mixer, published, compiled'] = torch.compile(published_mixer)
    return found


def operator(shape: str, dtype: str, name: str) -> Iterator[dict]:
    """One competitor at one shape: forward, and forward with backward.

    Ours and SDPA get token-major maps, the published form those in which it runs, channel-first.
    """
    shape, kind_of = shape_of(shape), DTYPES[dtype]
    function = competitors(shape, kind_of, 'compiled' in name)[name]
    sets = maps(shape, kind_of, token_major='published' not in name)
    gated, ours = name.startswith('mixer'), 'kernels' in name
    kind = 'rala' if name.startswith('RALA') else 'mala'

    def forward(qkvo, lepe, _):
        with torch.no_grad():
            return function(qkvo, lepe)

    def both(qkvo, lepe, grad):
        out = function(qkvo, lepe)
        if gated:
            return torch.autograd.grad(out, (qkvo, lepe), grad)
        return torch.autograd.grad(out, qkvo, split_heads(grad, shape.heads))

    least = traffic.floor('forward', kind, gated)
    for direction, call in (('forward', forward), ('forward + backward', both)):
        if call is both:
            least += traffic.floor('backward', kind, gated)
        calls = [functools.partial(call, *tensors) for tensors in sets]
        # A softmax over 66,800 tokens takes milliseconds: few calls, no graph.
        seconds = (graph_seconds if ours or 'mixer' in name else event_seconds)(calls)
        nbytes = least * shape.unit(kind_of)
        row = dict(shape=shape.name, dtype=dtype, name=name, direction=direction)
        row |= {'us': 1e6 * seconds, 'peak bytes': peak_bytes(calls[0])}
        if ours:
            row |= {'least bytes': nbytes, 'copy us': copy_us(nbytes)}
        yield row


def crossover(sizes: list[list[int]], dtype: str) -> Iterator[dict]:
    """Linear beside softmax attention over growing maps, one head of 64."""
    for height, width in sizes:
        shape = Shape(f'{height}x{width}', 1, height, width, 1, 32 if device() == 'cpu' else 64)
        functions = competitors(shape, DTYPES[dtype], compiled=False)
        sets = maps(shape, DTYPES[dtype], token_major=True)
        for name in ('attention, kernels', 'attention, softmax (SDPA)'):
            with torch.no_grad():
                calls = [functools.partial(functions[name], *x[:2]) for x in sets]
                seconds = event_seconds(calls)
            yield {'size': [height, width], 'name': name, 'us': 1e6 * seconds}


def host(sizes: list[list[int]], dtype: str) -> Iterator[dict]:
    """A call as a program issues it, beside the device's share: from where on the GPU is busy."""
    for height, width in sizes:
        shape = Shape(f'{height}x{width}', 2, height, width, 1, 32 if device() == 'cpu' else 64)
        ((qkvo, lepe, grad), *_) = maps(shape, DTYPES[dtype], token_major=True)

        def forward(qkvo=qkvo, lepe=lepe):
            with torch.no_grad():
                return fused(qkvo, lepe, 1)

        def both(qkvo=qkvo, lepe=lepe, grad=grad):
            return torch.autograd.grad(fused(qkvo, lepe, 1), (qkvo, lepe), grad)

        for direction, call in (('forward', forward), ('forward + backward', both)):
            issued, busy = host_seconds(call), graph_seconds([call])
            row = {'size': [height, width], 'direction': direction}
            yield row | {'call us': 1e6 * issued, 'device us': 1e6 * busy}


def sweep(number: int, dtype: str) -> Iterator[dict]:
    """Random sizes, each seen for the first time: neither retuned nor compiled anew."""
    chance = random.Random(0)
    low, high = (2, 6) if device() == 'cpu' else (40, 300)
    for _ in range(number):
        size = [chance.randint(low, high), chance.randint(low, high)]
        shape = Shape('sweep', 2, *size, 1, 32 if device() == 'cpu' else 64)
        sets = maps(shape, DTYPES[dtype], token_major=True)
        with torch.no_grad():
            first = host_seconds(lambda s=sets: fused(*s[0][:2], 1), number=1)
            seconds = graph_seconds([functools.partial(fused, *x[:2], 1) for x in sets])
        nbytes = traffic.floor('forward', 'mala', True) * shape.unit(DTYPES[dtype])
        row = {'size': size, 'us': 1e6 * seconds, 'call us': 1e6 * first}
        yield row | {'copy us': copy_us(nbytes) if device() != 'cpu' else None}


# --- layers and blocks ----------------------------------------------------------------------------


def layers(shape: str, dtype: str) -> Iterator[dict]:
    """Depthwise convolutions, LayerNorm and GELU as they run in the block: token-major maps."""
    from mala_mm.models.layers import LayerNorm2d

    shape = shape_of(shape)
    channels, hidden = shape.heads * shape.head_dim, int(3.5 * shape.heads * shape.head_dim)
    for name, width, module in (
        ('depthwise 3x3', channels, nn.Conv2d(channels, channels, 3, 1, 1, groups=channels)),
        ('depthwise 5x5', channels, nn.Conv2d(channels, channels, 5, 1, 2, groups=channels)),
        ('depthwise 3x3, FFN', hidden, nn.Conv2d(hidden, hidden, 3, 1, 1, groups=hidden)),
        ('LayerNorm', channels, LayerNorm2d(channels)),
        ('GELU, FFN', hidden, nn.GELU()),
        ('convolution 1x1, C to 4C', channels, nn.Conv2d(channels, 4 * channels, 1)),
    ):
        module = module.to(device(), DTYPES[dtype]).to(memory_format=torch.channels_last)
        size = (shape.batch, width, shape.height, shape.width)
        x = torch.randn(size, device=device(), dtype=DTYPES[dtype])
        x = x.to(memory_format=torch.channels_last)
        sets = [x, *(x.clone() for _ in range(min(7, CACHE // x.nbytes)))][: 1 if x.is_cpu else 8]
        with torch.no_grad():
            moved = x.nbytes + module(x).nbytes
            seconds = graph_seconds([functools.partial(module, y) for y in sets])
        row = dict(shape=shape.name, dtype=dtype, name=name, bytes=moved)
        yield row | {'us': 1e6 * seconds, 'copy us': copy_us(moved)}


def around(shape: str, dtype: str, layer: str) -> Iterator[dict]:
    """One of the kernels around the attention beside plain PyTorch, on token-major maps."""
    shape, of = shape_of(shape), AROUND[layer]
    channels = int((3.5 if layer == 'feed-forward' else 1) * shape.heads * shape.head_dim)
    size = (shape.batch, channels, shape.height, shape.width)
    nbytes = torch.Size(size).numel() * DTYPES[dtype].itemsize
    sets = []
    for _ in range(1 if device() == 'cpu' else max(2, min(8, -(-CACHE // (3 * nbytes))))):
        maps = (torch.randn(size, device=device(), dtype=DTYPES[dtype]) for _ in range(3))
        x, branch, grad = (x.to(memory_format=torch.channels_last) for x in maps)
        sets.append((x.requires_grad_(), branch.requires_grad_(), grad))
    taps = of[0] if of else 1
    weight = torch.randn(channels, 1, taps, taps, device=device(), requires_grad=True)
    bias = torch.randn(channels, device=device(), requires_grad=True)

    def run(backend: str, x: Tensor, branch: Tensor) -> tuple[Tensor, ...]:
        if of:
            return (depthwise(x, weight, bias, *of[1:], backend),)
        return residual_norm(x, weight.flatten(), bias, 1e-6, branch, backend=backend)

    def forward(backend: str, x: Tensor, branch: Tensor, _: Tensor) -> None:
        with torch.no_grad():
            run(backend, x, branch)

    def both(backend: str, x: Tensor, branch: Tensor, grad: Tensor) -> None:
        outs = run(backend, x, branch)
        inputs = (x, weight, bias) if of else (x, branch, weight, bias)
        torch.autograd.grad(outs, inputs, [grad] * len(outs))

    moved = {forward: 2 if of else 4, both: 5 if of else 8}  # maps that have to be
    for backend in ('triton', 'reference'):
        for direction, call in (('forward', forward), ('forward + backward', both)):
            seconds = graph_seconds([functools.partial(call, backend, *maps) for maps in sets])
            name = f'{layer}, {"kernel" if backend == "triton" else "PyTorch"}'
            row = dict(shape=shape.name, dtype=dtype, name=name, direction=direction)
            yield row | {'us': 1e6 * seconds, 'copy us': copy_us(moved[call] * nbytes)}


def block(shape: str, dtype: str, name: str) -> Iterator[dict]:
    """A block in evaluation and as a training step under autocast: ours or the published form."""
    from mala_mm.models.layers import Block

    shape = shape_of(shape)
    channels = shape.heads * shape.head_dim
    size = (shape.batch, channels, shape.height, shape.width)
    x = torch.randn(size, device=device(), requires_grad=True)
    if name == 'ours':
        module = Block(channels, shape.heads, int(3.5 * channels), 'mala').to(device())
        module = module.to(memory_format=torch.channels_last)
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
        arguments = (x,)
    else:
        module = published.Block(channels, shape.heads, 'mala').to(device())
        arguments = (x, angles_of(shape, torch.float32))
    run = torch.compile(module) if name.endswith('compiled') else module
    grad = torch.randn_like(x)

    def forward():
        with torch.no_grad(), torch.autocast(device(), DTYPES[dtype]):
            return run(*arguments)

    def step():
        with torch.autocast(device(), DTYPES[dtype]):
            out = run(*arguments)
        torch.autograd.backward(out, grad.to(out.dtype))
        module.zero_grad(set_to_none=True)

    for direction, call in (('forward', forward), ('training step', step)):
        row = dict(shape=shape.name, dtype=dtype, name=name, direction=direction)
        seconds = event_seconds([call])
        yield row | {'us': 1e6 * seconds, 'call us': 1e6 * host_seconds(call, 5),
                     'peak bytes': peak_bytes(call)}  # fmt: skip
