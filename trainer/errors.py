"""How a run ends when it cannot go on: exit codes and the one exception that carries lines for the user."""

from __future__ import annotations

from collections.abc import Sequence

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
