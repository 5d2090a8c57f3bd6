"""Mixed precision on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper
from torch import nn
from torch.utils._pytree import tree_map

from mala_mm.registry import OPTIM_WRAPPERS

DETECTION_HEADS = ('bbox_head', 'rpn_head', 'roi_head')


@OPTIM_WRAPPERS.register_module()
class CPUAmpOptimWrapper(OptimWrapper):
    """bfloat16 autocast on a CPU, where ``AmpOptimWrapper`` refuses to run.

    bfloat16 has the exponent of float32, so that losses need no scaling. The heads of detectors
    stay in float32: mmcv's NMS and RoIAlign take no bfloat16 on a CPU.
    """

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Run the forward pass under autocast.

        Args:
            model (nn.Module): The model being trained.
        """
        with super().optim_context(model), ExitStack() as stack:
            model = model.module if is_model_wrapper(model) else model
            if any(hasattr(model, name) for name in DETECTION_HEADS):
                for part in (model.backbone, getattr(model, 'neck', None)):
                    if part is not None:
                        stack.enter_context(_forward_under_autocast(part))
            else:
                stack.enter_context(_autocast())
            yield


def _autocast() -> torch.autocast:
    return torch.autocast('cpu', dtype=torch.bfloat16)


@contextmanager
def _forward_under_autocast(module: nn.Module) -> Iterator[None]:
    """Let a module, and nothing else, run under autocast; it returns float32."""
    forward: Callable = module.forward

    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with _autocast():
            out = forward(*args, **kwargs)
        return tree_map(lambda x: x.float() if isinstance(x, torch.Tensor) else x, out)

    module.forward = under_autocast
    try:
        yield
    finally:
        del module.forward
