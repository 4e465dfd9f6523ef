"""`python -m stoker`: the command line."""

import sys

from .trainer.__main__ import run

sys.exit(run())
