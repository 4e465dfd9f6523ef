"""Plugins: user modules of `--import`, which register components for use in configurations.

Only the command line can name modules, never a configuration file or a checkpoint. The launcher passes the names on to
the processes it starts.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from . import environment
from .errors import UserError
from .text import one_line

_PACKAGE = Path(__file__).resolve().parents[2]


def import_plugins(names: Sequence[str]) -> None:
    """Import modules by their dotted names, from the installed packages or else the current directory.

    Raises:
        UserError: a name is invalid, the module does not exist, or importing it raises.
    """
    if not names:
        return
    environment.prepare_process()  # before torch, which a module may import
    cwd = str(Path.cwd())
    if cwd not in sys.path:
        sys.path.append(cwd)  # last, so that no file there shadows an installed module
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UserError(
                f"--import {name}: not a module name; use a dotted name such as my_package.my_data, without .py and /"
            )
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if name.endswith(".py"):
                raise UserError(f"--import {name}: write the name of the module, --import {name[:-3]}") from None
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise _failed(name, error) from error
            raise UserError(f"--import {name}: there is no such module, neither installed nor in {cwd}") from None
        except Exception as error:
            raise _failed(name, error) from error


def _failed(name: str, error: Exception) -> UserError:
    trace = error.__traceback__
    where = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(("<frozen ", str(_PACKAGE))):
            where = f" ({code.co_filename}:{trace.tb_lineno})"
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({error.filename}:{error.lineno})"
    text = one_line(error, 300).rstrip(".")
    return UserError(f"--import {name}: {type(error).__name__}: {text}{where}")
