import pytest
import torch

from .explicit import HEAD_DIM, SIZE


@pytest.fixture
def qkv():
    """Queries, keys and values in float64."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, SIZE[0] * SIZE[1], HEAD_DIM)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
