"""Painted scenes (:mod:`.scenes`), their files (:mod:`.writers`) and the demonstration on them.

Importing this package costs nothing: only the class names are loaded.
"""

from .classes import (
    SCENE_CLASSES,
    SCENE_PALETTE,
    STUFF_CLASSES,
    STUFF_PALETTE,
    THING_CLASSES,
    THING_PALETTE,
)

__all__ = [
    'SCENE_CLASSES',
    'SCENE_PALETTE',
    'STUFF_CLASSES',
    'STUFF_PALETTE',
    'THING_CLASSES',
    'THING_PALETTE',
]
