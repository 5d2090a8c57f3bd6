"""Hooks of the training loop."""

from .check_invalid_loss import CheckInvalidLossHook

__all__ = ['CheckInvalidLossHook']
