"""Two processes compute what one does with the joint batch."""

import multiprocessing
import os

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from mala_mm.models import MAViT

ARCH = dict(embed_dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2))


def build(attn_types):
    torch.manual_seed(0)
    model = MAViT(ARCH, attn_types=attn_types, norm_eval=True)  # BN would see half of the batch
    model.init_weights()
    return model.train()


def gradients(model, images):
    """Gradients of a loss that is a mean over the batch."""
    loss = sum(out.square().mean() for out in model(images))
    loss.backward()
    return [p.grad for p in model.parameters()]


def worker(rank, port, attn_types, folder):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    torch.distributed.init_process_group('gloo', rank=rank, world_size=2)
    model = DistributedDataParallel(build(attn_types))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads = gradients(model, images()[2 * rank : 2 * rank + 2])
    optimizer.step()
    torch.save((grads, list(model.parameters())), f'{folder}/{rank}.pt')
    torch.distributed.destroy_process_group()


def images():
    return torch.randn(4, 3, 64, 80, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize('linear', ['mala', 'rala'])
def test_gradients_of_two_processes_are_those_of_the_joint_batch(linear, tmp_path, free_port):
    attn_types = (linear, linear, 'softmax', 'softmax')
    context = multiprocessing.get_context('spawn')
    processes = [
        context.Process(target=worker, args=(rank, free_port, attn_types, tmp_path))
        for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        assert process.exitcode == 0
    (first, weights), (second, others) = (torch.load(tmp_path / f'{rank}.pt') for rank in (0, 1))
    joint = gradients(build(attn_types), images())
    for a, b, c in zip(first, second, joint):
        assert torch.equal(a, b)
        # Sums of some 10^4 float32 terms in another order: 2^-24 * sqrt(10^4) of the largest
        # is 6e-6; ten times that.
        assert (a - c).abs().max() <= 6e-5 * c.abs().max().clamp(min=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(weights, others))
