"""Files are read without executing them, and damaged ones end in a sentence."""

import argparse
import functools
import http.server
import os
import pickle
import re
import threading
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader
from mmengine.runner.checkpoint import load_checkpoint as mmengine_load_checkpoint

from mala_mm.checkpoint import enforce_safe_loading, load_checkpoint, save_checkpoint
from mala_mm.errors import UserError


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), 'w')


class Evaluated(Malicious):
    def __reduce__(self):
        return eval, (f'open({str(self.path)!r}, "w")',)


class Executed(Malicious):
    def __reduce__(self):
        return exec, (f'open({str(self.path)!r}, "w")',)


class InAShell(Malicious):
    def __reduce__(self):
        return os.system, (f'touch {self.path}',)


class ThroughGetattr(Malicious):
    """Reaches for a method by ``getattr``, as HistoryBuffer does."""

    def __reduce__(self):
        return getattr, (HistoryBuffer, '__init__')


def weights():
    generator = torch.Generator().manual_seed(0)
    return OrderedDict(weight=torch.randn(64, 64, generator=generator), bias=torch.zeros(64))


@pytest.fixture
def checkpoint(tmp_path):
    """A file with all that mmengine's Runner puts into one."""
    history = HistoryBuffer([1.0, 2.0, 4.0], [1, 1, 1])
    content = dict(
        meta=dict(epoch=1, iter=3, cfg='model = dict()', dataset_meta=dict(classes=('cat', 'dog'))),
        state_dict=weights(),
        message_hub=dict(
            log_scalars=OrderedDict({'train/loss': history}),
            runtime_info=OrderedDict(best=np.float64(0.5), count=np.int64(3), flag=np.bool_(True)),
            resumed_keys=OrderedDict(best=True),
        ),
        optimizer=dict(state={0: dict(step=torch.tensor(3.0))}, param_groups=[dict(lr=1e-3)]),
        args=argparse.Namespace(lr=1e-3, model='MAViT'),
    )
    path = tmp_path / 'epoch_1.pth'
    torch.save(content, path)
    return path


def test_all_that_mmengine_saves_is_read(checkpoint):
    content = load_checkpoint(checkpoint)
    assert torch.equal(content['state_dict']['weight'], weights()['weight'])
    history = content['message_hub']['log_scalars']['train/loss']
    assert history.mean() == pytest.approx(7 / 3) and history.current() == 4
    assert content['message_hub']['runtime_info'] == dict(best=0.5, count=3, flag=True)
    assert content['args'].lr == 1e-3


def test_files_from_numpy_1_are_read(checkpoint):
    """NumPy 2 moved ``numpy.core`` to ``numpy._core``; files name what wrote them."""
    renamed = pickle.dumps(dict(value=np.float64(0.5), array=np.arange(3)), protocol=2)
    old = renamed.replace(b'numpy._core.', b'numpy.core.')
    assert old != renamed
    loaded = load_with_pickle(checkpoint, old)
    assert loaded['value'] == 0.5 and loaded['array'].tolist() == [0, 1, 2]


def load_with_pickle(path, data):
    """Load a file in torch's zip format whose pickle is ``data``."""
    torch.save({}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, 'w') as archive:
        for name, content in entries.items():
            archive.writestr(name, data if name.endswith('data.pkl') else content)
    return load_checkpoint(path)


@pytest.mark.parametrize('payload', [Malicious, Evaluated, Executed, InAShell, ThroughGetattr])
@pytest.mark.parametrize('zipped', [True, False])
def test_a_malicious_file_is_refused_and_nothing_runs(tmp_path, payload, zipped):
    trace, path = tmp_path / 'trace', tmp_path / 'bad.pth'
    content = dict(state_dict=weights(), extra=payload(trace))
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=rf'{re.escape(str(path))} was refused because it asks for'):
        load_checkpoint(path)
    assert not trace.exists()
    if payload is not ThroughGetattr:  # the file does what it is here to do
        torch.load(path, weights_only=False)
        assert trace.exists()


def truncate(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip_a_bit_of_a_weight(path):
    data = bytearray(path.read_bytes())
    data[data.find(weights()['weight'].numpy().tobytes()) + 1000] ^= 1
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b'')


def replace_with_text(path):
    path.write_text('<html>404: Not Found</html>')


@pytest.mark.parametrize('damage', [truncate, flip_a_bit_of_a_weight, empty, replace_with_text])
def test_a_damaged_file_is_named(checkpoint, damage):
    damage(checkpoint)
    with pytest.raises(UserError) as error:
        load_checkpoint(checkpoint)
    message = str(error.value)
    assert message.startswith(f'Checkpoint {checkpoint} is damaged, cut short or no checkpoint (')
    assert message.endswith('; copy or download it again') and '\n' not in message


def test_torch_itself_misses_the_flipped_bit(checkpoint):
    """Why the checksums are looked at here; if this fails, they need not be any more."""
    flip_a_bit_of_a_weight(checkpoint)
    torch.load(checkpoint, weights_only=False)


def test_missing_files_and_other_contents_are_named(tmp_path):
    with pytest.raises(UserError, match='none.pth does not exist; give the path'):
        load_checkpoint(tmp_path / 'none.pth')
    with pytest.raises(UserError, match='is a folder, not a file'):
        load_checkpoint(tmp_path)
    torch.save([1, 2], tmp_path / 'list.pth')
    with pytest.raises(UserError, match='list.pth holds a list, not a dict of weights'):
        load_checkpoint(tmp_path / 'list.pth')


def test_the_unsafe_way_out_does_not_lead_out(tmp_path, monkeypatch):
    """Users of mmengine 0.10.7 set this variable so that resuming works at all."""
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')
    path = tmp_path / 'bad.pth'
    torch.save(dict(extra=Malicious(tmp_path / 'trace')), path)
    with pytest.raises(UserError, match='was refused'):
        load_checkpoint(path)
    assert not (tmp_path / 'trace').exists()
    assert os.environ['TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'] == '1'
    assert 'TORCH_FORCE_WEIGHTS_ONLY_LOAD' not in os.environ


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A web server on this machine that serves ``tmp_path``."""
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'cache'))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, 'log_message', lambda *args: None)
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{httpd.server_port}'
        httpd.shutdown()


def test_a_url_goes_through_mmengine_and_is_as_safe(checkpoint, tmp_path, server):
    content = load_checkpoint(f'{server}/{checkpoint.name}')
    assert torch.equal(content['state_dict']['weight'], weights()['weight'])
    torch.save(dict(extra=Malicious(tmp_path / 'trace')), tmp_path / 'bad.pth')
    with pytest.raises(UserError, match=r'bad.pth was refused because it asks for'):
        load_checkpoint(f'{server}/bad.pth')
    assert not (tmp_path / 'trace').exists()
    with pytest.raises(UserError, match=r'none.pth could not be loaded \(HTTPError.*404'):
        load_checkpoint(f'{server}/none.pth')


def test_enforcing_covers_mmengine(checkpoint, tmp_path, restore_loading):
    model = torch.nn.Linear(64, 64)
    bad = tmp_path / 'bad.pth'
    torch.save(dict(state_dict=weights(), extra=Malicious(tmp_path / 'trace')), bad)
    enforce_safe_loading()
    for _ in range(2):  # a load leaves the process as safe and as able as before
        content = mmengine_load_checkpoint(model, str(checkpoint), map_location='cpu')
        assert content['message_hub']['log_scalars']['train/loss'].current() == 4
        with pytest.raises(UserError, match='was refused'):
            mmengine_load_checkpoint(model, str(bad), map_location='cpu')
        assert torch.load(checkpoint, weights_only=False)['meta']['iter'] == 3
        with pytest.raises(pickle.UnpicklingError):
            torch.load(bad, weights_only=False)
    assert not (tmp_path / 'trace').exists()


def test_enforcing_drops_the_config_that_resuming_would_run(tmp_path, restore_loading):
    path = tmp_path / 'old.pth'
    torch.save(dict(meta=dict(config='import os', cfg='kept = 1'), state_dict=weights()), path)
    enforce_safe_loading()
    assert CheckpointLoader.load_checkpoint(str(path))['meta'] == dict(cfg='kept = 1')


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
def test_saving_is_atomic(tmp_path, suffix, monkeypatch):
    path = tmp_path / f'weights{suffix}'
    save_checkpoint(path, weights(), dict(epoch=1))
    content = load_checkpoint(path)
    assert content['meta'] == dict(epoch=1)
    assert torch.equal(content['state_dict']['weight'], weights()['weight'])
    with pytest.raises(UserError, match='exists already; choose another name or pass --force'):
        save_checkpoint(path, weights(), {})

    def no_space(_):
        raise OSError(28, 'No space left on device')

    before = path.read_bytes()
    monkeypatch.setattr(os, 'fsync', no_space)
    with pytest.raises(UserError, match='could not be written .*No space left'):
        save_checkpoint(path, weights(), {}, overwrite=True)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_safetensors_that_are_damaged_are_named(tmp_path):
    path = tmp_path / 'weights.safetensors'
    save_checkpoint(path, weights(), {})
    truncate(path)
    with pytest.raises(UserError, match=r'weights.safetensors is damaged, cut short'):
        load_checkpoint(path)
    path.write_bytes(b'no safetensors')
    with pytest.raises(UserError, match=r'weights.safetensors is damaged, cut short'):
        load_checkpoint(path)
