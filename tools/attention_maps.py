#!/usr/bin/env python
"""Draws the scores of a query: ``tools/attention_maps.py IMAGE CONFIG [CHECKPOINT ...]``."""

import sys

from mala_mm.engine import cli

if __name__ == '__main__':
    sys.exit(cli.run('mala_mm.analysis.attention_maps'))
