"""Rows of scores of a layer, their distribution, and what becomes of it as queries grow."""

from math import log

import pytest
import torch

from mala_mm.analysis.scores import (
    check_operators,
    distributions,
    lengthen,
    mean_distribution,
    score_rows,
    spread_rows,
)
from mala_mm.errors import UserError
from mala_mm.ops import build_operator
from mala_mm.ops.registry import feature_map


def test_rows_times_values_are_the_output(seen):
    for layer in seen.layers:
        rows = spread_rows(layer.q.shape[2], 5)
        scores = score_rows(layer, rows)
        assert scores.shape == (layer.num_heads, 5, layer.q.shape[2])
        y = layer.operator.equations(layer.q, layer.k, layer.v, layer.size)[0]
        # sums of at most 384 products in float32
        torch.testing.assert_close(scores @ layer.v[0], y[:, rows], rtol=1e-4, atol=1e-4)


def test_another_operator_on_the_same_queries(seen):
    layer = seen.layers[0]
    turned = score_rows(layer, [7], layer.with_operator('softmax'))
    plain = score_rows(layer, [7], layer.with_operator('softmax', rotary=False))
    torch.testing.assert_close(turned.sum(-1), torch.ones(1, 1))
    assert (turned - plain).abs().max() > 0


def test_distributions_of_known_rows():
    flat, peak = torch.full((4,), 0.25), torch.tensor([0.0, 1.0, 0.0, 0.0])
    signed = torch.tensor([3.0, -1.0, -1.0, 1.0])
    found = distributions(torch.stack([flat, peak, signed])[:, None])
    assert found[0].entropy == pytest.approx(1) and found[0].peak == pytest.approx(1)
    assert found[1].entropy == pytest.approx(0, abs=1e-12) and found[1].peak == pytest.approx(4)
    entropy = -(0.5 * log(0.5) + 3 / 6 * log(1 / 6)) / log(4)
    assert found[2].entropy == pytest.approx(entropy)
    assert found[2].total == 2 and found[2].negative_share == 0.5
    assert found[2].negative_mass == pytest.approx(2 / 6) and found[2].lowest == -4
    assert mean_distribution(found).lowest == -4 and mean_distribution(found[:2]).peak == 2.5


def test_queries_are_lengthened_in_their_direction():
    q = torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.tensor([1, 4])
    torch.testing.assert_close(lengthen(q, rows, 4.0)[:, :, rows], 4 * q[:, :, rows])
    longer = lengthen(q, rows, 4.0, 'phi')
    torch.testing.assert_close(feature_map(longer[:, :, rows]), 4 * feature_map(q[:, :, rows]))
    kept = [0, 2, 3, 5]
    assert torch.equal(longer[:, :, kept], q[:, :, kept])


def test_what_the_papers_say_about_longer_queries():
    """Linear attention does not see the length of phi(q); MALA and softmax sharpen with it."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 20, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    rows = torch.arange(20)
    entropies = {}
    for name in ('linear', 'mala', 'softmax'):
        operator = build_operator(name, 1, 8, rotary=False)
        length = 'q' if name == 'softmax' else 'phi'
        entropies[name] = [
            distributions(operator.scores(lengthen(q, rows, a, length), k, (4, 5), rows)[0])[0]
            for a in (1.0, 4.0)
        ]
    linear, mala, softmax = entropies.values()
    # eps = 1e-6 beside a sum of about 20 d
    assert linear[1].entropy == pytest.approx(linear[0].entropy, abs=1e-7)
    assert mala[1].peak > mala[0].peak * 1.01
    assert softmax[1].entropy < softmax[0].entropy - 0.05


@pytest.mark.parametrize('form', ['published', 'paper'])
def test_where_scores_of_mala_are_negative(form):
    """Without rotation exactly where phi(q).phi(k_j) is below z / (1 + z) of its mean over j."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 20, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    operator = build_operator('mala', 1, 8, form=form, rotary=False, eps=0.0)
    scores = operator.scores(q, k, (4, 5), torch.arange(20))[0, 0]
    products = (feature_map(q) @ feature_map(k).mT)[0, 0]
    mean = products.mean(-1, keepdim=True)
    z = mean * (8**-0.5 if form == 'published' else 20)
    assert torch.equal(scores < 0, products < mean * z / (1 + z))
    share = (scores < 0).double().mean()
    # The paper's z is a sum over all keys: the bound is all but the mean.
    assert share > 0.4 if form == 'paper' else 0.1 < share < 0.5


def test_operators_without_scores_are_refused():
    check_operators(['mala', 'softmax'])
    with pytest.raises(UserError, match="'hydra' has no scores: .*; operators with scores are"):
        check_operators(['mala', 'hydra'])
    with pytest.raises(UserError, match=r"must be one of \(.*'mala'.*\), got 'nope'"):
        check_operators(['nope'])
