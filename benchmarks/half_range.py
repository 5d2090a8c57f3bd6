"""Measures up to which magnitude of q, k and v each operator is finite in float16.

    python -m benchmarks.half_range

q, k, v are normal numbers times a power of two, up to 2^13, the gradient is normal. The
table gives, per operator, number of tokens and what is scaled, the largest factor up to which the
output and all gradients are finite, and in brackets that of the true values, computed in float64
and rounded to float16: where the two are equal, no scaling inside the operator could save more.
"""

import bisect
import itertools

import torch

from mala_mm.ops import linear_attention, mala_attention, rala_attention

FORMS = {
    'mala, published': (mala_attention, dict(form='published')),
    'mala, paper': (mala_attention, dict(form='paper')),
    'mala, paper, scale=1/N': (mala_attention, dict(form='paper', scale=None)),
    'rala': (rala_attention, {}),
    'linear': (linear_attention, {}),
}
SIZES = ((16, 16), (64, 64))
WIDTH = 64
MOST = 13  # 2^13 times 4 is half of what float16 holds
SCALED = {'q, k': (1, 1, 0), 'v': (0, 0, 1), 'q, k, v': (1, 1, 1)}


def largest(attention, size, powers, dtype, backend, **options):
    """The largest exponent up to which output and gradients are finite in float16."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 1, size[0] * size[1], WIDTH)
    *normal, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    if 'scale' in options:
        options['scale'] = 1 / shape[2]

    def overflows(exponent):
        inputs = [
            (x * 2.0 ** (exponent * p)).half().to(dtype).requires_grad_()
            for x, p in zip(normal, powers)
        ]
        y = attention(*inputs, size=size, backend=backend, **options)
        gradients = torch.autograd.grad(y, inputs, grad.half().to(dtype))
        return not all(x.half().isfinite().all() for x in (y, *gradients))

    return bisect.bisect_left(range(MOST + 1), True, key=overflows) - 1


def main():
    print('| operator | tokens | ' + ' | '.join(SCALED) + ' |')
    print('|---|---|' + '---|' * len(SCALED))
    for (name, (attention, options)), size in itertools.product(FORMS.items(), SIZES):
        cells = []
        for powers in SCALED.values():
            found, true = (
                2 ** largest(attention, size, powers, dtype, backend, **options)
                for dtype, backend in ((torch.float16, 'cpu'), (torch.float64, 'reference'))
            )
            cells.append(f'{found} ({true})')
        print(f'| {name} | {size[0] * size[1]} | ' + ' | '.join(cells) + ' |')


if __name__ == '__main__':
    main()
