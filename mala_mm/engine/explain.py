"""Tells mistakes of the user's from bugs, and says the former in one sentence."""

from __future__ import annotations

import errno
import re
import traceback
from typing import Any

from mala_mm.doctor import how_to_install
from mala_mm.errors import UserError

# What classes raise that a config hands wrong values to.
MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError),
    *(TypeError, ValueError),
)
PEER_ENDED = 'another process of this run has ended; its own message says why'
# Of these packages, errors of a model's first batch are a mistake in the config.
PACKAGES = ('mmcv', 'mmengine', 'mmdet', 'mmseg', 'mmpretrain', 'mala_mm')


def explain(error: Exception) -> str | None:
    """Return the sentence that tells a user what to fix, or None for a bug.

    Besides :class:`UserError`, these are packages that are not installed, full disks, and mistakes
    in a config that show when mmengine builds a part from it: an unknown type, an argument that a
    class does not take, a value that it refuses or breaks on, parts of the model that do not go
    together, on which its first batch breaks. ``MALA_MM_TRACEBACK=1`` prints the traceback as well.

    Args:
        error (Exception): What was raised.
    """
    message = str(error.args[0]) if error.args else str(error)
    if isinstance(error, UserError):
        if message.startswith('Caught '):  # in a worker process, with its traceback before it
            message = re.split(r'^\S+Error: ', message.rstrip(), flags=re.M)[-1]
        return message
    if isinstance(error, ModuleNotFoundError) and (command := how_to_install(error.name or '')):
        return f'The module {error.name.split(".")[0]} is not installed; run {command}'
    if isinstance(error, RuntimeError) and re.search(
        'Connection closed by peer|Connection reset by peer', message
    ):
        return PEER_ENDED
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f' for {error.filename}' if error.filename else ''
        return f'The disk is full, there is no room{where}; make some, and continue with --resume'
    from mmengine.registry import build_from_cfg

    from .validation import similar_types

    classes, registry, kind = [], None, None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is build_from_cfg.__code__:
            names = frame.f_locals
            classes.append(getattr(names.get('obj_cls'), '__name__', '?'))
            registry, kind = names.get('registry'), names.get('obj_type')
    if isinstance(error, KeyError) and 'registry. Please check' in message:
        advice = similar_types(kind, registry) if isinstance(kind, str) else 'correct the type'
        return f'{message.split(". Please check")[0]}; {advice}'
    if not isinstance(error, MISTAKES):
        return None
    if not classes:
        return _explain_first_batch(error, message)
    if not isinstance(error, ValueError) or not message:
        # Assertions often say nothing: then their text does.
        line = traceback.extract_tb(error.__traceback__)[-1].line
        message = f'{type(error).__name__}: {message or line}'
    return f'The config does not fit {" > ".join(classes)}: {" ".join(message.split())}'


def _explain_first_batch(error: Exception, message: str) -> str | None:
    """Name the module that breaks on the first batch of a run; None for the batches after it."""
    from mmengine.runner.base_loop import BaseLoop
    from torch import OutOfMemoryError

    from mala_mm.checkpoint.load import unwrap

    names: dict[int, str] = {}
    module: Any = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get('self')
        if isinstance(owner, BaseLoop) and frame.f_code.co_name == 'run_iter':
            training = owner is owner.runner._train_loop
            if (owner.runner.iter if training else frame.f_locals['idx']) == 0:
                modules = unwrap(owner.runner.model).named_modules()
                names = {id(module): name for name, module in modules if name}
        elif id(owner) in names and type(owner).__module__.split('.')[0] != 'torch':
            module = owner
    if module is None or type(module).__module__.split('.')[0] not in PACKAGES:
        return None
    reason = f'{type(error).__name__}: {" ".join(message.split())}'.removesuffix(': ')
    if isinstance(error, OutOfMemoryError):
        remedy = 'lower the batch size or the size of the images'
    else:
        remedy = 'correct this part of the config, or what it is given'
    return (
        f'The first batch fails in model.{names[id(module)]} ({type(module).__name__}), '
        f'{reason[:300]}; {remedy} (MALA_MM_TRACEBACK=1 shows where)'
    )
