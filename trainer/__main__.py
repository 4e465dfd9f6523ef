"""The command line: `stoker`, `python -m stoker` and `python -m stoker.trainer`."""

import os
import signal
import sys


def run() -> int:
    """Run the command line; Ctrl-C ends it without a traceback also while its modules are imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as in the background
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from .cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
