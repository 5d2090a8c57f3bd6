"""Bytes that each operation of one block reads and writes on a GPU under AMP, counted without one.

    python -m benchmarks.block
    python -m benchmarks.block --attn-type rala --channels 128 --heads 2 --size 100x167 --all

The block runs on the meta device, whose tensors have shapes and types but no numbers, forward and
backward, in training mode. A dispatch mode adds up what every operation takes and gives, each
tensor once (twice if changed in place), views nothing: what reaches the device's memory where a map
is larger than the caches. Everything is in units of t, one map of C channels in bfloat16. The bias
of a convolution counts as a pass of its own over the output, since cuDNN adds it that way; the
fused operators count their inputs and outputs once per direction (:mod:`benchmarks.traffic` counts
the launches of the attention, :mod:`benchmarks.aot_block` the partial sums of the others). Blocks
with softmax attention are left out: the meta device has no flash attention.

The floor is what the block moves if every part between two matrix products is one pass: see FLOOR.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import published
from benchmarks.operators import size_from
from mala_mm.models.layers import Block
from mala_mm.ops.fused import depthwise, dispatch, norm

# The hidden width is 3.5 C. Forward: position, residual and norm 3 t; qkvo 1 + 4; attention with
# lepe and gate 4 + 1; projection, scale, residual and norm 1 + 1 + 2; fc1 1 + 3.5; GELU and its
# convolution 3.5 + 3.5; fc2 and residual 3.5 + 1 + 1.
DTYPE = torch.bfloat16
FLOOR = 3 + 5 + 5 + 4 + 4.5 + 7 + 5.5


class Traffic(TorchDispatchMode):
    """Adds up bytes by name of operation in ``counts``."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        mutable = func._schema.is_mutable
        owned = {x.untyped_storage()._cdata for x in inputs}
        views = outputs and all(x.untyped_storage()._cdata in owned for x in outputs)
        if not outputs or (views and not mutable) or func.name().startswith('aten::empty'):
            return result
        moved = sum({id(x): size(x) for x in inputs + outputs}.values())
        name = func.name().partition('::')[2].partition('.')[0]
        if mutable and name.endswith('_') and name not in ('copy_', 'fill_', 'zero_'):
            moved += size(outputs[0])  # read and written
        if name == 'convolution' and isinstance(args[2], Tensor):
            self.counts['convolution, bias'] += 2 * size(outputs[0])
        self.counts[name] += moved
        return result


def size(x: Tensor) -> int:
    """Bytes of a tensor's elements; what is expanded is read once."""
    shape = [n for n, stride in zip(x.shape, x.stride()) if stride]
    return torch.Size(shape).numel() * x.element_size()


class Autocast(TorchFunctionMode):
    """What ``torch.autocast('cuda')`` does to the operations of these blocks; meta has none."""

    HALF = ('conv2d', 'linear', 'matmul', '__matmul__')
    FLOAT32 = ('layer_norm', 'softmax')

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, '__name__', '')
        dtype = DTYPE if name in self.HALF else torch.float32 if name in self.FLOAT32 else None

        def cast(x):
            floating = isinstance(x, Tensor) and x.is_floating_point()
            return x.to(dtype) if floating and dtype is not None else x

        return func(*map(cast, args), **{key: cast(x) for key, x in (kwargs or {}).items()})


class PublishedBlock(nn.Module):
    """The published form of the block, with the angles that its stage computes."""

    def __init__(self, channels: int, heads: int, attn_type: str) -> None:
        super().__init__()
        self.block = published.Block(channels, heads, attn_type, drop_path=0.1)
        self.rotary = published.Rotary(channels // heads)
        self.angles = None

    def prepare(self, x: Tensor) -> None:
        self.angles = self.rotary(*x.shape[2:])

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.angles)


def count(arguments: argparse.Namespace, ours: bool) -> dict[str, Counter[str]]:
    """Bytes by operation, forward and backward."""
    channels, heads, kind = arguments.channels, arguments.heads, arguments.attn_type
    with (
        torch.device('meta'),
        # On the meta device as on a GPU.
        mock.patch.dict(dispatch._OF_DEVICE, meta='triton'),
        mock.patch.dict(dispatch._WHY_NOT, triton=lambda *_: None),
        mock.patch.dict(depthwise._WHY_NOT, triton=lambda *_: None),
        mock.patch.dict(norm._WHY_NOT, triton=lambda *_: None),
    ):
        x = torch.empty(arguments.batch, channels, *arguments.size, dtype=DTYPE)
        if ours:
            x = x.contiguous(memory_format=torch.channels_last)
            block = Block(channels, heads, int(3.5 * channels), kind, drop_path_rate=0.1)
        else:
            block = PublishedBlock(channels, heads, kind)
            block.prepare(x)
        x.requires_grad_()
        with Traffic() as forward, Autocast():
            y = block.train()(x)
        grad = torch.empty_like(y)
        with Traffic() as backward:
            y.backward(grad)
    return dict(forward=forward.counts, backward=backward.counts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.block',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--attn-type', choices=('mala', 'rala'), default='mala')
    parser.add_argument('--channels', type=int, default=64)
    parser.add_argument('--heads', type=int, default=1)
    parser.add_argument('--size', type=size_from, default=(200, 334))
    parser.add_argument('--batch', type=int, default=2)
    parser.add_argument('--all', action='store_true', help='every operation, not the totals alone')
    arguments = parser.parse_args(argv)
    height, width = arguments.size
    t = arguments.batch * arguments.channels * height * width * 2
    print('# Bytes that a block moves\n')
    print(
        f'{arguments.attn_type}, {arguments.channels} channels, {height}x{width}, batch '
        f'{arguments.batch}, bf16 under AMP; t = {t / 2**20:.1f} MiB; floor forward {FLOOR} t\n'
    )
    print('| form | pass | operation | t |')
    print('|---|---|---|---|')
    for form in ('published', 'ours'):
        for direction, counts in count(arguments, form == 'ours').items():
            for name, moved in counts.most_common() if arguments.all else ():
                if moved >= t / 10:
                    print(f'| {form} | {direction} | {name} | {moved / t:.1f} |')
            print(f'| {form} | {direction} | all | {sum(counts.values()) / t:.1f} |')
    return 0


if __name__ == '__main__':
    sys.exit(main())
