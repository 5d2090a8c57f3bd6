#!/usr/bin/env python
"""Writes the model zoo from its table: ``tools/model_zoo.py [--check]``."""

import sys

from mala_mm.engine import cli

if __name__ == '__main__':
    sys.exit(cli.run('mala_mm.analysis.model_zoo'))
