"""The specification itself: what the equations promise, on explicit N x N score matrices."""

import pytest
import torch

from mala_mm.ops import apply_rotary, reference, rotary_frequencies, rotary_tables

SIZE = (3, 5)
HEAD_DIM = 8


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, SIZE[0] * SIZE[1], HEAD_DIM)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def phi(x):
    return torch.where(x > 0, x + 1, x.exp())


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
    expected = mala_scores(q, k, coefficient, rotary) @ v
    out = reference.mala(q, k, v, SIZE, rotary=rotary, form=form)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize('rotary', [True, False])
def test_rala_is_its_score_matrix(qkv, rotary):
    q, k, v = qkv
    fq, fk = phi(q), phi(k)
    logits = HEAD_DIM**-0.5 * torch.einsum('bhd,bhjd->bhj', fq.mean(2), fk)
    fk = fk * 15 * logits.softmax(-1)[..., None]
    z = torch.einsum('bhid,bhjd->bhi', fq, fk)[..., None] / 15
    turned = [apply_rotary(x, SIZE) if rotary else x for x in (fq, fk)]
    scores = torch.einsum('bhid,bhjd->bhij', *turned) / 15 / (z + 1e-6)
    torch.testing.assert_close(reference.rala(q, k, v, SIZE, rotary=rotary), scores @ v)


@pytest.mark.parametrize('rotary', [True, False])
def test_linear_is_its_score_matrix(qkv, rotary):
    q, k, v = qkv
    fq, fk = phi(q), phi(k)
    z = torch.einsum('bhid,bhjd->bhi', fq, fk)[..., None]
    turned = [apply_rotary(x, SIZE) if rotary else x for x in (fq, fk)]
    scores = torch.einsum('bhid,bhjd->bhij', *turned) / (z + 1e-6)
    torch.testing.assert_close(reference.linear(q, k, v, SIZE, rotary=rotary), scores @ v)


def test_softmax_is_its_score_matrix(qkv):
    q, k, v = qkv
    turned = [apply_rotary(x, SIZE) for x in (q, k)]
    scores = (HEAD_DIM**-0.5 * torch.einsum('bhid,bhjd->bhij', *turned)).softmax(-1)
    torch.testing.assert_close(reference.softmax(q, k, v, SIZE), scores @ v)


@pytest.mark.parametrize('form', ['published', 'paper'])
def test_mala_scores_sum_to_one(qkv, form):
    """A row of scores is what values of 1 give back; eps takes ``eps / (z + eps)`` of it."""
    q, k, _ = qkv
    ones = torch.ones_like(q)
    out = reference.mala(q, k, ones, SIZE, rotary=False, form=form, eps=0.0)
    torch.testing.assert_close(out, ones)
    coefficient = HEAD_DIM**-0.5 / 15 if form == 'published' else 1.0
    z = coefficient * (phi(q) @ phi(k).sum(2, keepdim=True).mT)
    out = reference.mala(q, k, ones, SIZE, rotary=False, form=form, eps=0.1)
    torch.testing.assert_close(out, (1 - 0.1 / (z + 0.1)).expand_as(out))


def test_rotation_breaks_the_sum_of_mala_scores(qkv):
    """The published models' z does not see the rotation: their rows do not sum to 1."""
    q, k, _ = qkv
    out = reference.mala(q, k, torch.ones_like(q), SIZE)
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
        scores = reference.mala(q, k, values, (1, 2), scale=0.01, rotary=False, form='paper', eps=0)
        z = 0.01 * a * (direction @ keys.sum(0))
        z_1 = z / a
        beta, beta_1 = 1 + 1 / z, 1 + 1 / z_1
        torch.testing.assert_close(beta, (beta_1 + a - 1) / a)
        expected = beta * 0.01 * a * (keys @ direction) - a * z_1 / 2
        torch.testing.assert_close(scores[0, 0, 0, :2], expected)
        assert (expected > 0).all()
        ratios.append((expected.max() / expected.min()).item())
    assert ratios == sorted(ratios) and ratios[2] > ratios[0] * 1.001


@pytest.mark.parametrize('name', ['mala', 'rala', 'linear', 'softmax'])
def test_permuting_keys_and_values_changes_nothing(qkv, name):
    q, k, v = qkv
    order = torch.randperm(15, generator=torch.Generator().manual_seed(2))
    function = getattr(reference, name)
    expected = function(q, k, v, SIZE, rotary=False)
    torch.testing.assert_close(
        function(q, k[:, :, order], v[:, :, order], SIZE, rotary=False), expected
    )


@pytest.mark.parametrize('name', ['mala', 'rala', 'linear', 'softmax'])
def test_gradcheck(name):
    generator = torch.Generator().manual_seed(3)
    # Off the kink of elu's second derivative at 0, which central differences would straddle.
    q, k, v = (
        torch.randn(1, 2, 6, 4, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(3)
    )
    function = getattr(reference, name)
    assert torch.autograd.gradcheck(lambda *x: function(*x, (2, 3)), (q, k, v))


def test_rotary_frequencies_include_the_end_point():
    expected = torch.tensor([1.0, 10000 ** (-1 / 3), 10000 ** (-2 / 3), 1e-4], dtype=torch.float64)
    torch.testing.assert_close(rotary_frequencies(16), expected)


def test_rotary_turns_pairs_by_row_and_column():
    """Against the rotation as complex numbers, token by token."""
    height, width, head_dim = 4, 3, 16
    x = torch.randn(1, 1, height * width, head_dim, dtype=torch.float64)
    theta = 10000 ** -torch.linspace(0, 1, head_dim // 4, dtype=torch.float64)
    turned = apply_rotary(x, (height, width))
    for token in range(height * width):
        row, column = divmod(token, width)
        pairs = torch.view_as_complex(x[0, 0, token].view(-1, 2))
        angle = torch.cat([row * theta, column * theta])
        expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten()
        torch.testing.assert_close(turned[0, 0, token], expected)


def test_rotary_tables_stay_exact_at_large_indices():
    """float32 angles would be off by 1e-3 here, a bfloat16 table by more than 1."""
    row_cos, row_sin, _, _ = rotary_tables((60001, 1), 8)
    angle = torch.tensor([60000.0, 6.0], dtype=torch.float64)
    assert row_cos.dtype == torch.float32
    # rounding to float32 costs at most half a unit in the last place of 1
    torch.testing.assert_close(row_cos[60000].double(), angle.cos(), rtol=0, atol=2.0**-24)
    torch.testing.assert_close(row_sin[60000].double(), angle.sin(), rtol=0, atol=2.0**-24)


def test_half_types_are_turned_in_float32():
    """A model cast to bfloat16 keeps its angles: only input and output are rounded."""
    x = torch.randn(1, 1, 900, 8).bfloat16()
    expected = apply_rotary(x.double(), (1, 900))
    # half a unit in the last place: 8 bits of significand
    torch.testing.assert_close(
        apply_rotary(x, (1, 900)).double(), expected, rtol=2.0**-8, atol=1e-6
    )
