"""A process that has imported what a run needs, and forks from itself whatever tests have to run in other processes.

To import torch and Lightning takes longer than most of what is run there. `Forks` is the side of the tests, which share
the fixtures `forks` and `compilers`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

SECONDS = 1800
"""After which a call is given up."""


class Forks:
    """Starts the process when the first call comes.

    Args:
        imported: the module that it has imported.
        environment: variables of its own.
    """

    def __init__(self, imported: str = "stoker.trainer.train", **environment: str) -> None:
        self._imported = imported
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None

    def call(self, module: str, function: str, *arguments: Any) -> Any:
        """What a function of a module of tests returns, in a child process of its own.

        Args:
            module: of this folder, or the path of a file elsewhere.
            function: its name.
            arguments: what JSON can hold, as what it returns.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, self._imported],
                env=os.environ | self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps([module, function, arguments]), file=process.stdin, flush=True)
        answer = json.loads(process.stdout.readline() or '{"failed": "the process is gone"}')
        assert "failed" not in answer, f"{module}.{function}{arguments}: {answer['failed']}"
        return answer["result"]

    def close(self) -> None:
        """End the process, which has nothing to bring in order."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


# ---------------------------------------------------------------- the script


def _call(module: str, function: str, arguments: list[Any], answer: int) -> None:
    """In the child."""
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        signal.alarm(SECONDS)
        sys.path.insert(0, str(Path(module).parent))
        result = getattr(importlib.import_module(Path(module).stem), function)(*arguments)
        os.write(answer, json.dumps(result).encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Read calls, one a line, and answer each with what it returned, or with the exit code of its process."""
    importlib.import_module(sys.argv[1])  # once, before any fork
    for line in sys.stdin:
        module, function, arguments = json.loads(line)
        with tempfile.TemporaryFile() as file:
            pid = os.fork()
            if pid == 0:
                _call(module, function, arguments, file.fileno())
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what it has left
            file.seek(0)
            answer = {"failed": f"exit code {code}"} if code else {"result": json.loads(file.read())}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
