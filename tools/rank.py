#!/usr/bin/env python
"""Measures ranks: ``tools/rank.py CONFIG [CHECKPOINT ...] --images PATH ...``."""

import sys

from mala_mm.engine import cli

if __name__ == '__main__':
    sys.exit(cli.run('mala_mm.analysis.rank'))
