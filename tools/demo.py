#!/usr/bin/env python
"""Trains, evaluates and shows two models on generated images: ``tools/demo.py [--out DIR]``."""

import sys

from mala_mm.engine import cli

if __name__ == '__main__':
    sys.exit(cli.run('mala_mm.demo.demonstration'))
