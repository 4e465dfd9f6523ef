"""`python -m stoker.trainer`: the command line."""

import sys

from .cli.main import main

sys.exit(main())
