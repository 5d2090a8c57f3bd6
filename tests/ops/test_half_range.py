"""float16: results are finite exactly where their true values fit its range."""

import pytest
import torch

from mala_mm.ops import linear_attention, mala_attention, rala_attention

SIZE, WIDTH = (12, 16), 32
HALF_MAX = 65520  # values from here on round to infinity
FORMS = {
    'mala, published': (mala_attention, dict(form='published')),
    'mala, paper': (mala_attention, dict(form='paper')),
    'rala': (rala_attention, {}),
    'linear': (linear_attention, {}),
}


@pytest.mark.parametrize('backend', ['reference', 'cpu'])
@pytest.mark.parametrize('name', FORMS)
def test_float16_is_finite_where_the_true_value_fits(name, backend):
    """No sum or product on the way overflows: what is infinite, no scaling could save."""
    attention, options = FORMS[name]
    overflowed = 0
    for exponent in range(-13, 14, 2):
        generator = torch.Generator().manual_seed(0)
        q, k, v, grad = (
            torch.randn(1, 1, SIZE[0] * SIZE[1], WIDTH, generator=generator) for _ in range(4)
        )
        half = [(x * 2.0**exponent).half().requires_grad_() for x in (q, k, v)]
        true = [x.detach().double().requires_grad_() for x in half]
        grad = grad.half()
        y = attention(*half, size=SIZE, backend=backend, **options)
        exact = attention(*true, size=SIZE, backend='reference', **options)
        y.backward(grad)
        exact.backward(grad.double())
        for found, value in zip((y, *(x.grad for x in half)), (exact, *(x.grad for x in true))):
            fits = value.abs() < HALF_MAX
            near = (value.abs() / HALF_MAX - 1).abs() < 2e-3  # rounded to float16 either way
            assert ((found.isfinite() == fits) | near).all(), (exponent, value.abs().max())
            overflowed += int((~fits).sum())
    assert (overflowed > 0) == name.startswith('mala')
