"""`python -m stoker`: the command line."""

import sys

from .trainer.cli import main

sys.exit(main())
