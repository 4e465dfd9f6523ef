"""Command lines of stoker in a process that has imported nothing else, beside what they import."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

HEAVY = {"torch", "transformers", "lightning", "lm_eval", "pytorch_lightning"}


def answers(arguments: list[list[str]], folder: str) -> list[list[Any]]:
    """Return exit code, standard error and heavy imports of each command line, up to the first that has any."""
    from stoker.trainer.cli.main import main

    os.chdir(folder)
    found: list[list[Any]] = []
    for words in arguments:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code: Any = main(words)
            except SystemExit as end:
                code = end.code
        heavy = sorted(HEAVY & set(sys.modules))
        found.append([code, err.getvalue(), heavy])
        if heavy:
            break
    return found
