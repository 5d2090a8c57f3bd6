"""mmengine's runner, made to run without a GPU and to lose nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from mmengine.device import get_device
from mmengine.dist import broadcast_object_list, is_distributed, is_main_process
from mmengine.hooks import CheckpointHook as MMEngineCheckpointHook
from mmengine.hooks import Hook
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import HOOKS, LOOPS, Registry
from mmengine.runner import Runner as MMEngineRunner
from mmengine.runner.base_loop import BaseLoop
from torch import nn
from torch.utils.data import DataLoader

from mala_mm.data.guard import guard_pipeline

from .hooks import CheckInvalidLossHook, CheckpointGuard, CheckpointHook
from .loops import EpochBasedTrainLoop, IterBasedTrainLoop
from .resume import latest_checkpoint


class Runner(MMEngineRunner):
    """A runner for one machine or many, with GPUs or without.

    Built from a config as mmengine's. In addition:

    - Several processes run on CPUs, over gloo, where mmengine wants a GPU per process. SyncBN,
      which torch has for GPUs only, becomes BN there (mmengine does so for a single process).
    - A checkpoint has to fit the model: what is missing or unexpected is listed, and one that
      matches nothing of the backbone is refused.
    - Checkpoints are written by :class:`CheckpointHook`, and a resumed run goes on exactly as it
      would have (:mod:`mala_mm.engine.loops`).
    - Training stops at a loss or a gradient that is not finite (:class:`CheckInvalidLossHook`).
    - What a run wrote can be removed again, if it failed before it did any work.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        work_dir = Path(kwargs['work_dir']).absolute()
        self._made_folders = [p for p in (work_dir, *work_dir.parents) if not p.exists()]
        self._config_was_there = (work_dir / Path(kwargs['cfg'].filename).name).exists()
        try:
            super().__init__(*args, **kwargs)
        except Exception:
            self.discard_outputs()
            raise
        if not any(isinstance(hook, CheckInvalidLossHook) for hook in self._hooks):
            self.register_hook(CheckInvalidLossHook())
        # Other classes than the checkpoint's are wanted in fine-tuning, and a mistake elsewhere.
        fine_tuning = self._train_dataloader is not None and not self._resume
        self.register_hook(CheckpointGuard(other_heads=fine_tuning))

    def discard_outputs(self) -> None:
        """Remove what this run wrote. For runs that failed before they did any work."""
        if not is_main_process():
            return
        shutil.rmtree(getattr(self, '_log_dir', ''), ignore_errors=True)
        if not self._config_was_there:
            (Path(self.work_dir) / Path(self.cfg.filename).name).unlink(missing_ok=True)
        for folder in self._made_folders:
            if any(folder.glob('*')):
                break
            folder.rmdir()

    def setup_env(self, env_cfg: dict) -> None:
        """Start the process group and set resource limits.

        Args:
            env_cfg (dict): The config's ``env_cfg``; ``dist_cfg.backend`` counts on GPUs only.
        """
        if self._launcher == 'pytorch' and get_device() == 'cpu' and not is_distributed():
            torch.distributed.init_process_group('gloo')
        super().setup_env(env_cfg)

    def wrap_model(self, model_wrapper_cfg: dict | None, model: nn.Module) -> nn.Module:
        """Move the model to its device and wrap it for distributed training.

        Args:
            model_wrapper_cfg (dict, optional): The config's ``model_wrapper_cfg``.
            model (nn.Module): The model.
        """
        if self.distributed and get_device() == 'cpu':
            self.logger.info('No GPU: SyncBN layers, if any, become BN layers.')
            model = revert_sync_batchnorm(model)
            defaults = dict(
                type='MMDistributedDataParallel',
                broadcast_buffers=False,
                find_unused_parameters=self.cfg.get('find_unused_parameters', False),
            )
            model_wrapper_cfg = {**defaults, **(model_wrapper_cfg or {}), 'device_ids': None}
        return super().wrap_model(model_wrapper_cfg, model)

    def register_hook(self, hook: Hook | dict, priority: Any = None) -> None:
        """Register a hook; ours takes the place of mmengine's CheckpointHook.

        Args:
            hook (Hook | dict): The hook or its config.
            priority (int | str | Priority, optional): As in mmengine.
        """
        if isinstance(hook, dict) and _names(hook.get('type'), HOOKS, MMEngineCheckpointHook):
            hook = {**hook, 'type': CheckpointHook}
        super().register_hook(hook, priority)

    def build_train_loop(self, loop: BaseLoop | dict) -> BaseLoop:
        """Build the loop; ours take the place of mmengine's.

        Args:
            loop (BaseLoop | dict): The loop or its config.
        """
        if isinstance(loop, dict):
            loop = dict(loop)
            if 'type' not in loop and 'by_epoch' in loop:
                by_epoch = loop.pop('by_epoch')
                loop['type'] = EpochBasedTrainLoop if by_epoch else IterBasedTrainLoop
            for ours in (EpochBasedTrainLoop, IterBasedTrainLoop):
                if _names(loop.get('type'), LOOPS, ours.__base__):
                    loop['type'] = ours
        return super().build_train_loop(loop)

    @staticmethod
    def build_dataloader(*args: Any, **kwargs: Any) -> DataLoader:
        """Build a data loader that leaves the process's random generator alone.

        Files that cannot be read end in a sentence with their names.

        Args:
            *args: As in mmengine.
            **kwargs: As in mmengine.
        """
        loader = MMEngineRunner.build_dataloader(*args, **kwargs)
        guard_pipeline(loader.dataset)
        if loader.generator is None:
            # torch draws a seed for workers whenever iteration starts, unless they persist. What
            # mmengine seeds its workers with does not depend on it.
            loader.generator = torch.Generator()
        return loader

    def load_or_resume(self) -> None:
        """Load or resume a checkpoint; look for the latest one if none was named.

        Raises:
            UserError: If the run has had checkpoints and none can be read.
        """
        if self._resume and self._load_from is None and not self._has_loaded:
            found = [latest_checkpoint(self.work_dir) if is_main_process() else None]
            broadcast_object_list(found)
            self._load_from, self._resume = found[0], found[0] is not None
            if not self._resume:
                self.logger.info(f'Nothing to resume in {self.work_dir}: training starts anew.')
        super().load_or_resume()


def _names(value: Any, registry: Registry, cls: type) -> bool:
    """Whether the type of a config stands for this very class."""
    return value is cls or (isinstance(value, str) and registry.get(value) is cls)
