"""Stops training at the first loss that is not a number."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import Tensor

from mala_mm.errors import InvalidLossError
from mala_mm.registry import HOOKS


@HOOKS.register_module()
class CheckInvalidLossHook(Hook):
    """Stop at a loss that is NaN or infinite, and name the iteration and the images.

    mmdet's hook of this name looks every 50 iterations, names neither and needs mmdet. Looking at
    every iteration costs nothing: mmengine reads the losses of every iteration for its log. The
    hook runs before the checkpoint hook, so that no damaged weights are saved.

    Args:
        interval (int): Look every ``interval`` iterations. Defaults to 1.
    """

    def __init__(self, interval: int = 1) -> None:
        if interval < 1:
            raise ValueError(f'interval must be at least 1, got {interval}')
        self.interval = interval

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: dict | tuple | list | None = None,
        outputs: dict | None = None,
    ) -> None:
        """Look at the losses of this iteration.

        Raises:
            InvalidLossError: If one of them is NaN or infinite.
        """
        if not self.every_n_train_iters(runner, self.interval):
            return
        losses = {k: v for k, v in (outputs or {}).items() if 'loss' in k}
        values = {k: v.item() if isinstance(v, Tensor) else v for k, v in losses.items()}
        invalid = {k: v for k, v in values.items() if not math.isfinite(v)}
        if invalid:
            found = ', '.join(f'{k} = {v}' for k, v in invalid.items())
            images = ', '.join(_image_paths(data_batch)) or 'unknown'
            raise InvalidLossError(
                f'Training stopped at iteration {runner.iter + 1}: {found}, images: {images}; '
                'look at these images and their annotations, then lower the learning rate, '
                'clip gradients (optim_wrapper.clip_grad) or turn mixed precision off, '
                'and resume from an earlier checkpoint.'
            )


def _image_paths(data_batch: dict | tuple | list | None) -> list[str]:
    samples = data_batch.get('data_samples', []) if isinstance(data_batch, Mapping) else []
    return [
        str(sample.metainfo['img_path'])
        for sample in samples
        if 'img_path' in getattr(sample, 'metainfo', {})
    ]
