#!/usr/bin/env python
"""Predicts on images or video: ``tools/image_demo.py CONFIG CHECKPOINT INPUT... [options]``."""

import sys

from mala_mm.engine import cli

if __name__ == '__main__':
    sys.exit(cli.run('mala_mm.engine.image_demo'))
