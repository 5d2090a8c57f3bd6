"""Checkpoints: reading them safely, loading them with an account, converting published ones."""

from .files import enforce_safe_loading, load_checkpoint, save_checkpoint
from .load import CheckpointGuard, LoadReport, load_into

__all__ = [
    'CheckpointGuard',
    'LoadReport',
    'enforce_safe_loading',
    'load_checkpoint',
    'load_into',
    'save_checkpoint',
]
