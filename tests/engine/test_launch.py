"""The launcher says once why the processes ended, and with which code."""

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mala_mm.engine import launch


def failing(tmp_path, exitcode, message):
    """What torchrun raises for a process that has left a message, or none."""
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=exitcode, error_file='none')
    failure.error_file_data = dict(message=message)
    return ChildFailedError('train.py', {3: failure})


@pytest.mark.parametrize(
    ('exitcode', 'message', 'code', 'sentence'),
    [
        (1, 'no data', 1, 'error: no data'),
        (7, dict(traceback='...'), 7, 'error: process 3 ended with 7; its messages stand above'),
        (-9, None, 1, 'error: process 3 ended with -9; its messages stand above'),
    ],
)
def test_the_first_failure_is_told(
    tmp_path, monkeypatch, capsys, exitcode, message, code, sentence
):
    error = failing(tmp_path, exitcode, message)

    def torchrun(argv):
        raise error

    monkeypatch.setattr(launch, 'torchrun', torchrun)
    monkeypatch.setattr(launch.logging, 'disable', lambda level: None)
    assert launch.main([]) == code
    assert capsys.readouterr().err.strip() == sentence


def test_other_errors_of_the_network_keep_their_traceback(monkeypatch):
    def torchrun(argv):
        raise DistNetworkError('no route to host')

    monkeypatch.setattr(launch, 'torchrun', torchrun)
    monkeypatch.setattr(launch.logging, 'disable', lambda level: None)
    with pytest.raises(DistNetworkError, match='no route'):
        launch.main([])
