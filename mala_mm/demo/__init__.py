"""The demonstration: painted scenes (:mod:`.scenes`) and their files (:mod:`.writers`).

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
