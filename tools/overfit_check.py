#!/usr/bin/env python
"""Trains on a handful of images: ``tools/overfit_check.py {det,seg} --data-root DIR``."""

import sys

from mala_mm.engine import cli

if __name__ == '__main__':
    sys.exit(cli.run('mala_mm.engine.overfit'))
