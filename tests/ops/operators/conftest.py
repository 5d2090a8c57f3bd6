import pytest
import torch

from .explicit import HEAD_DIM, SIZE


def tokens(extra):
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, extra + SIZE[0] * SIZE[1], HEAD_DIM)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.fixture
def qkv():
    """Queries, keys and values in float64."""
    return tokens(0)


@pytest.fixture(params=[0, 1], ids=['map', 'class token'])
def extra_qkv(request):
    """The number of tokens before those of the map, and queries, keys and values in float64."""
    return request.param, *tokens(request.param)
