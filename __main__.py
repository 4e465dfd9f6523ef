"""`python -m stoker`: the command line."""

import sys

from .trainer.cli.main import main

sys.exit(main())
