#!/usr/bin/env python
"""Trains a detector, segmentor or classifier: ``tools/train.py CONFIG [options]``."""

import sys

from mala_mm.engine import cli

if __name__ == '__main__':
    sys.exit(cli.run('mala_mm.engine.train'))
