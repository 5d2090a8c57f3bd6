"""Backbones side by side in training: forward and backward, and what is saved in between.

    python -m benchmarks.training --threads 2 --sizes 512x512 --batch 2
    python -m benchmarks.training --device cuda --amp bf16 --sizes 800x1333 --batch 2 --compile

The models, the check and the options are those of :mod:`benchmarks.models`; here the gradients of
all weights and of the images are held against those of the published form as well. Timed is a
step without optimizer: forward, and backward from a random gradient of every map, in training mode
with drop path.
"""

from __future__ import annotations

import argparse
import functools
import sys

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.operators import extra_bytes


def step(module: nn.Module, images: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward; gradients of the maps are 1 where a loss would give them."""
    maps = module(images)
    module.zero_grad(set_to_none=True)
    torch.autograd.backward(maps, [torch.ones_like(x) for x in maps])
    return maps


def outcomes(module: nn.Module, images: Tensor) -> tuple[Tensor, ...]:
    """The maps and the gradient of the images, in evaluation mode: nothing is dropped."""
    module.eval()
    images = images.clone().requires_grad_()
    maps = step(module, images)
    module.zero_grad(set_to_none=True)
    return *(x.detach() for x in maps), images.grad


def saved_bytes(module: nn.Module, images: Tensor) -> int:
    """Bytes of all memory that the graph keeps for the backward pass, weights left out."""
    known = {x.untyped_storage().data_ptr() for x in (*module.parameters(), *module.buffers())}
    storages = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        maps = module(images)  # alive until the sum is made: no address is used twice
    kept = sum(size for address, size in storages.items() if address not in known)
    del maps
    return kept


def measure(
    competitors: list[models.Competitor], arguments: argparse.Namespace, size: tuple[int, int]
) -> list[dict]:
    """The rows of one size."""
    competitors = [c for c in competitors if c.amp]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(arguments.batch, 3, *size, generator=generator).to(arguments.device)
    admitted, refused = models.affordable(competitors, arguments, size)
    errors = models.check(admitted, lambda module: outcomes(module, images))
    admitted = [c for c in admitted if errors.get(c.name, 0) <= models.TOLERANCE]

    rows = {
        c.name: dict(size=list(size), name=c.name, error=errors.get(c.name)) for c in competitors
    }
    for name, reason in refused.items():
        rows[name]['left_out'] = reason
    calls = {
        c.name: functools.partial(autocast_step, c.module, images, arguments) for c in admitted
    }
    for c in admitted:
        c.module.train()
        with models.autocast(arguments):
            rows[c.name]['saved'] = saved_bytes(c.module, images)
        rows[c.name]['memory'] = extra_bytes(calls[c.name], arguments.device)
    for name, times in models.take_turns(calls, arguments).items():
        rows[name].update(models.summary(times, arguments.batch))
    return list(rows.values())


def autocast_step(
    module: nn.Module, images: Tensor, arguments: argparse.Namespace
) -> tuple[Tensor, ...]:
    """A step as a recipe takes it: the forward under autocast, the backward outside."""
    with models.autocast(arguments):
        maps = module(images)
    module.zero_grad(set_to_none=True)
    torch.autograd.backward(maps, [torch.ones_like(x) for x in maps])
    return maps


TRAINING = {
    **models.INFERENCE,
    'saved MiB': lambda row: f'{row["saved"] / 2**20:.0f}',
}


def main(argv: list[str] | None = None) -> int:
    return models.run(
        'training',
        models.parser('training', __doc__),
        argv,
        measure,
        TRAINING,
        'Saved: kept for the backward pass. Peak memory is held beyond the images, the weights '
        'and the maps.',
        {
            'forward and backward, images per second': lambda row: row['images'],
            'saved for backward, MiB': lambda row: row['saved'] / 2**20,
        },
    )


if __name__ == '__main__':
    sys.exit(main())
