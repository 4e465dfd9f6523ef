"""Checks of paths before torch is imported, which takes seconds; they are checked again where they are used."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.checkpoint_paths import STEP_NAME, cannot_write_run, check_run_is_new
from ..checkpoint.hf_files import check_pretrained_path, is_model_folder, missing_model_hint
from ..config.run_paths import checkpoint_directory, configured_run_directory
from ..utils.environment import user_path
from ..utils.errors import UserError

if TYPE_CHECKING:
    from ..config.run_config import RunConfig

_TEXT_SOURCES, _RESTORE_KEY = ("text", "jsonl"), "model.restore_from_path"


def check_model_path(path: Path) -> None:
    """Check that a path given to a verb may hold a model.

    Raises:
        UserError: there is no such folder, or nothing like a model in it.
    """
    if not (STEP_NAME.fullmatch(path.name) and path.is_dir()) and not is_model_folder(path):
        raise UserError(f"no usable checkpoint in {path}: {missing_model_hint(path)}")


def check_run_paths(config: RunConfig) -> None:
    """Check the run directory of a run, and that the files exist that it starts from.

    Raises:
        UserError: the first problem found.
    """
    root, keys = config.root, config.root.model
    if not int(root.trainer.fast_dev_run):  # it writes to a directory of its own
        _check_run_directory(config)
    data = keys.data
    if data.data_impl in _TEXT_SOURCES and data.path is not None and data.train_ds.file_names is None:
        path = user_path(data.path, "model.data.path")
        if not path.exists():
            raise UserError(f"`model.data.path`: cannot read {path}: {os.strerror(errno.ENOENT)}")
    if keys.restore_from_path:
        check_pretrained_path(user_path(keys.restore_from_path, _RESTORE_KEY), _RESTORE_KEY)


def _check_run_directory(config: RunConfig) -> None:
    manager, root = config.root.exp_manager, config.root
    directory = configured_run_directory(manager, root.name)
    parent = directory or user_path(manager.exp_dir or "runs", "exp_manager.exp_dir").absolute()
    existing = next(path for path in (parent, *parent.parents) if os.path.lexists(path))
    if not existing.is_dir():
        code = errno.EEXIST if existing == parent else errno.ENOTDIR
        raise cannot_write_run(OSError(code, os.strerror(code), str(parent)), str(parent), manager)
    if directory is not None:
        check_run_is_new(manager, checkpoint_directory(manager, directory))
