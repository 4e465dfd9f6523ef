"""Exit codes, and the exception for errors reported to the user without a traceback."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_IO = 74
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class UserError(Exception):
    """An error the user can fix. The command line prints its lines without a traceback and exits with `exit_code`."""

    def __init__(self, lines: str | Sequence[str], exit_code: int = EXIT_BAD_INPUT) -> None:
        self.lines = [lines] if isinstance(lines, str) else list(lines)
        self.exit_code = exit_code
        super().__init__("\n".join(self.lines))


def save_traceback(text: str) -> Path | None:
    """Write a traceback to a new file in the current directory; return its path, or None if it cannot be written.

    Ranks may crash in the same second: each gets its own file.
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
