#!/usr/bin/env python
"""Writes generated scenes: ``tools/make_demo_data.py --out DIR [options]``."""

import sys

from mala_mm.engine import cli

if __name__ == '__main__':
    sys.exit(cli.run('mala_mm.demo.make_data'))
