"""Where the kernels' tests run: on the GPU, or in Triton's interpreter where there is none."""

import pytest
import torch

pytest.importorskip('triton', reason='the Triton backend is optional')

DEVICES = ['cuda'] if torch.cuda.is_available() else [pytest.param('cpu', id='interpreter')]


@pytest.fixture(params=DEVICES)
def device(request):
    """The device of the inputs, where fresh memory is NaN: what is read too early shows.

    ``tests/conftest.py`` chose the interpreter, before Triton was imported.
    """
    torch.use_deterministic_algorithms(True)  # which fills what torch.empty returns
    assert torch.empty(64, device=request.param).isnan().all()
    yield request.param
    torch.use_deterministic_algorithms(False)
