"""Paths of checkpoints and run directories, and errors about them; torch is not needed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..utils.environment import user_path
from ..utils.errors import EXIT_IO, UserError

if TYPE_CHECKING:
    from ..config.schema.exp_manager import ExpManagerBlock

RESOLVED_CONFIG = "config.resolved.json"
"""The configuration of a run, in its directory."""
STEP_NAME = re.compile(r"step-(0|[1-9]\d{0,14})", re.ASCII)
"""Name of a checkpoint directory; not `step-011`, a copy of the user's."""


def checkpoint_paths(directory: Path) -> list[Path]:
    """Return the `step-N` directories in a directory, valid or not, by ascending step."""
    try:
        entries = list(directory.iterdir())
    except OSError:
        return []
    numbered = [(int(match[1]), path) for path in entries if (match := STEP_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def check_run_is_new(keys: ExpManagerBlock, checkpoints: Path) -> None:
    """Check that a run which does not resume writes to a directory without checkpoints.

    Raises:
        UserError: it holds checkpoints.
    """
    # A `dirpath` that this run neither saves to nor resumes from may belong to another run.
    is_own = keys.create_checkpoint_callback or not keys.checkpoint_callback_params.dirpath
    existing = checkpoint_paths(checkpoints) if is_own else []
    if existing and not keys.resume_if_exists:
        raise UserError(
            f"{checkpoints} already holds checkpoints up to {existing[-1].name}; resume from there with "
            f"exp_manager.resume_if_exists=True, or write elsewhere with another "
            f"exp_manager.{_checkpoint_key(keys)}"
        )


def cannot_write_run(error: OSError, path: str, keys: ExpManagerBlock) -> UserError:
    """Return the error of a run directory that cannot be created or written."""
    return UserError(
        f"cannot write the run directory {error.filename or path}: {error.strerror or error}; set "
        f"exp_manager.{directory_key(keys)} to a directory that can be written",
        EXIT_IO,
    )


def _checkpoint_key(keys: ExpManagerBlock) -> str:
    """Return the keys below `exp_manager` that determine the checkpoint directory."""
    if keys.checkpoint_callback_params.dirpath:
        return "checkpoint_callback_params.dirpath"
    return "explicit_log_dir" if keys.explicit_log_dir else "name or exp_dir"


def directory_key(keys: ExpManagerBlock) -> str:
    """Return the key below `exp_manager` that determines the run directory."""
    return "explicit_log_dir" if keys.explicit_log_dir else "exp_dir"


def file_to_copy(name: str) -> Path:
    """Return the path of an entry of `exp_manager.files_to_copy`.

    Raises:
        UserError: it is not a readable file.
    """
    path = user_path(name, "exp_manager.files_to_copy")
    if not path.is_file() or not os.access(path, os.R_OK):
        raise UserError(f"`exp_manager.files_to_copy` ({name}) is not a readable file")
    return path


def check_resume_path(keys: ExpManagerBlock) -> None:
    """Check that `exp_manager.resume_from_checkpoint` is a directory.

    Raises:
        UserError: it is not.
    """
    start = keys.resume_from_checkpoint
    if start and not user_path(start, "exp_manager.resume_from_checkpoint").is_dir():
        raise UserError(f"`exp_manager.resume_from_checkpoint` ({start}): there is no such directory")
