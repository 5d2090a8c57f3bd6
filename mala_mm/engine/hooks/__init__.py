"""Hooks of the training loop."""

from .check_invalid_loss import CheckInvalidLossHook
from .checkpoint import CheckpointHook
from .checkpoint_guard import CheckpointGuard

__all__ = ['CheckInvalidLossHook', 'CheckpointGuard', 'CheckpointHook']
