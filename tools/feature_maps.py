#!/usr/bin/env python
"""Draws features and Grad-CAM: ``tools/feature_maps.py IMAGE CONFIG [CHECKPOINT]``."""

import sys

from mala_mm.engine import cli

if __name__ == '__main__':
    sys.exit(cli.run('mala_mm.analysis.feature_maps'))
