#!/usr/bin/env python
"""Trains a small model with each attention mechanism: ``tools/compare_attention.py --out DIR``."""

import sys

from mala_mm.engine import cli

if __name__ == '__main__':
    sys.exit(cli.run('mala_mm.analysis.compare_attention'))
