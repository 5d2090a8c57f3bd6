"""Stops training at the first loss or gradient that is not a number."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from mmengine.dist import all_gather_object
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import Runner
from torch import Tensor, nn

from mala_mm.checkpoint.load import unwrap
from mala_mm.errors import InvalidLossError
from mala_mm.registry import HOOKS


@HOOKS.register_module()
class CheckInvalidLossHook(Hook):
    """Stop at a loss or a gradient that is NaN or infinite; name iteration, module and images.

    mmdet's hook of this name looks every 50 iterations, at losses only, names neither and needs
    mmdet. Looking at every iteration costs next to nothing: mmengine reads the losses of every
    iteration for its log, and the norm of the gradients is one pass over them. A step along such
    gradients is not taken, so that the weights stay those of the iteration before.

    With a loss scale (``AmpOptimWrapper``), gradients that overflow are expected: the step is
    skipped and the scale lowered. They count as real at a scale of 1 or below, where the gradients
    themselves overflow, and after ``max_skipped`` steps in a row, for scales that stay the same.

    Args:
        interval (int): Look at the losses every ``interval`` iterations; gradients are looked at
            before every step. Defaults to 1.
        max_skipped (int): The number of skipped steps in a row at which training stops. Defaults
            to 32, the steps that a scale takes from 2 ** 31, more than it ever grows to, to 1.
    """

    def __init__(self, interval: int = 1, max_skipped: int = 32) -> None:
        if interval < 1:
            raise ValueError(f'interval must be at least 1, got {interval}')
        self.interval, self.max_skipped = interval, max_skipped
        self._skipped = 0
        self._module: str | None = None  # the first one whose gradient is not finite

    def before_train(self, runner: Runner) -> None:
        """Look at the gradients whenever the optimizer is about to step.

        Args:
            runner (Runner): The runner.
        """
        wrappers = runner.optim_wrapper
        for wrapper in wrappers.values() if isinstance(wrappers, OptimWrapperDict) else [wrappers]:
            wrapper.step = functools.partial(self._step, runner, wrapper, wrapper.step)

    def _step(self, runner: Runner, wrapper: OptimWrapper, step: Callable, **kwargs: Any) -> None:
        """Step if the gradients are finite; leave the rest to :meth:`after_train_iter`."""
        module = _first_invalid_gradient(runner.model, wrapper.optimizer)
        scaler = getattr(wrapper, 'loss_scaler', None)
        if module is None:
            self._skipped = 0
        elif scaler is not None:
            self._skipped += 1
            if scaler.get_scale() > 1 and self._skipped < self.max_skipped:
                runner.logger.info(
                    f'The gradients overflow at the loss scale {scaler.get_scale():g}: iteration '
                    f'{runner.iter + 1} takes no step, and the scale is adjusted.'
                )
                module = None
        self._module = module
        if module is None:
            step(**kwargs)

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: dict | tuple | list | None = None,
        outputs: dict | None = None,
    ) -> None:
        """Look at the losses of this iteration, and at what was found before the step.

        Args:
            runner (Runner): The runner.
            batch_idx (int): The number of the batch, which is not used.
            data_batch (dict | tuple | list, optional): The batch, for the names of its images.
            outputs (dict, optional): The losses by name, among other figures.

        Raises:
            InvalidLossError: If one of them is NaN or infinite.
        """
        look = self.every_n_train_iters(runner, self.interval) or self._module
        losses = {k: v for k, v in (outputs or {}).items() if 'loss' in k and look}
        values = {k: v.item() if isinstance(v, Tensor) else v for k, v in losses.items()}
        invalid = {k: v for k, v in values.items() if not math.isfinite(v)}
        if not invalid and self._module is None:
            return
        module, paths = self._module, _image_paths(data_batch)
        if module is not None:  # on every process: gradients are averaged before they are used
            found = all_gather_object((invalid, paths))
            invalid = {k: v for losses, _ in found for k, v in losses.items()}
            paths = [p for losses, paths in found if losses or not invalid for p in paths]
        if invalid and runner.world_size == 1:
            module = _first_invalid_output(runner, data_batch) or module
        if invalid:
            what = ', '.join(f'{k} = {v}' for k, v in invalid.items())
        else:
            what = 'the gradient is not finite, though the losses are'
        raise InvalidLossError(
            f'Training stopped at iteration {runner.iter + 1}: {what}, '
            f'first in {module or "the loss itself"}, images: {", ".join(paths) or "unknown"}; '
            'look at these images and their annotations, then lower the learning rate, '
            'clip gradients (optim_wrapper.clip_grad) or turn mixed precision off, '
            'and resume from an earlier checkpoint'
        )


def _first_invalid_gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Find the module nearest to the loss whose gradient is not finite; None if all are finite."""
    parameters = [p for group in optimizer.param_groups for p in group['params']]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients or torch.nn.utils.get_total_norm(gradients).isfinite():
        return None
    # Squares overflow before gradients do.
    invalid = {id(p) for p in parameters if p.grad is not None and not p.grad.isfinite().all()}
    names = [name for name, p in unwrap(model).named_parameters() if id(p) in invalid]
    if not invalid:
        return None
    # The gradient comes from the loss, so that what it spoils lies before the place of origin.
    return names[-1].rpartition('.')[0] or names[-1] if names else 'the optimizer'


def _first_invalid_output(runner: Runner, data_batch: Any) -> str | None:
    """Send the batch through the model again; find the first module whose output is not finite."""
    model, found = unwrap(runner.model), []

    def look(name: str, module: nn.Module, inputs: tuple, output: Any) -> None:
        if not found and not all(t.isfinite().all() for t in _float_tensors(output)):
            found.append(name)

    hooks = [
        module.register_forward_hook(functools.partial(look, name))
        for name, module in model.named_modules()
        if name
    ]
    try:
        with torch.no_grad(), runner.optim_wrapper.optim_context(runner.model):
            model._run_forward(model.data_preprocessor(data_batch, True), mode='loss')
    except Exception:  # what the first pass did to the batch may prevent a second one
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _float_tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor) and output.is_floating_point():
        yield output
    elif isinstance(output, (list, tuple, Mapping)):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _float_tensors(part)


def _image_paths(data_batch: dict | tuple | list | None) -> list[str]:
    samples = data_batch.get('data_samples', []) if isinstance(data_batch, Mapping) else []
    return [
        str(sample.metainfo['img_path'])
        for sample in samples
        if 'img_path' in getattr(sample, 'metainfo', {})
    ]
