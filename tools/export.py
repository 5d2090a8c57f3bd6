#!/usr/bin/env python
"""Exports a model to ONNX or a PyTorch program: ``tools/export.py CONFIG CHECKPOINT [options]``."""

import sys

from mala_mm.engine import cli

if __name__ == '__main__':
    sys.exit(cli.run('mala_mm.engine.export'))
