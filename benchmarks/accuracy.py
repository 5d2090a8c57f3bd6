"""The policy on accuracy of the fused operators, which tests and benchmarks share.

Against float64 a backend may lose 1.5 times what the formula as it is written loses in the same
type (:func:`mala_mm.ops.fused.dispatch.eager`). Where the formula is exact by luck, or overflows
(float16), rounding an exact result is allowed: half a unit in the last place, up to ``eps / 2`` of
the value. Errors are relative to the norm of the whole tensor: the root of the mean square.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Accuracy(NamedTuple):
    """What a backend loses in one tensor, and what it may.

    Attributes:
        error: Relative to the norm of the exact tensor; NaN if anything is.
        plain: That of the formula in the same type.
        allowed: By the policy.
    """

    error: float
    plain: float
    allowed: float

    @property
    def ratio(self) -> float:
        """The error in units of what is allowed."""
        return self.error / self.allowed

    @property
    def passed(self) -> bool:
        """Whether the policy holds; a NaN never does."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        return f'error {self.error:.2e}, formula {self.plain:.2e}, allowed {self.allowed:.2e}'


def relative_error(x: Tensor, exact: Tensor) -> float:
    """``|x - exact| / |exact|`` in float64."""
    return ((x.double() - exact).norm() / exact.norm()).item()


def measure(ours: Tensor, plain: Tensor, exact: Tensor, dtype: torch.dtype) -> Accuracy:
    """Hold a result against float64 and against the formula.

    Args:
        ours (Tensor): The backend's result.
        plain (Tensor): The formula's, computed in ``dtype``.
        exact (Tensor): The formula's in float64.
        dtype (torch.dtype): The type of the inputs.

    Returns:
        Accuracy: The errors and the verdict.
    """
    lost = relative_error(plain, exact)
    finite = bool(plain.isfinite().all())
    allowed = max(1.5 * lost if finite else 0.0, torch.finfo(dtype).eps / 2)
    return Accuracy(relative_error(ours, exact), lost, allowed)
