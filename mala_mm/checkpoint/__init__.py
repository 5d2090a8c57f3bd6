"""Checkpoints: reading them safely, loading them with an account, converting published ones."""

from .files import enforce_safe_loading, load_checkpoint, safe_loading, save_checkpoint
from .load import LoadReport, load_into

__all__ = [
    'LoadReport',
    'enforce_safe_loading',
    'load_checkpoint',
    'load_into',
    'safe_loading',
    'save_checkpoint',
]
