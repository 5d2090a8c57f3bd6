"""Writes checkpoints that survive kills and full disks, and from which a run goes on as it was."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mmengine.dist import all_gather_object, get_rank, is_main_process
from mmengine.fileio import LocalBackend
from mmengine.hooks import CheckpointHook as MMEngineCheckpointHook
from mmengine.logging import print_log
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner

from mala_mm.checkpoint.files import check_written, non_finite
from mala_mm.checkpoint.load import unwrap
from mala_mm.errors import InvalidLossError, UserError
from mala_mm.files import remove_parts, replacing
from mala_mm.registry import HOOKS

from .. import random_states
from ..monitored import not_computed

STATE_KEY = 'training_state'
"""Where a checkpoint holds what mmengine's lacks for going on exactly."""


@HOOKS.register_module()
class CheckpointHook(MMEngineCheckpointHook):
    """mmengine's hook, made safe. It takes the same arguments.

    - A checkpoint is written to a part beside it, which reaches the disk, is read back, and then
      takes its name. Only then are older ones removed (mmengine removes them first), the best one
      included. What killed processes left is cleared away when training starts.
    - Weights that are not finite are not saved.
    - The random states of all processes, the position among the batches and gradients that are
      still being accumulated are saved, and taken up again on resuming.

    Remote folders keep mmengine's way of writing, which is the backend's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args:  # mmengine's fails at the first save
            known = [
                p for p in inspect.signature(MMEngineCheckpointHook).parameters if p != 'kwargs'
            ]
            name = next(iter(self.args))
            close = difflib.get_close_matches(name, known, n=1)
            advice = f'did you mean {close[0]}?' if close else f'it has {", ".join(known)}'
            raise ValueError(f'CheckpointHook has no {name!r}; {advice}')

    def before_train(self, runner: Runner) -> None:
        """Clear stale parts away and continue where the checkpoint was written.

        Args:
            runner (Runner): The runner.
        """
        super().before_train(runner)
        self._is_local = isinstance(self.file_backend, LocalBackend)
        if self._is_local and is_main_process():
            for part in (*remove_parts(self.out_dir, '*.pth'), *self._remove_replaced(runner)):
                runner.logger.info(f'Removed {part}, which a killed run left.')
        if runner._resume and runner._has_loaded:
            _take_up(runner, getattr(self, '_loaded', None))
        self._loaded = self._state = None

    def _remove_replaced(self, runner: Runner) -> Iterator[Path]:
        """Remove what the checkpoint was to take the place of, had no kill come between."""
        start = Path(runner._load_from or '')
        if not runner._resume or start.absolute().parent != Path(self.out_dir).absolute():
            return
        for name in (getattr(self, '_loaded', None) or {}).get('replaces', ()):
            old = start.with_name(Path(name).name)
            if old.is_file() and not old.samefile(start):
                with suppress(OSError):
                    old.unlink()
                    yield old

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Keep what training continues with until it begins.

        Args:
            runner (Runner): The runner.
            checkpoint (dict): What was loaded.
        """
        self._loaded = checkpoint.get(STATE_KEY)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Add the state of training to a checkpoint that training can continue from.

        Args:
            runner (Runner): The runner.
            checkpoint (dict): What is being saved.
        """
        if getattr(self, '_state', None) is not None and 'optimizer' in checkpoint:
            checkpoint[STATE_KEY] = self._state
            if replaced := getattr(self.file_backend, 'names', list)():
                self._state['replaces'] = replaced

    def _save_checkpoint_with_step(self, runner: Runner, step: int, meta: dict) -> None:
        # On every process; what follows is the main one's alone.
        self._state = _state(runner, meta)
        with self._removing_last():
            super()._save_checkpoint_with_step(_SafeWriter.of(runner), step, meta)

    def _save_best_checkpoint(self, runner: Runner, metrics: dict) -> None:
        for name in getattr(self, 'key_indicators', ()) if self.save_best else ():
            if name not in metrics and (name != 'auto' or not metrics):
                raise UserError(
                    f'default_hooks.checkpoint.save_best is {name!r}, '
                    f'{not_computed(name, list(metrics))}'
                )
        with self._removing_last():
            super()._save_best_checkpoint(_SafeWriter.of(runner), metrics)

    @contextmanager
    def _removing_last(self) -> Iterator[None]:
        """Put off what is removed inside until all has been written."""
        if not self._is_local:
            yield
            return
        backend, self.file_backend = self.file_backend, _LateRemoval(self.file_backend)
        try:
            yield
            self.file_backend.remove_now()
        finally:
            self.file_backend = backend


class _LateRemoval:
    """A file backend that collects what shall be removed."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend
        self._removals: list[tuple[Callable, str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def remove(self, path: str) -> None:
        self._removals.append((self._backend.remove, path, Path(path).stat().st_ino))

    def rmtree(self, path: str) -> None:
        self._removals.append((self._backend.rmtree, path, Path(path).stat().st_ino))

    def names(self) -> list[str]:
        return [Path(path).name for _, path, _ in self._removals]

    def remove_now(self) -> None:
        for remove, path, inode in self._removals:
            # A file that was replaced meanwhile is a new one. One that cannot be removed does no
            # harm to training.
            with suppress(OSError):
                if Path(path).stat().st_ino == inode:
                    remove(path)


class _SafeWriter:
    """A runner whose checkpoints appear whole or not at all."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @classmethod
    def of(cls, runner: Any) -> _SafeWriter:
        return runner if isinstance(runner, cls) else cls(runner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, **kwargs: Any) -> None:
        runner = self._runner
        _check_finite(runner)
        if not is_main_process():
            return
        if '://' in str(out_dir):
            runner.save_checkpoint(out_dir, filename, *args, **kwargs)
            return
        path = Path(out_dir) / filename
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, check_written) as part:
                runner.save_checkpoint(out_dir, part.name, *args, **kwargs)
        except OSError as error:
            raise UserError(f'{path} could not be written ({error}); {_remedy(path)}') from error


def _remedy(path: Path) -> str:
    """Return what is left to go on with, after ``path`` could not be written."""
    others = [p for p in path.parent.glob('*.pth') if p.is_file()]
    if not others:
        return 'there is no earlier checkpoint: make room and start again'
    newest = max(others, key=lambda p: p.stat().st_mtime)
    return f'{newest} is intact: make room and continue with --resume'


def _check_finite(runner: Runner) -> None:
    found = non_finite(unwrap(runner.model).state_dict())
    if found:
        raise InvalidLossError(
            f'The weights are not finite at iteration {runner.iter + 1}, the first in {found[0]} '
            f'({len(found)} tensors); nothing was saved; lower the learning rate, clip gradients '
            '(optim_wrapper.clip_grad) or turn mixed precision off, and continue with --resume '
            'from the last checkpoint'
        )


def _state(runner: Runner, meta: dict) -> dict[str, Any]:
    loop = runner.train_loop
    state: dict[str, Any] = dict(random=all_gather_object(random_states.get_states()))
    if hasattr(loop, 'position'):
        state['position'] = loop.position(meta)
    wrapper = runner.optim_wrapper
    # With several processes each has gradients of its own, too large to collect here.
    if isinstance(wrapper, OptimWrapper) and not wrapper.should_update() and runner.world_size == 1:
        state['gradients'] = {
            name: p.grad.cpu()
            for name, p in unwrap(runner.model).named_parameters()
            if p.grad is not None
        }
    return state


def _take_up(runner: Runner, state: dict[str, Any] | None) -> None:
    """Continue with a state; call it as the last thing before training begins."""
    loop = runner.train_loop
    if hasattr(loop, 'resume'):
        loop.resume((state or {}).get('position'))
    if state is None:
        print_log(
            'The checkpoint holds no random states: the run will differ from an uninterrupted one '
            'in the augmentation of images and in drop path.',
            'current',
            logging.WARNING,
        )
        return
    parameters = dict(unwrap(runner.model).named_parameters())
    for name, gradient in state.get('gradients', {}).items():
        parameters[name].grad = gradient.to(parameters[name])
    states = state['random']
    if len(states) != runner.world_size:
        print_log(
            f'The checkpoint is of a run with {len(states)} processes, this one has '
            f'{runner.world_size}: their random states are not taken over.',
            'current',
            logging.WARNING,
        )
        return
    random_states.set_states(states[get_rank()])
