#!/usr/bin/env python
"""Writes a config for your own images: ``tools/new_dataset.py --coco JSON --images DIR ...``."""

import sys

from mala_mm.engine import cli

if __name__ == '__main__':
    sys.exit(cli.run('mala_mm.engine.new_dataset.command'))
