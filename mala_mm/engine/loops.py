"""mmengine's training loops, over batches that can be had again.

A resumed run equals an uninterrupted one only if it sees the same images, augmented alike. mmengine
gives each worker process a random generator that lives as long as the worker, so that a batch
depends on all that the same worker loaded before it. Here the random numbers of a batch depend on
the seed of the run and the number of the batch alone: whoever loads it, in a worker or not, before
an interruption or after it, gets the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmengine.dataset import InfiniteSampler
from mmengine.dist import get_rank
from mmengine.logging import print_log
from mmengine.registry import DATA_SAMPLERS
from mmengine.runner import EpochBasedTrainLoop as MMEngineEpochBasedTrainLoop
from mmengine.runner import IterBasedTrainLoop as MMEngineIterBasedTrainLoop
from torch.utils.data import BatchSampler, DataLoader, Sampler

from .random_states import seeded


class NumberedBatch(list):
    """The indices of a batch.

    Args:
        indices (Sequence[int]): Places in the data set.
        key (tuple[int, ...]): What the random numbers of the batch depend on.
    """

    def __init__(self, indices: Sequence[int] = (), key: tuple[int, ...] = ()) -> None:
        super().__init__(indices)
        self.key = key


class NumberedBatchSampler(Sampler):
    """The batches of another batch sampler, numbered, from any of them on.

    Args:
        sampler (Sampler): Where indices come from.
        batch_size (int): Indices per batch.
        batches (dict, optional): The config of the other batch sampler; torch's by default.
        endless (bool): Whether a pass over the data is followed by the next. Defaults to False.

    Attributes:
        seed (int): That of the sampler.
        epoch (int): The epoch that the next iterator belongs to.
        first (int): The number of the batch that the next iterator begins with.
    """

    def __init__(
        self,
        sampler: Sampler,
        batch_size: int,
        batches: dict | None = None,
        endless: bool = False,
    ) -> None:
        self.sampler, self.batch_size, self.endless = sampler, batch_size, endless
        self.batches = batches or dict(type=BatchSampler, drop_last=False)
        self.seed = int(getattr(sampler, 'seed', None) or 0)
        self.epoch = self.first = 0

    def __len__(self) -> int:
        """Return the number of batches in one pass over the data."""
        return len(self._one_pass())

    def __iter__(self) -> Iterator[NumberedBatch]:
        """Iterate from batch ``first`` of ``epoch`` on."""
        first, self.first = self.first, 0
        epoch, number, passed = self.epoch, 0, 0
        if isinstance(self.sampler, InfiniteSampler):
            # It would continue where another iterator, such as that of upstream's mmengine before
            # it resumes, has got.
            self.sampler.indices = self.sampler._indices_of_rank()
        while True:
            if self.endless and hasattr(self.sampler, 'set_epoch'):
                self.sampler.set_epoch(passed)
            before = number
            for indices in self._one_pass():
                if number >= first:
                    yield NumberedBatch(indices, (self.seed, get_rank(), epoch, number))
                number += 1
            if not self.endless:
                return
            if number == before:
                raise ValueError(
                    f'the training set does not fill one batch of {self.batch_size}; '
                    'lower train_dataloader.batch_size'
                )
            passed += 1

    def _one_pass(self) -> Sampler:
        # A new one each time: batch samplers keep what did not fill a batch.
        parts = dict(sampler=self.sampler, batch_size=self.batch_size)
        return DATA_SAMPLERS.build(dict(self.batches), default_args=parts)

    def load_seed(self, seed: int) -> None:
        """Take the order and the random numbers of another run.

        Args:
            seed (int): The ``seed`` of its batch sampler.
        """
        self.seed = seed
        if hasattr(self.sampler, 'seed'):
            self.sampler.seed = seed


def _load_batch(dataset: Any, batch: Sequence[int]) -> list:
    with seeded(*getattr(batch, 'key', ())):
        return [dataset[index] for index in batch]


def build_dataloader(runner: Any, dataloader: DataLoader | dict, endless: bool) -> DataLoader:
    """Build a data loader whose batches are numbered.

    Args:
        runner (Runner): Gives the seed.
        dataloader (DataLoader | dict): A config as mmengine's, or a data loader, which stays as
            it is.
        endless (bool): As in :class:`NumberedBatchSampler`.
    """
    if not isinstance(dataloader, DataLoader):
        cfg = dict(dataloader)
        batches = cfg.get('batch_sampler')
        if batches is None:
            batches = dict(type=BatchSampler, drop_last=cfg.pop('drop_last', False))
        if isinstance(batches, Mapping):
            numbered = dict(type=NumberedBatchSampler, batches=dict(batches), endless=endless)
            dataloader = {**cfg, 'batch_sampler': numbered}
    randomness = runner._randomness_cfg
    loader = runner.build_dataloader(
        dataloader, seed=runner.seed, diff_rank_seed=randomness.get('diff_rank_seed', False)
    )
    if isinstance(loader.batch_sampler, NumberedBatchSampler) and hasattr(
        loader.dataset, '__dict__'
    ):
        # torch asks a data set for whole batches by this name.
        loader.dataset.__getitems__ = functools.partial(_load_batch, loader.dataset)
    return loader


class _Batches:
    """What mmengine's iteration-based loop takes its batches from.

    After resuming, that of the maintained fork calls ``skip_iter``, that of upstream takes and
    drops what was trained before. The batch sampler has been told where to begin, so that neither
    has anything to skip.
    """

    def __init__(self, loader: DataLoader, dropped: int) -> None:
        self._loader, self._dropped, self._batches = loader, dropped, None

    def skip_iter(self, number: int) -> None:
        pass

    def __next__(self) -> Any:
        if self._dropped:
            self._dropped -= 1
            return None
        if self._batches is None:
            self._batches = iter(self._loader)
        return next(self._batches)


class EpochBasedTrainLoop(MMEngineEpochBasedTrainLoop):
    """Train by epochs, and continue within one after resuming. Arguments as in mmengine."""

    def __init__(self, runner: Any, dataloader: DataLoader | dict, *args: Any, **kwargs: Any):
        super().__init__(runner, build_dataloader(runner, dataloader, False), *args, **kwargs)
        self._first = self._done = 0  # batches of this epoch: skipped, trained

    def position(self, meta: Mapping) -> dict[str, int]:
        """Where a checkpoint with this ``meta`` stands among the batches."""
        # A checkpoint at the end of an epoch says that the next has begun.
        within = self._done if meta['epoch'] == self._epoch else 0
        return _position(self.dataloader, within)

    def resume(self, position: Mapping[str, int] | None) -> None:
        """Continue behind a batch of the current epoch.

        Args:
            position (Mapping[str, int], optional): What :meth:`position` returned, if known. The
                epoch begins anew otherwise.
        """
        self._first = self._done = _resume(self.dataloader, position)

    def run_epoch(self) -> None:
        """Train what remains of an epoch."""
        batches = self.dataloader.batch_sampler
        if isinstance(batches, NumberedBatchSampler):
            batches.epoch, batches.first = self._epoch, self._first
        super().run_epoch()
        self._first = self._done = 0

    def run_iter(self, idx: int, data_batch: Sequence[dict]) -> None:
        """Train one batch.

        Args:
            idx (int): Its number among those that remained.
            data_batch (Sequence[dict]): The batch.
        """
        self._done = self._first + idx + 1
        super().run_iter(self._first + idx, data_batch)


class IterBasedTrainLoop(MMEngineIterBasedTrainLoop):
    """Train by iterations. Arguments as in mmengine; nothing is loaded in vain on resuming."""

    def __init__(self, runner: Any, dataloader: DataLoader | dict, *args: Any, **kwargs: Any):
        super().__init__(runner, build_dataloader(runner, dataloader, True), *args, **kwargs)

    def position(self, meta: Mapping) -> dict[str, int]:
        """Where a checkpoint with this ``meta`` stands among the batches."""
        return _position(self.dataloader, meta['iter'])

    def resume(self, position: Mapping[str, int] | None) -> None:
        """Continue behind as many batches as there were iterations.

        Args:
            position (Mapping[str, int], optional): What :meth:`position` returned, if known.
        """
        batches = self.dataloader.batch_sampler
        if isinstance(batches, NumberedBatchSampler):
            _resume(self.dataloader, position)
            batches.first = self._iter
            skips = hasattr(self.dataloader_iterator, 'skip_iter')
            self.dataloader_iterator = _Batches(self.dataloader, 0 if skips else self._iter)


def _position(loader: DataLoader, batch: int) -> dict[str, int]:
    seed = getattr(loader.batch_sampler, 'seed', 0)
    return dict(seed=seed, batch=batch, batches_per_epoch=len(loader))


def _resume(loader: DataLoader, position: Mapping[str, int] | None) -> int:
    """Take over the seed; return the number of batches to skip in this epoch."""
    if position is None or not isinstance(loader.batch_sampler, NumberedBatchSampler):
        return 0
    loader.batch_sampler.load_seed(position['seed'])
    if position['batches_per_epoch'] != len(loader):
        print_log(
            f'An epoch had {position["batches_per_epoch"]} batches before and has {len(loader)} '
            'now: the order of the images differs from that of an uninterrupted run.',
            'current',
            logging.WARNING,
        )
        return 0
    return position['batch']
