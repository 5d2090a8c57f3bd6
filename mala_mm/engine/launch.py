"""Starts a command in several processes, as ``torchrun`` does, with its errors in one sentence.

    python -m mala_mm.engine.launch --nproc_per_node=2 tools/train.py CONFIG --launcher pytorch

Takes the arguments of ``torch.distributed.run``. An error of the user's, which every process meets,
is printed once; so is a port that is in use.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from .cli import LAUNCHED


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``torch.distributed.run``.

    Args:
        argv (Sequence[str], optional): Its arguments; those of the process by default.

    Returns:
        int: The exit code: that of the process that failed first.
    """
    logging.disable(logging.ERROR)  # of this process: what is to be said of an end is said below
    try:
        torchrun(list(argv) if argv is not None else None)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sentence = failure.error_file_data.get('message')
        if not isinstance(sentence, str):
            sentence = f'process {rank} ended with {failure.exitcode}; its messages stand above'
        print(f'error: {sentence}', file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    except DistNetworkError as error:
        if 'EADDRINUSE' not in str(error) and 'address already in use' not in str(error).lower():
            raise
        print(
            'error: the port for the processes to meet at is in use; choose another (PORT=29501)',
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == '__main__':
    os.environ[LAUNCHED] = '1'
    sys.exit(main())
