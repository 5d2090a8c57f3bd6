"""Running OpenMMLab models: commands, runner, hooks and optimizer constructors.

Nothing is imported here, so that :mod:`.cli` can name a package that a command misses.
The registries import ``mala_mm.engine.hooks`` and ``mala_mm.engine.optimizers`` when asked.
"""
