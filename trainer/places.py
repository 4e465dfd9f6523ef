"""Where a run goes, by the keys of `exp_manager` (nemo_semantics 1.2). No torch here."""

from __future__ import annotations

import re
import time
from pathlib import Path

from .config.schema import RootBlock
from .environment import user_path


def create_place(root: RootBlock) -> Path:
    """Choose and make the run directory.

    Raises:
        OSError: it cannot be made.
        UserError: the path cannot be read.
    """
    keys = root.exp_manager
    if keys.explicit_log_dir:
        path = absolute_path(keys.explicit_log_dir, "explicit_log_dir")
        path.mkdir(parents=True, exist_ok=True)
        return path
    parent = absolute_path(keys.exp_dir or "runs", "exp_dir") / (keys.name or root.name)
    parent.mkdir(parents=True, exist_ok=True)
    if keys.resume_if_exists:
        return parent
    if keys.version is not None:
        path = parent / (f"version_{keys.version}" if isinstance(keys.version, int) else keys.version)
        path.mkdir(parents=True, exist_ok=True)
        return path
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    number = 0 if keys.use_datetime_version else _next_version(parent)
    while True:
        # Two runs may start in the same second: mkdir decides, and the second one counts up.
        if keys.use_datetime_version:
            path = parent / (stamp if number == 0 else f"{stamp}_{number}")
        else:
            path = parent / f"version_{number}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def checkpoint_place(root: RootBlock, run: Path) -> Path:
    """Where a run keeps its checkpoints.

    Args:
        root: the keys.
        run: its directory.

    Raises:
        UserError: the path cannot be read.
    """
    dirpath = root.exp_manager.checkpoint_callback_params.dirpath
    return absolute_path(dirpath, "checkpoint_callback_params.dirpath") if dirpath else run / "checkpoints"


def absolute_path(text: str, key: str) -> Path:
    """A path that `exp_manager.KEY` gives, `~` read as in a shell.

    Raises:
        UserError: it cannot be read.
    """
    return user_path(text, f"exp_manager.{key}").absolute()


def _next_version(parent: Path) -> int:
    taken = [int(match[1]) for path in parent.iterdir() if (match := re.fullmatch(r"version_(\d+)", path.name))]
    return max(taken, default=-1) + 1
