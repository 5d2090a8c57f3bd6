"""The checkpoint hook: old ones go when new ones are there, and what is damaged is not kept."""

import os
import resource
import signal
from pathlib import Path

import pytest

from mala_mm.checkpoint import load_checkpoint
from mala_mm.engine.hooks import CheckpointHook
from mala_mm.engine.resume import latest_checkpoint
from mala_mm.errors import UserError

from ..toy import Toy, files, make_runner


def runner_of(folder, **checkpoint):
    return make_runner(folder, dict(checkpoint), train_cfg=dict(by_epoch=True, max_epochs=3))


def checkpoints(folder):
    return {name for name in files(folder) if name.endswith('.pth')}


def test_it_is_in_the_registry_and_keeps_mmengines_arguments(tmp_path):
    runner = make_runner(
        tmp_path,
        default_hooks=dict(
            checkpoint=dict(type='mala_mm.CheckpointHook', filename_tmpl='step{}.pth', interval=2)
        ),
        train_cfg=dict(by_epoch=True, max_epochs=5),
    )
    assert any(type(hook) is CheckpointHook for hook in runner._hooks)
    runner.train()
    assert checkpoints(tmp_path) == {'step2.pth', 'step4.pth', 'step5.pth'}
    assert latest_checkpoint(tmp_path) == str(tmp_path / 'step5.pth')


def test_the_old_one_is_removed_last(tmp_path, monkeypatch):
    """With one to keep, there is never none."""
    seen = []
    fsync = os.fsync

    def watched(descriptor):
        seen.append(checkpoints(tmp_path))
        fsync(descriptor)

    monkeypatch.setattr(os, 'fsync', watched)
    runner = runner_of(tmp_path, max_keep_ckpts=1)
    runner.train()
    first = seen.index({'epoch_1.pth'})
    assert all(seen[first:])
    assert {'epoch_1.pth', 'epoch_2.pth'} in seen
    assert files(tmp_path) == {'epoch_3.pth', 'last_checkpoint', 'toy.py'}
    kept = load_checkpoint(tmp_path / 'epoch_3.pth')['message_hub']['runtime_info']
    assert kept['keep_ckpt_ids'] == [3]


def test_the_old_best_one_is_removed_last(tmp_path):
    """mmengine removes the best checkpoint before it writes the next best one."""
    runner = runner_of(tmp_path, save_best='score', rule='greater')
    hook = next(hook for hook in runner._hooks if type(hook) is CheckpointHook)
    writes = []
    save = runner.save_checkpoint

    def recorded(out_dir, filename, *args, **kwargs):
        writes.append((filename, {n for n in files(tmp_path) if n.startswith('best')}))
        save(out_dir, filename, *args, **kwargs)

    runner.save_checkpoint = recorded
    runner.train()
    for score in (1.0, 2.0):
        runner.train_loop._epoch += 1
        hook._save_best_checkpoint(runner, dict(score=score))
    (second,) = [seen for name, seen in writes if 'best_score_epoch_5' in name]
    assert second == {'best_score_epoch_4.pth'}
    assert {n for n in files(tmp_path) if n.startswith('best')} == {'best_score_epoch_5.pth'}


def test_a_better_one_of_the_same_name_stays(tmp_path):
    """Validated again at the same epoch, as a resumed run may: it is not the old one that goes."""
    runner = runner_of(tmp_path, save_best='score', rule='greater')
    hook = next(hook for hook in runner._hooks if type(hook) is CheckpointHook)
    runner.train()
    hook._save_best_checkpoint(runner, dict(score=1.0))
    (best,) = tmp_path.glob('best*')
    first = best.stat().st_ino
    hook._save_best_checkpoint(runner, dict(score=2.0))
    assert best.stat().st_ino != first
    hub = load_checkpoint(best)['message_hub']['runtime_info']
    assert (hub['best_score'], Path(hub['best_ckpt']).name) == (2.0, best.name)


@pytest.mark.parametrize('elsewhere', [False, True])
def test_what_a_kill_kept_from_being_removed_goes_on_resuming(tmp_path, monkeypatch, elsewhere):
    """Between the renaming of the new one and the removal of the old one."""

    class Killed(BaseException):
        pass

    def die(self):
        if self.names():
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr('mala_mm.engine.hooks.checkpoint._LateRemoval.remove_now', die)
        with pytest.raises(Killed):
            runner_of(tmp_path / 'run', max_keep_ckpts=1).train()
    run = tmp_path / 'run'
    assert checkpoints(run) == {'epoch_1.pth', 'epoch_2.pth'}
    settings = dict(resume=True, train_cfg=dict(by_epoch=True, max_epochs=3))
    if elsewhere:  # another folder's files of these names are other files
        settings['load_from'] = str((tmp_path / 'moved.pth').absolute())
        (run / 'epoch_2.pth').rename(tmp_path / 'moved.pth')
    make_runner(
        run, dict(max_keep_ckpts=1), experiment_name=f'again in {tmp_path}', **settings
    ).train()
    assert checkpoints(run) == {'epoch_3.pth'} | ({'epoch_1.pth'} if elsewhere else set())


@pytest.fixture
def small_files():
    """A disk that takes no more than a few thousand bytes per file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize('epoch', [1, 2])
def test_a_full_disk_leaves_the_truth(tmp_path, small_files, epoch):
    """A real refusal of the system: the file outgrows what it may hold."""

    class Filling(Toy):
        calls = 0

        def forward(self, x, mode='tensor'):
            self.calls += 1
            if self.calls == 4 * epoch:
                small_files(4096)
            return super().forward(x, mode)

    runner = make_runner(
        tmp_path,
        dict(max_keep_ckpts=1),
        model=Filling(),
        train_cfg=dict(by_epoch=True, max_epochs=3),
    )
    with pytest.raises(UserError) as caught:
        runner.train()
    message = str(caught.value)
    assert message.startswith(f'{tmp_path}/epoch_{epoch}.pth could not be written ([Errno 27]')
    if epoch == 1:
        assert message.endswith('there is no earlier checkpoint: make room and start again')
        assert checkpoints(tmp_path) == set()
        assert latest_checkpoint(tmp_path) is None
    else:
        assert f'{tmp_path}/epoch_1.pth is intact: make room and continue with' in message
        assert latest_checkpoint(tmp_path) == str(tmp_path / 'epoch_1.pth')
    assert not [n for n in files(tmp_path) if n.endswith('.part')]


def test_what_reads_back_differently_is_not_kept(tmp_path, monkeypatch):
    """As on a disk that loses a bit: the checksums in the file show it."""
    runner = runner_of(tmp_path)
    save = runner.save_checkpoint

    def flipping(out_dir, filename, *args, **kwargs):
        save(out_dir, filename, *args, **kwargs)
        part = Path(out_dir, filename)
        content = bytearray(part.read_bytes())
        at = content.index(runner.model.backbone.weight.detach().numpy().tobytes())
        content[at] ^= 1
        part.write_bytes(content)

    runner.save_checkpoint = flipping
    with pytest.raises(UserError, match='epoch_1.pth could not be written .*reads back'):
        runner.train()
    assert checkpoints(tmp_path) == set()


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    class Overflowing(Toy):
        def forward(self, x, mode='tensor'):
            self.calls += 1
            if self.calls == 8:
                # Behind the last look at losses and gradients, as when a step overflows.
                self.backbone.bias.register_post_accumulate_grad_hook(self.spoil)
            return super().forward(x, mode)

        @staticmethod
        def spoil(parameter):
            parameter.data.fill_(float('nan'))

        calls = 0

    runner = make_runner(tmp_path, model=Overflowing(), train_cfg=dict(by_epoch=True, max_epochs=3))
    with pytest.raises(UserError, match=r'not finite at iteration \d, the first in backbone.bias'):
        runner.train()
    assert checkpoints(tmp_path) == {'epoch_1.pth'}


def test_stale_parts_are_removed_at_the_start(tmp_path):
    (tmp_path / '.epoch_7.pth.0123abcd.part').touch()
    (tmp_path / 'notes.txt').touch()
    runner_of(tmp_path).train()
    assert not [n for n in files(tmp_path) if n.endswith('.part')]
    assert 'notes.txt' in files(tmp_path)


class Plain:
    pass


def test_what_safe_loading_would_refuse_is_said_at_once(tmp_path, capsys):
    runner = make_runner(tmp_path, log_level='WARNING')
    runner.message_hub.update_info('object', Plain())
    runner.train()
    assert checkpoints(tmp_path) == {'epoch_1.pth'}
    assert 'test_checkpoint.Plain, which safe loading will refuse' in capsys.readouterr().out
