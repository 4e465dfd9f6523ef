"""How a run ends when it cannot go on: exit codes and the one exception that carries lines for the user."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_BAD_INPUT = 2
EXIT_IO = 74
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class UserError(Exception):
    """Something the user can mend. The command line prints its lines, without a traceback, and exits with its code."""

    def __init__(self, lines: str | Sequence[str], exit_code: int = EXIT_BAD_INPUT) -> None:
        self.lines = [lines] if isinstance(lines, str) else list(lines)
        self.exit_code = exit_code
        super().__init__("\n".join(self.lines))


def keep_trace(text: str) -> Path | None:
    """Write a traceback to a new file in the current directory; None where none can be written.

    The processes of a run may crash in the same second: each has a file of its own.
    """
    name = time.strftime("stoker-crash-%Y%m%d-%H%M%S")
    for path in (Path(f"{name}.txt"), Path(f"{name}-{os.getpid()}.txt")):
        try:
            with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except FileExistsError:
            continue
        except OSError:
            return None
        return path
    return None
