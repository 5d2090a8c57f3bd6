"""What the tests of the explicit score matrices share."""

import torch

from mala_mm.ops import build_operator

SIZE = (3, 5)
HEAD_DIM = 8


def phi(x):
    return torch.where(x > 0, x + 1, x.exp())


def assert_rows(name, q, k, expected, **options):
    """The rows that an operator gives are those of its explicit matrix."""
    operator = build_operator(name, q.shape[1], HEAD_DIM, **options)
    rows = [11, 0, 4]
    torch.testing.assert_close(operator.scores(q, k, SIZE, rows), expected[:, :, rows])


def stencil(weight, size, extra=0):
    """A depthwise convolution (c, kh, kw) of the tokens on a map as matrices (c, N, N)."""
    height, width = size
    channels, rows, columns = weight.shape
    tokens = extra + height * width
    matrix = weight.new_zeros(channels, tokens, tokens)
    for i in range(height * width):
        for j in range(height * width):
            dy, dx = j // width - i // width + rows // 2, j % width - i % width + columns // 2
            if 0 <= dy < rows and 0 <= dx < columns:
                matrix[:, extra + i, extra + j] = weight[:, dy, dx]
    return matrix


def randomised(operator, seed=2):
    """The operator in float64, with parameters that leave nothing at its start value."""
    generator = torch.Generator().manual_seed(seed)
    operator = operator.double()
    for parameter in operator.parameters():
        value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(value)
    return operator
