#!/usr/bin/env python
"""Writes the weights of a checkpoint alone: ``tools/publish_model.py SRC DST``."""

import sys

from mala_mm.engine import cli

if __name__ == '__main__':
    sys.exit(cli.run('mala_mm.checkpoint.publish'))
