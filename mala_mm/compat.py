"""What mmengine has to be told before this package works with it, on either dependency line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pickle import UnpicklingError

import numpy as np
import torch
from mmengine.config.utils import MODULE2PACKAGE
from mmengine.logging import HistoryBuffer


def name_packages() -> None:
    """Tell mmengine where to look for what stands before ``::`` in the name of a config.

    That is, in a config's ``_base_`` and in ``mmengine.hub.get_config``. For ourselves mmengine
    would look beside the distribution's metadata, where an editable installation has no configs;
    ``mala_mm.registry`` is no distribution, so that it is imported and looked around. For mmseg
    mmengine looks up the distribution of upstream, and may have pip install it where another
    distribution provides the module.
    """
    MODULE2PACKAGE['mala_mm'] = 'mala_mm.registry'
    if find_spec('mmseg') is not None:
        MODULE2PACKAGE['mmseg'] = 'mmseg'


def _history_method(owner: object, name: str) -> Callable:
    """Stand in for ``getattr``, by which HistoryBuffer pickles references to its own methods."""
    if owner is HistoryBuffer and name in ('min', 'max', 'current', 'mean'):
        return getattr(HistoryBuffer, name)
    raise UnpicklingError(f'Unsupported global: GLOBAL getattr({owner!r}, {name!r})')


def safe_globals() -> list:
    """List what a file may name beyond torch's own: mmengine's logs, NumPy numbers, options."""
    # NumPy 2 renamed its core; files keep the name that they were written with.
    core = getattr(np, '_core', None) or np.core
    multiarray = core.multiarray
    return [
        HistoryBuffer,
        (_history_method, 'builtins.getattr'),
        argparse.Namespace,  # the options that DeiT-like trainers store; a plain container
        np.ndarray,
        np.dtype,
        *{type(np.dtype(code)) for code in np.typecodes['AllInteger'] + '?efd'},
        *(
            (getattr(multiarray, name), f'numpy.{package}.multiarray.{name}')
            for name in ('_reconstruct', 'scalar')
            for package in ('core', '_core')
        ),
    ]


def allow_mmengine_types() -> None:
    """Let ``torch.load(weights_only=True)`` read what mmengine's Runner adds to the weights.

    torch >= 2.6 reads weights only by default, and upstream's mmengine cannot read its own files
    then. The types are plain containers and numbers, so that loading stays safe.
    """
    torch.serialization.add_safe_globals(safe_globals())
