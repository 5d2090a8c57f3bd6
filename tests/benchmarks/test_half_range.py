"""The range in float16: what is found is where the true values end."""

import pytest
import torch

from benchmarks import half_range


@pytest.mark.parametrize('name', half_range.FORMS)
def test_the_range_is_that_of_the_true_values(name):
    attention, options = half_range.FORMS[name]
    found, true = (
        half_range.largest(attention, (8, 8), (1, 1, 1), dtype, backend, **options)
        for dtype, backend in ((torch.float16, 'cpu'), (torch.float64, 'reference'))
    )
    assert found == true
    assert (found < half_range.MOST) == name.startswith('mala')
