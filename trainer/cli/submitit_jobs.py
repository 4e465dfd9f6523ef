"""Launchers `submitit_local` and `submitit_slurm`: several jobs of a sweep at once, each a command with its own log.

submitit runs `python -m stoker.trainer.cli.job_entry FILE`; the file holds the frozen configuration, and the job
writes its log and exit code beside it. So submitit pickles a command line, and nothing that a job wrote is unpickled
here. A job starts its own ranks. When the sweep is stopped it cancels its jobs, which save a checkpoint as on SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.schema.hydra import LocalLauncher, SlurmLauncher, SubmititLauncher
from ..utils import environment
from ..utils.durable_files import atomic_write
from ..utils.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, UserError
from ..utils.owned_files import check_owned
from ..utils.signals import handlers_set, signals_blocked
from ..utils.text import one_line
from .launch_jobs import Terminated, terminate, title
from .sweep_record import Sweep, SweepRun, read_metrics

FOLDER = ".submitit"
"""Folder in the sweep directory with the configuration, exit code and logs of each job."""
_COMMON = ("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes")
"""Parameters that submitit has for every kind of executor."""
_POLL_SECONDS = 0.25
_STOP_SECONDS = 60.0
"""Time for cancelled jobs to save a checkpoint."""


class SubmititJobs:
    """Run jobs with submitit; see `Launch`.

    Args:
        settings: `hydra.launcher`.
        imports: user modules that the jobs import first.

    Raises:
        UserError: submitit is not installed, or keys contradict each other.
    """

    def __init__(self, settings: SubmititLauncher, imports: Sequence[str], log: Callable[[str], None]) -> None:
        try:
            import submitit
        except ImportError:
            raise UserError("hydra/launcher=submitit_* needs submitit: pip install 'stoker[slurm]'") from None
        if isinstance(settings, LocalLauncher) and settings.gpus_per_node and settings.array_parallelism is None:
            raise UserError(
                "`hydra.launcher.gpus_per_node` with submitit_local needs the number of jobs that share the GPUs at the"
                " same time: hydra.launcher.array_parallelism=N"
            )
        self._submitit: Any = submitit
        self._settings = settings
        self._imports = list(imports)
        self._log = log
        self._environ = environment.snapshot()

    def __call__(self, sweep: Sweep, places: Sequence[int]) -> int:
        """Run jobs, some at the same time."""
        waiting = [place for place in places if sweep.runs[place].exit_code is None]
        for place in places:
            if place not in waiting:
                print(f"{title(sweep, place)}: already finished", flush=True)
        running: dict[int, Any] = {}
        slots: dict[int, int] = {}
        is_slurm = isinstance(self._settings, SlurmLauncher)
        limit = len(waiting) if is_slurm else self._settings.array_parallelism or len(waiting)
        code = EXIT_OK
        with contextlib.ExitStack() as wants, handlers_set(terminate):
            lock = None if is_slurm else wants.enter_context(_locked_file())
            try:
                while waiting or running:
                    new = waiting[: max(0, limit - len(running))]
                    del waiting[: len(new)]
                    for place in new:
                        slots[place] = min(set(range(limit)) - {slots[other] for other in running})
                        running[place] = None
                    running |= self._submit(sweep, new, slots, lock)
                    for place in [place for place in running if self._has_ended(sweep, place, running[place])]:
                        self._finish(sweep, place, running.pop(place))
                    time.sleep(_POLL_SECONDS if running else 0)
            except (KeyboardInterrupt, Terminated) as stop:
                code = EXIT_INTERRUPTED if isinstance(stop, KeyboardInterrupt) else EXIT_TERMINATED
                wants.close()
                self._cancel(sweep, {place: job for place, job in running.items() if job is not None})
        return code

    def _submit(self, sweep: Sweep, places: Sequence[int], slots: dict[int, int], lock: str | None) -> dict[int, Any]:
        """Submit jobs, on SLURM as one array; return the job of each place."""
        if not places:
            return {}
        commands = []
        for place in places:
            file = self._write_task(sweep, place, slots[place], lock)
            command = [sys.executable, "-m", "stoker.trainer.cli.job_entry", str(file)]
            commands.append(self._submitit.helpers.CommandFunction(command, cwd=Path.cwd()))
        try:
            # Ctrl-C of the terminal then reaches this process only: submitit's own would end with a traceback,
            # and not pass it on
            with signals_blocked([signal.SIGINT]):
                jobs = self._executor(sweep.directory).submit_array(commands)
        except (RuntimeError, ValueError, NameError, self._submitit.core.utils.FailedJobError) as error:
            raise UserError(f"the jobs cannot be submitted: {one_line(error)}") from None
        for place, job in zip(places, jobs, strict=True):
            where = f"{type(self._settings).__name__.removesuffix('Launcher').lower()} job {job.job_id}"
            print(f"{title(sweep, place)}; {where}, {sweep.runs[place].directory}", flush=True)
        return dict(zip(places, jobs, strict=True))

    def _executor(self, directory: Path) -> Any:
        keys = self._settings
        kind = "slurm" if isinstance(keys, SlurmLauncher) else "local"
        folder = keys.submitit_folder or f"{directory / FOLDER}/%j"
        executor = self._submitit.AutoExecutor(folder=folder, cluster=kind)
        given = {name: value for name, value in keys.model_dump().items() if value not in (None, {}, "")}
        given.pop("submitit_folder", None)
        if kind == "local":
            given.pop("array_parallelism", None)
            given.pop("gpus_per_node", None)  # the job sets its devices itself
        given["name"] = keys.name
        executor.update_parameters(
            **{name if name in (*_COMMON, "name") else f"{kind}_{name}": value for name, value in given.items()}
        )
        return executor

    def _write_task(self, sweep: Sweep, place: int, slot: int, lock: str | None) -> Path:
        """Write what a job needs, and remove its exit code of an earlier start; return the file."""
        run = sweep.runs[place]
        folder = sweep.directory / FOLDER
        check_owned(sweep.directory, FOLDER)
        folder.mkdir(mode=0o700, exist_ok=True)  # submitit unpickles commands from it
        file = folder / f"job_{run.job.number}.json"
        log = file.with_suffix(".log")
        check_owned(folder, file.name, _exit_file(sweep, run).name, log.name)
        _exit_file(sweep, run).unlink(missing_ok=True)
        task = {
            "command": sys.argv,
            "imports": self._imports,
            "document": run.config.document,
            "provenance": run.config.provenance(),
            "digest": run.config.digest,
            "exit_file": str(_exit_file(sweep, run)),
            "log_file": str(log),
            "lock_file": lock,
        }
        if isinstance(self._settings, LocalLauncher):  # submitit hides all GPUs but the first `gpus_per_node`
            task["cuda_visible_devices"] = self._devices(slot)
        atomic_write(file, json.dumps(task, indent=2).encode())
        return file

    def _devices(self, slot: int) -> str | None:
        """Return the GPUs of a job on this machine, as CUDA_VISIBLE_DEVICES; None if the variable is not to be set."""
        visible = self._environ.get("CUDA_VISIBLE_DEVICES")
        count = self._settings.gpus_per_node
        if count is None:
            return visible
        names = visible.split(",") if visible is not None else [str(n) for n in range((slot + 1) * count)]
        return ",".join(names[slot * count : (slot + 1) * count])

    def _has_ended(self, sweep: Sweep, place: int, job: Any) -> bool:
        return _exit_file(sweep, sweep.runs[place]).exists() or job.done()

    def _finish(self, sweep: Sweep, place: int, job: Any) -> None:
        """Read the exit code of a job that has ended."""
        run = sweep.runs[place]
        log = sweep.directory / FOLDER / f"job_{run.job.number}.log"
        code, problem = EXIT_FAILURE, f"the job ended without an exit code; see {log} and {job.paths.stderr}"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            outcome = json.loads(_exit_file(sweep, run).read_text(encoding="utf-8"))
            code, problem = int(outcome["exit_code"]), str(outcome["error"])
        sweep.runs[place] = replace(run, exit_code=code, error=problem, metrics=read_metrics(run))
        sweep.record()
        state = "finished" if code == EXIT_OK else f"ended with exit code {code}"
        print(f"{title(sweep, place)}: {state}", flush=True)
        if problem:
            self._log(f"job {run.job.number}: {problem}")

    def _cancel(self, sweep: Sweep, running: dict[int, Any]) -> None:
        """Cancel jobs of SLURM, and wait for the exit codes of all."""
        for job in running.values() if isinstance(self._settings, SlurmLauncher) else ():
            with contextlib.suppress(Exception):  # of scancel, for a job that has just ended
                job.cancel(check=False)
        deadline = time.monotonic() + _STOP_SECONDS
        while running and time.monotonic() < deadline:
            for place in [place for place in running if _exit_file(sweep, sweep.runs[place]).exists()]:
                self._finish(sweep, place, running.pop(place))
            time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _locked_file() -> Iterator[str]:
    """Lock a file of this machine; its local jobs end when the lock does, also if this process is killed."""
    import fcntl

    descriptor, path = tempfile.mkstemp(prefix="stoker-sweep-")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield path
    finally:
        Path(path).unlink(missing_ok=True)
        os.close(descriptor)


def _exit_file(sweep: Sweep, run: SweepRun) -> Path:
    return sweep.directory / FOLDER / f"job_{run.job.number}.exit.json"
