"""Fork server for tests: a process that has imported torch and Lightning and forks a child for each call.

Importing torch and Lightning takes longer than most of these calls. Tests use `ForkServer` through the fixtures
`forks` and `compilers`. Where no call uses a GPU, the server of `forks` is itself forked from
pytest, which has imported everything.
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
import warnings
from pathlib import Path
from typing import IO, Any

SECONDS = 1800
"""Timeout of a call."""


class ForkServer:
    """Client of a fork server, which is started at the first call, or forked before that.

    Args:
        imported: module the server imports at its start.
        environment: additional environment variables of the server.
    """

    def __init__(self, imported: str = "stoker.trainer.train", **environment: str) -> None:
        self._imported = imported
        self._environment = environment
        self._pid = 0
        self._calls: IO[str]
        self._answers: IO[str]

    def fork(self) -> None:
        """Fork the server from this process, before any test has started a thread, if all is imported here already."""
        if self._imported not in sys.modules:
            return
        (its_calls, calls), (answers, its_answers) = os.pipe(), os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the threads of pytest-xdist, which no call uses
            self._pid = os.fork()
        if self._pid == 0:
            os.close(calls)  # the end of pytest, however it comes, ends the server
            os.close(answers)
            sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
            warnings.resetwarnings()
            try:
                with os.fdopen(its_calls) as reader, os.fdopen(its_answers, "w") as writer:
                    _serve(reader, writer)
            finally:
                os._exit(0)
        os.close(its_calls)
        os.close(its_answers)
        self._calls, self._answers = os.fdopen(calls, "w"), os.fdopen(answers)

    def _start(self) -> None:
        process = subprocess.Popen(
            [sys.executable, __file__, self._imported],
            env=os.environ | self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.returncode = 0  # `close` waits for it
        self._pid, self._calls, self._answers = process.pid, process.stdin, process.stdout

    def call(self, module: str, function: str, *arguments: Any) -> Any:
        """Call a function in a new child process and return its result.

        Args:
            module: name of a module in this folder, or the path of another file.
            function: name of the function.
            arguments: JSON-serializable; so is the result.
        """
        if self._pid == 0:
            self._start()
        print(json.dumps([module, function, arguments]), file=self._calls, flush=True)
        answer = json.loads(self._answers.readline() or '{"failed": "the process is gone"}')
        assert "failed" not in answer, f"{module}.{function}{arguments}: {answer['failed']}"
        return answer["result"]

    def close(self) -> None:
        """Kill the server, which has no state to clean up."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._calls.close()
            self._answers.close()


# ---------------------------------------------------------------- the script


def _call(module: str, function: str, arguments: list[Any], answer: int) -> None:
    """Run a call in the child and write its result to the file descriptor `answer`."""
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


def imported(modules: list[str]) -> tuple[list[str], bool]:
    """Return those of the modules that a process for training has imported, and whether Lightning finds matplotlib."""
    found = sorted(set(modules) & set(sys.modules))
    from lightning_utilities.core.imports import RequirementCache

    return found, bool(RequirementCache("matplotlib"))


def _serve(calls: IO[str], answers: IO[str]) -> None:
    """Read calls, one per line, and answer each with its result or with the exit code of its process."""
    for line in calls:
        module, function, arguments = json.loads(line)
        with tempfile.TemporaryFile() as file:
            pid = os.fork()
            if pid == 0:
                _call(module, function, arguments, file.fileno())
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # processes that the call left behind
            file.seek(0)
            answer = {"failed": f"exit code {code}"} if code else {"result": json.loads(file.read())}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    importlib.import_module(sys.argv[1])  # once, before any fork
    _serve(sys.stdin, sys.stdout)
