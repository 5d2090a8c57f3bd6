"""The random generators of a process: Python's, NumPy's and torch's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def get_states() -> dict[str, Any]:
    """Return the states of all generators, as tensors and numbers that any checkpoint may hold.

    CUDA's is that of the current device, where there is one: each process trains on its own.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    states = dict(
        python=dict(version=version, words=torch.tensor(words), gauss=gauss),
        numpy=dict(
            name=name,
            keys=torch.from_numpy(keys.astype(np.int64)),
            position=int(position),
            has_gauss=int(has_gauss),
            cached=float(cached),
        ),
        torch=torch.get_rng_state(),
    )
    if torch.cuda.is_available():
        states['cuda'] = torch.cuda.get_rng_state()
    return states


def set_states(states: Mapping[str, Any]) -> None:
    """Continue where :func:`get_states` was called.

    Args:
        states (Mapping[str, Any]): What it returned; the tensors may lie on any device.
    """
    python, numpy = states['python'], states['numpy']
    random.setstate((python['version'], tuple(python['words'].tolist()), python['gauss']))
    keys = numpy['keys'].cpu().numpy().astype(np.uint32)
    np.random.set_state(
        (numpy['name'], keys, numpy['position'], numpy['has_gauss'], numpy['cached'])
    )
    torch.set_rng_state(states['torch'].cpu())
    if 'cuda' in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states['cuda'].cpu())


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Draw random numbers that depend on ``key`` alone inside, and leave no trace outside.

    CUDA's generators are not touched.

    Args:
        *key (int): Any numbers from 0 on. Streams of different keys are independent.
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    words = np.random.SeedSequence(key).generate_state(8)
    random.seed(words[:4].tobytes())
    np.random.seed(words[4:6])
    # torch.manual_seed would seed the GPUs as well.
    torch.default_generator.manual_seed(int(words[6:].view(np.int64)[0]))
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
