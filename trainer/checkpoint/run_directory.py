"""Run directory: creation, locking, and the record of configuration and environment (nemo_semantics 1.2)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..config.override_typos import quoted_override
from ..config.run_config import RunConfig
from ..config.run_paths import (
    absolute_path,
    checkpoint_directory,
    create_directory,
    create_run_directory,
    remove_directories,
)
from ..config.schema.exp_manager import ExpManagerBlock
from ..utils.durable_files import atomic_write
from ..utils.environment import snapshot
from ..utils.errors import EXIT_IO, UserError
from ..utils.owned_files import check_owned, open_owned
from .checkpoint_paths import (
    RESOLVED_CONFIG,
    cannot_write_run,
    check_resume_path,
    check_run_is_new,
    checkpoint_paths,
    directory_key,
    file_to_copy,
)
from .reader import recorded_checkpoints
from .run_environment import describe_environment

try:
    import fcntl
except ImportError:  # Windows: a run directory is not locked
    fcntl = None

LOCK_FILE = "run.lock"
_WRITTEN = (
    *(LOCK_FILE, RESOLVED_CONFIG, "environment.json", "metrics.jsonl", "run.log", "metrics.csv", "events.jsonl"),
    *("loggers.json", "expert_load.json", "expert_load.png", "report.json", "report.html", "quickstart.json"),
    *("tensorboard", "files", "profile", "stacks"),
)
"""Files and folders that a run writes to its directory, besides the checkpoints."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of one run.

    Attributes:
        path: directory of config.resolved.json, environment.json, metrics.jsonl, run.log, events.jsonl, and if
            enabled report.html, tensorboard/, metrics.csv, files/, profile/, expert_load.json; stacks/ after a hang.
        checkpoints: directory of the `step-N` checkpoints.
        locks: file descriptors that lock the run directory, and a `checkpoints` directory elsewhere, while open; None
            if files cannot be locked.
        created: directories created for this run, removed on exit if the run fails before `save_run_record`.
    """

    path: Path
    checkpoints: Path
    locks: tuple[int | None, ...] = ()
    created: list[Path] = field(default_factory=list)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        """Release the locks, and remove the directories of a run that failed to start."""
        remove_directories(self.created, (self.path, self.checkpoints))
        _unlock(self.locks)


def open_run_directory(config: RunConfig) -> RunDirectory:
    """Choose, create and lock the run directory.

    Raises:
        UserError: it cannot be written (exit code 74), another process trains in it or saves to the same directory, or
            it holds checkpoints of an earlier run without `resume_if_exists`.
    """
    keys = config.root.exp_manager
    dirpath = keys.checkpoint_callback_params.dirpath
    made: list[Path] = []
    with ExitStack() as cleanup:
        locks: list[int | None] = []
        held: list[Path] = []  # directories locked by this process: others may be in use by another process by now
        cleanup.callback(_unlock, locks)
        cleanup.callback(remove_directories, made, held)
        _check_paths(keys, made)
        try:
            path = create_run_directory(keys, config.root.name, made)
            checkpoints = checkpoint_directory(keys, path)
            _check_links(path, owns_checkpoints=not dirpath)
            locks.append(_lock(path, "trains", directory_key(keys)))
            held.append(path)
            if dirpath and keys.create_checkpoint_callback:
                locks.append(_lock(checkpoints, "saves its checkpoints", "checkpoint_callback_params.dirpath"))
                held.append(checkpoints)
            check_run_is_new(keys, checkpoints)
            _check_same_checkpoints(keys, path, checkpoints)
        except OSError as error:
            raise cannot_write_run(error, keys.explicit_log_dir or keys.exp_dir or "runs", keys) from error
        cleanup.pop_all()
    return RunDirectory(path, checkpoints, tuple(locks), made)


def _check_same_checkpoints(keys: ExpManagerBlock, path: Path, checkpoints: Path) -> None:
    """Check that a start from scratch is not that of a run which saved its checkpoints elsewhere.

    Raises:
        UserError: it is; its metrics would be lost.
    """
    recorded = recorded_checkpoints(path)
    saved = checkpoint_paths(recorded)
    if saved and not checkpoint_paths(checkpoints) and not keys.resume_from_checkpoint:
        same = quoted_override("exp_manager.checkpoint_callback_params.dirpath", str(recorded))
        raise UserError(
            f"the run in {path} saved its checkpoints up to {saved[-1].name} to {recorded}, but {checkpoints} holds "
            f"none: it would start from scratch and drop its metrics; go on with {same}, or from there with "
            f"{quoted_override('exp_manager.resume_from_checkpoint', str(saved[-1]))}, or write elsewhere with another "
            f"exp_manager.{directory_key(keys)}"
        )


def save_run_record(
    config: RunConfig, directory: RunDirectory, device: torch.device, processes: list[dict[str, Any]]
) -> None:
    """Write configuration and environment once the run can start; from here on, the directory is kept.

    `processes` holds a description of each process of the run.

    Raises:
        UserError: the files cannot be written (exit code 74).
    """
    try:
        config.save(directory.path / RESOLVED_CONFIG)
        environment = {**describe_environment(device, snapshot()), "processes": processes}
        atomic_write(directory.path / "environment.json", (json.dumps(environment, indent=2) + "\n").encode())
        for name in config.root.exp_manager.files_to_copy:
            copy = open_owned(directory.path, f"files/{Path(name).name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with os.fdopen(copy, "wb") as target, file_to_copy(name).open("rb") as source:
                shutil.copyfileobj(source, target)
    except OSError as error:
        raise cannot_write_run(error, str(directory.path), config.root.exp_manager) from error
    directory.created.clear()


def _check_paths(keys: ExpManagerBlock, made: list[Path]) -> None:
    """Check that checkpoints can be read and written, before training starts; append created directories to `made`."""
    check_resume_path(keys)
    for name in keys.files_to_copy:
        file_to_copy(name)
    dirpath = keys.checkpoint_callback_params.dirpath
    if not dirpath or not keys.create_checkpoint_callback:
        return
    path = absolute_path(dirpath, "checkpoint_callback_params.dirpath")
    try:
        create_directory(path, made)
    except OSError as error:
        raise UserError(
            f"`exp_manager.checkpoint_callback_params.dirpath` ({path}): {error.strerror}; "
            "set it to a directory that can be written",
            EXIT_IO,
        ) from error


def _check_links(path: Path, *, owns_checkpoints: bool) -> None:
    """Check that the run directory holds no link in place of what the run writes there, and no file `checkpoints`.

    Raises:
        UserError: it does.
    """
    check_owned(path, *_WRITTEN)
    if owns_checkpoints:
        cure = "remove the link, or set exp_manager.checkpoint_callback_params.dirpath to the directory it points to"
        check_owned(path, "checkpoints", cure=cure)
        if (path / "checkpoints").exists() and not (path / "checkpoints").is_dir():
            raise UserError(f"{path / 'checkpoints'} is not a directory; remove it")


def _lock(path: Path, activity: str, key: str) -> int | None:
    if fcntl is None:
        return None
    descriptor = open_owned(path, LOCK_FILE, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"another process {activity} in {path}; wait for it, or write elsewhere with another exp_manager.{key}"
        ) from None
    except OSError:
        pass  # a filesystem without locks
    return descriptor


def _unlock(locks: Iterable[int | None]) -> None:
    for descriptor in locks:
        if descriptor is not None:
            os.close(descriptor)
