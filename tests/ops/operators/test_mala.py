"""MALA: what its equations promise, on explicit N x N score matrices."""

import pytest
import torch

from mala_mm.ops import apply_rotary, build_operator
from mala_mm.ops.fused.dispatch import eager

from .explicit import HEAD_DIM, SIZE, assert_rows, phi, randomised


def mala_scores(q, k, coefficient, rotary, eps=1e-6):
    """The N x N matrix that the linear form never builds."""
    q, k = phi(q), phi(k)
    z = coefficient * torch.einsum('bhid,bhjd->bhi', q, k)[..., None]
    turned = [apply_rotary(x, SIZE) if rotary else x for x in (q, k)]
    product = coefficient * torch.einsum('bhid,bhjd->bhij', *turned)
    return (1 + 1 / (z + eps)) * product - z / k.shape[2]


@pytest.mark.parametrize('rotary', [True, False])
@pytest.mark.parametrize('form, coefficient', [('published', HEAD_DIM**-0.5 / 15), ('paper', 1.0)])
def test_mala_is_its_score_matrix(qkv, form, coefficient, rotary):
    q, k, v = qkv
    scores = mala_scores(q, k, coefficient, rotary)
    out = eager('mala', q, k, v, SIZE, rotary=rotary, form=form)
    torch.testing.assert_close(out, scores @ v)
    assert_rows('mala', q, k, scores, rotary=rotary, form=form)


@pytest.mark.parametrize('form', ['published', 'paper'])
def test_mala_scores_sum_to_one(qkv, form):
    """A row of scores is what values of 1 give back; eps takes ``eps / (z + eps)`` of it."""
    q, k, _ = qkv
    ones = torch.ones_like(q)
    out = eager('mala', q, k, ones, SIZE, rotary=False, form=form, eps=0.0)
    torch.testing.assert_close(out, ones)
    coefficient = HEAD_DIM**-0.5 / 15 if form == 'published' else 1.0
    z = coefficient * (phi(q) @ phi(k).sum(2, keepdim=True).mT)
    out = eager('mala', q, k, ones, SIZE, rotary=False, form=form, eps=0.1)
    torch.testing.assert_close(out, (1 - 0.1 / (z + 0.1)).expand_as(out))


def test_rotation_breaks_the_sum_of_mala_scores(qkv):
    """The published models' z does not see the rotation: their rows do not sum to 1."""
    q, k, _ = qkv
    out = eager('mala', q, k, torch.ones_like(q), SIZE)
    assert (out - 1).abs().max() > 1e-2


def test_mala_follows_the_magnitude_of_the_query():
    """The direction of phi(q) fixed, its length times a: beta, gamma and the scores' ratio."""
    generator = torch.Generator().manual_seed(1)
    direction = 1 + torch.rand(HEAD_DIM, generator=generator, dtype=torch.float64)
    keys = 1 + torch.rand(2, HEAD_DIM, generator=generator, dtype=torch.float64)
    ratios = []
    for a in (1.0, 1.5, 3.0):
        q = (a * direction - 1).expand(1, 1, 2, -1)  # phi(x) = x + 1 for positive x
        k = (keys - 1)[None, None]
        # with the identity as values the output is the row of scores
        values = torch.zeros(1, 1, 2, HEAD_DIM, dtype=torch.float64)
        values[0, 0, :, :2] = torch.eye(2, dtype=torch.float64)
        scores = eager('mala', q, k, values, (1, 2), scale=0.01, rotary=False, form='paper', eps=0)
        z = 0.01 * a * (direction @ keys.sum(0))
        z_1 = z / a
        beta, beta_1 = 1 + 1 / z, 1 + 1 / z_1
        torch.testing.assert_close(beta, (beta_1 + a - 1) / a)
        expected = beta * 0.01 * a * (keys @ direction) - a * z_1 / 2
        torch.testing.assert_close(scores[0, 0, 0, :2], expected)
        assert (expected > 0).all()
        ratios.append((expected.max() / expected.min()).item())
    assert ratios == sorted(ratios) and ratios[2] > ratios[0] * 1.001


KERNELS = {'elu+1': phi, 'relu': lambda x: x.clamp(min=0), 'exp': torch.exp}
ABLATIONS = [
    dict(kernel='relu'),
    dict(kernel='exp'),
    dict(beta='none'),
    dict(gamma='none'),
    dict(beta='none', gamma='none'),
    dict(beta='learned', gamma='learned'),
    dict(unit_query=True),
]


def ablated_scores(operator, q, k, coefficient):
    kernel = KERNELS[operator.kernel]
    q, k = kernel(q), kernel(k)
    if operator.unit_query:
        q = q / (q**2).sum(-1, keepdim=True).sqrt()
    z = coefficient * torch.einsum('bhid,bhjd->bhi', q, k)[..., None]
    turned = [apply_rotary(x, SIZE) if operator.rotary else x for x in (q, k)]
    product = coefficient * torch.einsum('bhid,bhjd->bhij', *turned)
    beta = dict(
        computed=lambda: 1 + 1 / (z + 1e-6),
        none=lambda: 1,
        learned=lambda: operator.learned_beta[:, None, None],
    )[operator.beta]()
    gamma = dict(
        computed=lambda: z / k.shape[2],
        none=lambda: 0,
        learned=lambda: operator.learned_gamma[:, None, None],
    )[operator.gamma]()
    return beta * product - gamma


@pytest.mark.parametrize('rotary', [True, False])
@pytest.mark.parametrize('form, coefficient', [('published', HEAD_DIM**-0.5 / 15), ('paper', 1.0)])
@pytest.mark.parametrize('options', ABLATIONS, ids=str)
def test_an_ablation_is_its_score_matrix(qkv, options, form, coefficient, rotary):
    q, k, v = qkv
    operator = build_operator('mala', 3, HEAD_DIM, form=form, rotary=rotary, **options)
    operator = randomised(operator)
    expected = ablated_scores(operator, q, k, coefficient) @ v
    torch.testing.assert_close(operator(q, k, v, SIZE), expected)


@pytest.mark.parametrize('options', ABLATIONS, ids=str)
def test_rows_of_an_ablation_sum_as_the_paper_says(qkv, options):
    """To 1 with both factors, to 0 without beta, to 1 and more without gamma."""
    q, k, _ = qkv
    operator = build_operator('mala', 3, HEAD_DIM, rotary=False, eps=0.0, **options).double()
    sums = operator(q, k, torch.ones_like(q), SIZE)
    if 'learned' in options.values():
        # as it starts, beta = 1 and gamma = 0: the plain products
        none = build_operator('mala', 3, HEAD_DIM, rotary=False, beta='none', gamma='none')
        torch.testing.assert_close(sums, none.double()(q, k, torch.ones_like(q), SIZE))
    elif options == dict(beta='none'):
        torch.testing.assert_close(sums, torch.zeros_like(sums))
    elif options == dict(gamma='none'):
        assert (sums > 1).all()
        assert (operator(10 * q.abs(), k, torch.ones_like(q), SIZE) > sums).all()
    elif options == dict(beta='none', gamma='none'):
        assert (sums > 0).all()
    else:
        torch.testing.assert_close(sums, torch.ones_like(sums))


def test_a_class_token_is_one_of_the_keys(extra_qkv):
    """Without rotation no token has a place: the map may as well be one row."""
    extra, q, k, v = extra_qkv
    n = q.shape[2]
    expected = mala_scores(q, k, HEAD_DIM**-0.5 / n, False) @ v
    for options in (dict(), dict(backend='reference'), dict(gamma='none')):
        operator = build_operator('mala', 3, HEAD_DIM, rotary=False, **options)
        operator.expect_extra_tokens(extra)
        if operator.gamma == 'none':
            expected = ablated_scores(operator, q, k, HEAD_DIM**-0.5 / n) @ v
        torch.testing.assert_close(operator(q, k, v, SIZE), expected)


def test_an_ablation_with_a_backend_is_refused():
    match = r"'cpu' has no kernels for MALA with kernel='relu'.*set backend='auto'"
    with pytest.raises(ValueError, match=match):
        build_operator('mala', 1, 8, kernel='relu', backend='cpu')
    for options, known in ((dict(kernel='gelu'), 'elu'), (dict(gamma='learnt'), 'learned')):
        ((name, value),) = options.items()
        with pytest.raises(ValueError, match=f'{name} must be one of .*{known}.*got {value!r}'):
            build_operator('mala', 1, 8, **options)


def test_an_ablation_gates_like_any_operator():
    operator = randomised(build_operator('mala', 2, HEAD_DIM, beta='none'))
    generator = torch.Generator().manual_seed(0)
    qkvo = torch.randn(2, 8 * HEAD_DIM, *SIZE, generator=generator, dtype=torch.float64)
    q, k, v, o = qkvo.chunk(4, 1)
    heads = [x.reshape(2, 2, HEAD_DIM, -1).mT for x in (q, k, v)]
    y = operator(*heads, SIZE).mT.reshape(o.shape)
    torch.testing.assert_close(operator.gated(qkvo, lambda v: 2 * v), (y + 2 * v) * o)
