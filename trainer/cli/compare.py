"""`stoker compare`: results, configurations and curves of several runs, as text and as a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..utils.errors import EXIT_OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `stoker compare`."""
    parser.add_argument(
        "folders", metavar="DIR", type=Path, nargs="+", help="run directories, or that of a sweep for all its jobs"
    )
    parser.add_argument(
        "--output", metavar="FILE", type=Path, default=Path("compare.html"), help="the page (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="replace FILE also if it is no page of stoker")


def run(args: argparse.Namespace) -> int:
    """Print the comparison, and write the page.

    Raises:
        UserError: a path is no run (exit code 2), or the page cannot be written (74); the text is printed then too.
    """
    from ..report.comparison import compare_runs
    from ..report.page import cannot_write, comparison_page, write_page

    comparison = compare_runs(args.folders)
    lines = list(comparison.lines())
    try:  # before the text, whose reader may end early
        write_page(args.output, comparison_page(comparison), force=args.force)
        lines += ["", f"curves in {args.output}"]
    except OSError as error:
        raise cannot_write(args.output, error) from error
    finally:
        print("\n".join(lines), flush=True)
    return EXIT_OK
