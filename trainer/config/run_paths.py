"""Where a run goes, by the keys of `exp_manager` (nemo_semantics 1.2). No torch here."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from ..utils.environment import user_path
from .schema.root import RootBlock


def create_place(root: RootBlock, made: list[Path] | None = None) -> Path:
    """Choose and make the run directory.

    Args:
        root: the keys.
        made: gets the directories that were not there before, in the order in which they were made.

    Raises:
        OSError: it cannot be made.
        UserError: the path cannot be read.
    """
    keys = root.exp_manager
    made = [] if made is None else made
    if (path := named_place(root)) is not None:
        return make_directory(path, made)
    parent = make_directory(_place_of_versions(root), made)
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
            made.append(path)
            return path


def named_place(root: RootBlock) -> Path | None:
    """The run directory, where the keys name it; None where it gets the next number, or the time.

    Raises:
        UserError: the path cannot be read.
    """
    keys = root.exp_manager
    if keys.explicit_log_dir:
        return absolute_path(keys.explicit_log_dir, "explicit_log_dir")
    parent = _place_of_versions(root)
    if keys.resume_if_exists:
        return parent
    if keys.version is None:
        return None
    return parent / (f"version_{keys.version}" if isinstance(keys.version, int) else keys.version)


def _place_of_versions(root: RootBlock) -> Path:
    keys = root.exp_manager
    return absolute_path(keys.exp_dir or "runs", "exp_dir") / (keys.name or root.name)


def make_directory(path: Path, made: list[Path]) -> Path:
    """Make a directory and what is missing above it; `made` gets what was not there before.

    Raises:
        OSError: it cannot be made.
    """
    missing = [above for above in (path, *path.parents) if not above.exists()]
    path.mkdir(parents=True, exist_ok=True)
    made.extend(reversed(missing))
    return path


def remove_places(made: Sequence[Path], holding: Collection[Path]) -> None:
    """Remove directories that were made for a run which is not to be.

    Args:
        made: in the order in which they were made.
        holding: those of them that go with all they hold; of the others, those that are empty.
    """
    for path in reversed(made):
        if path in holding:
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.rmdir()


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
