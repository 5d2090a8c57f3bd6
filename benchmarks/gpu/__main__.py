"""Everything worth knowing about the kernels and the models on one GPU, in one command.

    python -m benchmarks.gpu [--out DIR] [--minutes 9] [--parts checks kernels ...]
    python -m benchmarks.gpu --dry-run             # on the CPU, interpreted, at toy sizes
    python -m benchmarks.gpu.wheels --out .whl     # before: what a machine without network lacks
    python -m benchmarks.gpu.report DIR            # after: tables and drawings

Parts run in the order of the list below, published variants first. Every job is a process of its
own with a time limit: a fault, a hang or a lost device ends one job. Whatever a job has measured is
in ``DIR/session.json`` a second later, with the device, the driver, the versions and the commit;
what was left out is named there with its reason. Nothing is timed whose check failed in the same
session. A later session with ``--out`` of the same folder goes on: its parts replace those of
before.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Kernels are interpreted or compiled by what stands here when Triton loads.
if '--dry-run' in sys.argv:
    os.environ['TRITON_INTERPRET'] = '1'

from benchmarks.gpu import jobs, report
from benchmarks.gpu.session import Session


def main(argv: list[str] | None = None) -> int:
    """Run the session; 1 if a check failed."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.gpu',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--out', type=Path, default=Path('work_dirs/gpu'), metavar='DIR')
    parser.add_argument('--minutes', type=float, default=9, help='for everything, checks too')
    parser.add_argument('--parts', nargs='+', choices=jobs.PARTS, default=list(jobs.PARTS))
    parser.add_argument('--workers', type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument('--dry-run', action='store_true', help='on the CPU, at toy sizes')
    args = parser.parse_args(argv)
    if not args.dry_run:
        import torch

        if not torch.cuda.is_available():
            parser.error('no CUDA device here; --dry-run does without')
    session = Session(args.out, 60 * args.minutes, args.workers, in_process=args.dry_run)
    session.describe(args.dry_run)
    for part in args.parts:
        session.results['left out'].pop(part, None)
        wrong = jobs.wrong(session.rows('checks') + session.rows('more checks'))
        todo = []
        for job in jobs.PARTS[part](args.dry_run):
            if jobs.variant(job) in wrong:
                session.leave_out(part, job, 'its check failed')
            else:
                todo.append(job)
        session.run(part, todo, alone=part not in jobs.TOGETHER)
    print(report.summary(session.results))
    report.write(args.out)
    failed = [row for row in session.rows('checks') if not row['passed']]
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
