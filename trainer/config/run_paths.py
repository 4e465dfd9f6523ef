"""Run and checkpoint directories from the keys of `exp_manager` (nemo_semantics 1.2). Does not import torch."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..utils.environment import user_path

if TYPE_CHECKING:
    from .schema.exp_manager import ExpManagerBlock


def create_run_directory(keys: ExpManagerBlock, name: str, created: list[Path] | None = None) -> Path:
    """Choose and create the directory of the run `name`; `created` receives the directories created, in order.

    Raises:
        OSError: it cannot be created.
        UserError: the path is invalid.
    """
    created = [] if created is None else created
    if (path := configured_run_directory(keys, name)) is not None:
        return create_directory(path, created)
    parent = create_directory(_experiment_directory(keys, name), created)
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    number = 0 if keys.use_datetime_version else _next_version(parent)
    while True:
        # Two runs may start in the same second: mkdir is atomic, so the second one increments its number.
        if keys.use_datetime_version:
            path = parent / (stamp if number == 0 else f"{stamp}_{number}")
        else:
            path = parent / f"version_{number}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            created.append(path)
            return path


def configured_run_directory(keys: ExpManagerBlock, name: str) -> Path | None:
    """Return the run directory if the keys determine it; None if it gets the next version number or a timestamp.

    Raises:
        UserError: the path is invalid.
    """
    if keys.explicit_log_dir:
        return absolute_path(keys.explicit_log_dir, "explicit_log_dir")
    parent = _experiment_directory(keys, name)
    if keys.resume_if_exists:
        return parent
    if keys.version is None:
        return None
    return parent / (f"version_{keys.version}" if isinstance(keys.version, int) else keys.version)


def _experiment_directory(keys: ExpManagerBlock, name: str) -> Path:
    return absolute_path(keys.exp_dir or "runs", "exp_dir") / (keys.name or name)


def create_directory(path: Path, created: list[Path]) -> Path:
    """Create a directory and its missing parents; append those created to `created`.

    Raises:
        OSError: it cannot be created.
    """
    missing = [above for above in (path, *path.parents) if not above.exists()]
    path.mkdir(parents=True, exist_ok=True)
    created.extend(reversed(missing))
    return path


def remove_directories(created: Sequence[Path], recursive: Collection[Path]) -> None:
    """Remove the directories `created` for a run that fails to start.

    Those in `recursive` are removed with their contents, others only if they are empty.
    """
    for path in reversed(created):
        if path in recursive:
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.rmdir()


def checkpoint_directory(keys: ExpManagerBlock, run_directory: Path) -> Path:
    """Return the checkpoint directory of a run.

    Raises:
        UserError: the path is invalid.
    """
    dirpath = keys.checkpoint_callback_params.dirpath
    return absolute_path(dirpath, "checkpoint_callback_params.dirpath") if dirpath else run_directory / "checkpoints"


def absolute_path(text: str, key: str) -> Path:
    """Return the path of `exp_manager.KEY` as an absolute path, `~` expanded.

    Raises:
        UserError: the path is invalid.
    """
    return user_path(text, f"exp_manager.{key}").absolute()


def _next_version(parent: Path) -> int:
    versions = [int(match[1]) for path in parent.iterdir() if (match := re.fullmatch(r"version_(\d+)", path.name))]
    return max(versions, default=-1) + 1
