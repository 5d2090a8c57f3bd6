"""Mixed precision on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mmengine.optim import OptimWrapper
from torch import nn

from mala_mm.registry import OPTIM_WRAPPERS


@OPTIM_WRAPPERS.register_module()
class CPUAmpOptimWrapper(OptimWrapper):
    """bfloat16 autocast on a CPU, where ``AmpOptimWrapper`` refuses to run.

    bfloat16 has the exponent of float32, so that losses need no scaling.
    """

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Run the forward pass under autocast.

        Args:
            model (nn.Module): The model being trained.
        """
        with super().optim_context(model), torch.autocast('cpu', dtype=torch.bfloat16):
            yield
