#!/usr/bin/env python
"""Counts parameters and multiply-adds: ``tools/get_flops.py CONFIG --shape PIXELS``."""

import sys

from mala_mm.engine import cli

if __name__ == '__main__':
    sys.exit(cli.run('mala_mm.analysis.get_flops'))
