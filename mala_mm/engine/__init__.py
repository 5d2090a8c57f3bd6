"""Running OpenMMLab models: command lines, hooks and optimizer constructors.

Nothing is imported here, so that ``mala_mm.errors`` loads in a moment and needs no mmengine.
The registries import ``mala_mm.engine.hooks`` and ``mala_mm.engine.optimizers`` when asked.
"""
