"""The policy on accuracy, on numbers whose errors are known."""

import torch

from benchmarks import accuracy


def measure(ours, plain, dtype=torch.bfloat16):
    exact, ours, plain = torch.tensor([[3, 4], [ours, 0], [plain, 0]], dtype=torch.float64)
    return accuracy.measure(exact + ours, exact + plain, exact, dtype)  # exact has the norm 5


def test_one_and_a_half_times_the_formula_is_allowed():
    measured = measure(ours=0.7, plain=0.5)
    assert (round(measured.error, 9), round(measured.allowed, 9)) == (0.14, 0.15)
    assert measured.passed and not measure(ours=0.8, plain=0.5).passed


def test_rounding_an_exact_result_is_allowed():
    half_unit = torch.finfo(torch.bfloat16).eps / 2
    assert measure(ours=4.9 * half_unit, plain=0.0).passed
    assert not measure(ours=5.1 * half_unit, plain=0.0).passed


def test_a_formula_that_overflows_excuses_nothing():
    assert not measure(ours=0.5, plain=float('inf')).passed
    assert not measure(ours=float('nan'), plain=0.5).passed
    assert not measure(ours=float('inf'), plain=float('inf')).passed
