"""Keeps checkpoints that do not fit away from the model."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import Hook
from mmengine.runner import find_latest_checkpoint

from mala_mm.checkpoint.load import match, unwrap
from mala_mm.errors import UserError
from mala_mm.registry import HOOKS


@HOOKS.register_module()
class CheckpointGuard(Hook):
    """Let mmengine's Runner load or resume what :func:`load_into` accepts, and nothing else.

    It runs before the Runner hands the weights to the model.

    Args:
        other_heads (bool): As in :func:`load_into`; for fine-tuning, not for testing or resuming.
    """

    priority = 'VERY_HIGH'

    def __init__(self, other_heads: bool = False) -> None:
        self.other_heads = other_heads

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Replace the weights by those that the model takes.

        Args:
            runner (Any): mmengine's runner.
            checkpoint (dict): The contents of the file, changed in place.

        Raises:
            UserError: If the file does not fit, or holds no state to resume from.
        """
        path = runner._load_from or find_latest_checkpoint(runner.work_dir)
        if runner._resume and not {'meta', 'message_hub', 'optimizer'} <= set(checkpoint):
            raise UserError(
                f'{path} holds no state of a training to resume, only '
                f'{", ".join(map(str, list(checkpoint)[:5]))}; '
                'to start from its weights, give it as load_from without resuming'
            )
        checkpoint['state_dict'], _ = match(
            unwrap(runner.model), checkpoint, str(path), other_heads=self.other_heads
        )
