"""The two-dimensional rotary embedding."""

import torch

from mala_mm.ops import apply_rotary, rotary_frequencies, rotary_tables


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
