"""Where a run writes: its directory, the lock on it, and the record of what it ran with (nemo_semantics 1.2)."""

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

from ..config.run_config import RunConfig
from ..config.run_paths import absolute_path, checkpoint_place, create_place, make_directory, remove_places
from ..config.schema.exp_manager import ExpManagerBlock
from ..utils.environment import snapshot, user_path
from ..utils.errors import EXIT_IO, UserError
from .reader import checkpoint_paths
from .run_environment import describe_environment

try:
    import fcntl
except ImportError:  # Windows: a run directory is not locked
    fcntl = None


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of one run.

    Attributes:
        path: holds config.resolved.json, environment.json, metrics.jsonl, run.log, and what the keys ask for:
            tensorboard/, metrics.csv, files/, profile/, expert_load.json.
        checkpoints: holds the `step-N` directories.
        locks: keep other processes out of the run directory, and of a `checkpoints` elsewhere, for as long as they are
            open; None where files cannot be locked.
        made: directories that were made for this run, as long as something may still refuse it.
    """

    path: Path
    checkpoints: Path
    locks: tuple[int | None, ...] = ()
    made: list[Path] = field(default_factory=list)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        """Let other processes write here again; a run that was refused leaves nothing."""
        remove_places(self.made, (self.path, self.checkpoints))
        _unlock(self.locks)


def open_run_directory(config: RunConfig) -> RunDirectory:
    """Choose, create and lock the run directory.

    Raises:
        UserError: it cannot be written (exit code 74), another process trains in it or saves to the same place, or it
            holds checkpoints of another run that were not asked for.
    """
    keys = config.root.exp_manager
    dirpath = keys.checkpoint_callback_params.dirpath
    made: list[Path] = []
    with ExitStack() as unless_done:
        locks: list[int | None] = []
        held: list[Path] = []  # what this process has locked: the rest may be another's by now
        unless_done.callback(_unlock, locks)
        unless_done.callback(remove_places, made, held)
        _check_places(keys, made)
        try:
            path = create_place(config.root, made)
            checkpoints = checkpoint_place(config.root, path)
            locks.append(_lock(path, "trains", _directory_key(keys)))
            held.append(path)
            if dirpath and keys.create_checkpoint_callback:
                locks.append(_lock(checkpoints, "saves its checkpoints", "checkpoint_callback_params.dirpath"))
                held.append(checkpoints)
            # A `dirpath` that nothing is saved to, nor read from, may be that of any run.
            existing = checkpoint_paths(checkpoints) if keys.create_checkpoint_callback or not dirpath else []
            if existing and not keys.resume_if_exists:
                raise UserError(
                    f"{checkpoints} already holds checkpoints up to {existing[-1].name}; go on from there with "
                    f"exp_manager.resume_if_exists=True, or write elsewhere with another exp_manager.{_place_key(keys)}"
                )
        except OSError as error:
            raise _cannot_write(error, keys.explicit_log_dir or keys.exp_dir or "runs", keys) from error
        unless_done.pop_all()
    return RunDirectory(path, checkpoints, tuple(locks), made)


def record_start(
    config: RunConfig, directory: RunDirectory, device: torch.device, processes: list[dict[str, Any]]
) -> None:
    """Write what the run was started with, once nothing is left that could refuse it: from here on, it is kept.

    Args:
        config: of the run.
        directory: where it goes.
        device: of this process.
        processes: what each process of the run says of itself.

    Raises:
        UserError: the files cannot be written (exit code 74).
    """
    try:
        config.save(directory.path / "config.resolved.json")
        environment = {**describe_environment(device, snapshot()), "processes": processes}
        (directory.path / "environment.json").write_text(json.dumps(environment, indent=2) + "\n")
        for name in config.root.exp_manager.files_to_copy:
            copies = directory.path / "files"
            copies.mkdir(exist_ok=True)
            shutil.copyfile(_file_to_copy(name), copies / Path(name).name)
    except OSError as error:
        raise _cannot_write(error, str(directory.path), config.root.exp_manager) from error
    directory.made.clear()


def _file_to_copy(name: str) -> Path:
    """A file that is named by `exp_manager.files_to_copy`.

    Raises:
        UserError: it is no file that can be read.
    """
    path = user_path(name, "exp_manager.files_to_copy")
    if not path.is_file() or not os.access(path, os.R_OK):
        raise UserError(f"`exp_manager.files_to_copy` ({name}): there is no such file that can be read")
    return path


def _place_key(keys: ExpManagerBlock) -> str:
    """The keys below `exp_manager` that say where checkpoints are; the others do nothing beside them."""
    if keys.checkpoint_callback_params.dirpath:
        return "checkpoint_callback_params.dirpath"
    return "explicit_log_dir" if keys.explicit_log_dir else "name or exp_dir"


def _directory_key(keys: ExpManagerBlock) -> str:
    """The key below `exp_manager` that says where the run directory is."""
    return "explicit_log_dir" if keys.explicit_log_dir else "exp_dir"


def _cannot_write(error: OSError, place: str, keys: ExpManagerBlock) -> UserError:
    return UserError(
        f"cannot write the run directory {error.filename or place}: {error.strerror or error}; set "
        f"exp_manager.{_directory_key(keys)} to a directory that can be written",
        EXIT_IO,
    )


def _check_places(keys: ExpManagerBlock, made: list[Path]) -> None:
    """Whether checkpoints can be read and written where they should be: now, not after an hour of training.

    `made` gets the directories that were not there before.
    """
    start = keys.resume_from_checkpoint
    if start and not user_path(start, "exp_manager.resume_from_checkpoint").is_dir():
        raise UserError(f"`exp_manager.resume_from_checkpoint` ({start}): there is no such directory")
    for name in keys.files_to_copy:
        _file_to_copy(name)
    dirpath = keys.checkpoint_callback_params.dirpath
    if not dirpath or not keys.create_checkpoint_callback:
        return
    path = absolute_path(dirpath, "checkpoint_callback_params.dirpath")
    try:
        make_directory(path, made)
    except OSError as error:
        raise UserError(
            f"`exp_manager.checkpoint_callback_params.dirpath` ({path}): {error.strerror}; "
            "set it to a directory that can be written",
            EXIT_IO,
        ) from error


def _lock(path: Path, does: str, key: str) -> int | None:
    if fcntl is None:
        return None
    descriptor = os.open(path / "run.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"another process {does} in {path}; wait for it, or write elsewhere with another exp_manager.{key}"
        ) from None
    except OSError:
        pass  # a filesystem without locks
    return descriptor


def _unlock(locks: Iterable[int | None]) -> None:
    for descriptor in locks:
        if descriptor is not None:
            os.close(descriptor)
