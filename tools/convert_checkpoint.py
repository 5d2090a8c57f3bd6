#!/usr/bin/env python
"""Converts a published checkpoint: ``tools/convert_checkpoint.py SRC DST [options]``."""

import sys

from mala_mm.engine import cli

if __name__ == '__main__':
    sys.exit(cli.run('mala_mm.checkpoint.convert'))
