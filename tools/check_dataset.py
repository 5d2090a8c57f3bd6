#!/usr/bin/env python
"""Lists what is wrong with a data set: ``tools/check_dataset.py ANNOTATIONS_OR_CONFIG``."""

import sys

from mala_mm.engine import cli

if __name__ == '__main__':
    sys.exit(cli.run('mala_mm.engine.check_dataset'))
