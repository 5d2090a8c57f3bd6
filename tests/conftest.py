"""Options, markers and fixtures shared by all tests."""

import os
import socket
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck

from .generated import demo  # noqa: F401, a fixture

REPO = Path(__file__).resolve().parents[1]

# Without a GPU the Triton kernels are interpreted, which is decided when Triton is imported. What
# compiles them does so in a process of its own.
if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')


def pytest_addoption(parser):
    parser.addoption('--slow', action='store_true', help='also run the tests marked slow')
    parser.addoption('--long', action='store_true', help='also run the tests marked long')
    parser.addoption('--fuzz', type=int, metavar='CASES', help='cases per fuzzing test')


def pytest_configure(config):
    """Fuzzing: the same few cases in every run, or many new ones where they are asked for."""
    cases = config.getoption('--fuzz')
    settings = dict(deadline=None, database=None, suppress_health_check=list(HealthCheck))
    hypothesis.settings.register_profile('few', max_examples=40, derandomize=True, **settings)
    hypothesis.settings.register_profile('many', max_examples=cases or 1, **settings)
    hypothesis.settings.load_profile('many' if cases else 'few')


def pytest_collection_modifyitems(config, items):
    for marker, takes in (('slow', 'takes minutes'), ('long', 'takes up to an hour')):
        if config.getoption(f'--{marker}'):
            continue
        skip = pytest.mark.skip(reason=f'{takes}; run with --{marker}')
        for item in items:
            if marker in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def no_default_scope():
    """Each test starts as a process does: none inherits the default scope that another one set."""
    from mmengine.registry import DefaultScope

    DefaultScope._instance_dict.clear()


@pytest.fixture(scope='session')
def repo() -> Path:
    """The root of the checkout."""
    return REPO


@pytest.fixture(scope='session')
def real_data() -> Path:
    """The folder with real images (``coco``, ``ade20k``), or a skip.

    It is named by the environment variable ``MALA_MM_DATA`` and defaults to
    ``../shared/data`` beside the checkout.
    """
    folder = Path(os.environ.get('MALA_MM_DATA', REPO.parent / 'shared' / 'data'))
    if not folder.is_dir():
        pytest.skip(f'no real data at {folder}; set MALA_MM_DATA to a folder with coco and ade20k')
    return folder


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]
