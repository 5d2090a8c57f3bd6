#!/usr/bin/env python
"""Looks inside of models in a browser: ``tools/explore.py CONFIG [CHECKPOINT ...]``."""

import sys

from mala_mm.engine import cli

if __name__ == '__main__':
    sys.exit(cli.run('mala_mm.analysis.explore'))
