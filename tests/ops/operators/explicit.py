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
