"""Trains the toy in forks that are killed, and says which checkpoint each kill left.

    python -m tests.engine.kill_driver FOLDER SEED KILLS PLACE...

Imports once, which is what takes its time. ``FOLDER/killed`` is trained, by runs that keep one
checkpoint and write one in every iteration, until each was killed: ``KILLS`` times at a random
moment after its first checkpoint, and once in each ``PLACE`` of a save. Then it is trained to its
end, and ``FOLDER/whole`` without a kill. Prints what was found as JSON.
"""

import json
import os
import random
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import matplotlib.pyplot  # noqa: F401, a runner imports these two when it is built
import torchvision  # noqa: F401
from mmengine.runner import Runner

from mala_mm import files
from mala_mm.checkpoint import load_checkpoint
from mala_mm.engine.hooks import checkpoint
from mala_mm.engine.resume import latest_checkpoint

from .toy import make_runner

NEVER = 10**6
WORKERS = 1  # its random numbers are part of the result, and it must not outlive its run
PLACES = {
    'part is empty': (files, '_lock', 'after'),
    'part is half written': (Runner, 'save_checkpoint', 'half'),
    'part is written': (files, '_sync', 'before'),
    'part is read back': (os, 'replace', 'before'),
    'new one stands': (files, '_sync_names', 'before'),
    'old one is to go': (checkpoint._LateRemoval, 'remove_now', 'before'),
}


def halt_at(place, folder):
    """Let this process stand still there: a save that takes for ever."""
    owner, name, when = PLACES[place]
    original = getattr(owner, name)

    def slow(*args, **kwargs):
        if when != 'before':
            original(*args, **kwargs)
        if when == 'half':
            (part,) = Path(args[1]).glob('.*.part')
            os.truncate(part, part.stat().st_size // 2)
        (folder / 'halted').touch()
        time.sleep(600)

    setattr(owner, name, slow)


def train(work_dir, max_iters, place=None):
    """Resume in a fork, the leader of a group of processes."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        for stream in (1, 2):
            os.dup2(os.open(f'{work_dir}.log', os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        if place is not None:
            halt_at(place, work_dir.parent)
        make_runner(
            work_dir,
            dict(by_epoch=False, max_keep_ckpts=1),
            WORKERS,
            resume=True,
            train_cfg=dict(by_epoch=False, max_iters=max_iters),
            randomness=dict(seed=5),
        ).train()
        code = 0
    finally:
        os._exit(code)


@contextmanager
def killed(child):
    """Kill a run and its workers behind the block."""
    try:
        yield
    finally:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), 'it ended by itself'
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)


def wait_for(condition, child):
    while (
        not condition() and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    ):
        time.sleep(0.002)


def state_of(work_dir):
    """The iteration that training would go on from, and the checkpoints that there are."""
    names = {p.name for p in work_dir.glob('*.pth')}
    path = latest_checkpoint(work_dir)
    return dict(found=path and load_checkpoint(path)['meta']['iter'], names=sorted(names))


def main(folder, seed, kills, *places):
    work_dir, moments = Path(folder) / 'killed', random.Random(int(seed))
    report = dict(random=[], inside=[])
    for _ in range(int(kills)):
        before = set(work_dir.glob('*.pth'))
        child = train(work_dir, NEVER)
        with killed(child):
            wait_for(lambda known=before: set(work_dir.glob('*.pth')) - known, child)
            time.sleep(moments.uniform(0, 0.2))
        report['random'].append(state_of(work_dir))
    for place in places:
        (work_dir.parent / 'halted').unlink(missing_ok=True)
        child = train(work_dir, NEVER, place)
        with killed(child):
            wait_for((work_dir.parent / 'halted').exists, child)
        report['inside'].append(dict(place=place, **state_of(work_dir)))
    last = report['end'] = state_of(work_dir)['found'] + 3
    report['codes'] = [
        os.waitpid(train(work_dir.with_name(name), last), 0)[1] for name in ('killed', 'whole')
    ]
    print(json.dumps(report))


if __name__ == '__main__':
    main(*sys.argv[1:])
