"""`stoker report`: write the page of a run anew, finished, running or killed, of this or an older version."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..utils.errors import EXIT_OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `stoker report`."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="a run directory")
    parser.add_argument("--output", metavar="FILE", type=Path, help="the page (default: report.html in DIR)")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path.

    Raises:
        UserError: not a run directory (exit code 2), or the page cannot be written (74).
    """
    from ..report.page import cannot_write, write_report

    try:
        path = write_report(args.folder, args.output)
    except OSError as error:
        raise cannot_write(args.output or args.folder, error) from error
    print(path)
    return EXIT_OK
