"""Entry point of a job that submitit starts: `python -m stoker.trainer.cli.job_entry FILE`.

The file holds the frozen configuration; log, exit code and the first line of an error are written beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from ..config.load import config_from_document
from ..distributed.placement import resolve_placement
from ..utils import environment
from ..utils.durable_files import atomic_write
from ..utils.errors import UserError
from ..utils.import_modules import import_plugins
from ..utils.signals import EXIT_CODES, set_handlers, signal_when_parent_ends
from .main import exit_code_of, start_run


def main() -> int:
    """Run the job; return its exit code."""
    task: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.argv = task["command"]  # for the run's manifest and loggers
    errors: list[str] = []
    _write_log(Path(task["log_file"]))

    def report(code: int) -> None:
        outcome = {"exit_code": code, "error": next(iter(errors), "")}
        atomic_write(Path(task["exit_file"]), json.dumps(outcome).encode())

    def stop(number: int, _: object) -> None:  # until the run handles signals
        report(EXIT_CODES[signal.Signals(number)])
        os._exit(EXIT_CODES[signal.Signals(number)])

    set_handlers(stop, tuple(EXIT_CODES))
    signal_when_parent_ends(signal.SIGTERM)  # after its time limit submitit kills its own process only
    if task.get("lock_file"):
        _stop_with(task["lock_file"])
    code = exit_code_of(lambda: _run(task, errors), sys.argv[1:])
    report(code)
    return code


def _stop_with(lock: str) -> threading.Thread:
    """Send this process SIGTERM when the sweep gives up the lock of a file, or has ended before; return the thread."""

    def wait() -> None:
        import fcntl

        with contextlib.suppress(FileNotFoundError), open(lock, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=wait, name="sweep", daemon=True)
    thread.start()
    return thread


def _write_log(path: Path) -> None:
    """Write both streams to a file: those of submitit end with its process, before a cancelled job has saved."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _run(task: dict[str, Any], errors: list[str]) -> int:
    try:
        if "cuda_visible_devices" in task:
            environment.restore_visible_devices(task["cuda_visible_devices"])
        import_plugins(task["imports"])
        config = config_from_document(task["document"], trusted=True).with_provenance(task["provenance"])
        if config.digest != task["digest"]:
            raise UserError("the configuration changed on its way to this job; start the sweep again")
        return start_run(config, resolve_placement(config.root.trainer, environment.snapshot()), task["imports"])
    except UserError as error:
        errors.extend(error.lines)
        raise


if __name__ == "__main__":
    sys.exit(main())
