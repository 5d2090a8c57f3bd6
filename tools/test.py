#!/usr/bin/env python
"""Evaluates a checkpoint: ``tools/test.py CONFIG CHECKPOINT [options]``."""

import sys

from mala_mm.engine import cli

if __name__ == '__main__':
    sys.exit(cli.run('mala_mm.engine.test'))
