"""Modules of the user's own, which register what a configuration can then name: those of `--import` alone.

No file of a configuration and no checkpoint can name a module. The launcher hands the names of the command line on to
the processes it starts.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from ..utils import environment
from ..utils.errors import UserError


def import_modules(names: Sequence[str]) -> None:
    """Import modules by their dotted names, from what is installed or else from the current directory.

    Raises:
        UserError: a name is none, there is no such module, or it raises an error of its own.
    """
    if not names:
        return
    environment.prepare_process()  # before torch, which a module may import
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last, so that no file here stands in for a module of somebody else
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UserError(
                f"--import {name}: is no name of a module; write my_package.my_data, without .py and folders"
            )
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise _failed(name, error) from error
            raise UserError(f"--import {name}: there is no such module, neither installed nor in {here}") from None
        except Exception as error:
            raise _failed(name, error) from error


def _failed(name: str, error: Exception) -> UserError:
    trace = error.__traceback__
    where = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith("<frozen "):
            where = f" ({code.co_filename}:{trace.tb_lineno})"
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({error.filename}:{error.lineno})"
    text = " ".join(str(error).split())[:300]
    return UserError(f"--import {name}: {type(error).__name__}: {text}{where}")
