"""Checks before torch is imported, which takes seconds, all at once; each is repeated where it matters."""

from __future__ import annotations

import errno
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ...models.config.families import keys_by_stack, without_transformer_engine
from ..checkpoint.checkpoint_paths import (
    STEP_NAME,
    cannot_write_run,
    check_resume_path,
    check_run_is_new,
    file_to_copy,
)
from ..checkpoint.hf_files import check_pretrained_path, is_model_folder, missing_model_hint
from ..config.run_paths import checkpoint_directory, configured_run_directory
from ..loggers.logger_backends import check_loggers
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


def check_run_start(config: RunConfig) -> None:
    """Check what a run needs of this machine: its directory, the files that it starts from, and packages.

    The device takes seconds to look for, and is looked for only if the run cannot start anyway.

    Raises:
        UserError: all problems found.
    """
    problems, codes = list[str](), set[int]()
    for check in (
        _check_run_directory,
        _check_data,
        _check_model,
        _check_copied_files,
        _check_checkpoint,
        _check_loggers,
        _check_transformer_engine,
        _check_device,
    ):
        if check is _check_device and not (problems and config.root.trainer.accelerator not in ("auto", "cpu")):
            continue
        try:
            check(config)
        except UserError as error:
            problems += error.lines
            codes.add(error.exit_code)
    if problems:
        raise UserError(problems, min(codes))


def _check_data(config: RunConfig) -> None:
    data = config.root.model.data
    if data.data_impl in _TEXT_SOURCES and data.path is not None and data.train_ds.file_names is None:
        path = user_path(data.path, "model.data.path")
        if not path.exists():
            raise UserError(f"`model.data.path`: cannot read {path}: {os.strerror(errno.ENOENT)}")


def _check_model(config: RunConfig) -> None:
    start = config.root.model.restore_from_path
    if start:
        check_pretrained_path(user_path(start, _RESTORE_KEY), _RESTORE_KEY)


def _check_copied_files(config: RunConfig) -> None:
    for name in config.root.exp_manager.files_to_copy:
        file_to_copy(name)


def _check_checkpoint(config: RunConfig) -> None:
    check_resume_path(config.root.exp_manager)


def _check_loggers(config: RunConfig) -> None:
    check_loggers(config.root.exp_manager)


def _check_transformer_engine(config: RunConfig) -> None:
    model = config.root.model
    stacks = [at for at, stack in keys_by_stack(model).items() if stack.transformer_engine]
    if stacks and not model.fp8 and find_spec("transformer_engine") is None:  # without it fp8 is another question
        raise UserError(
            f"`model.{stacks[0]}transformer_engine` (True) is not available: TransformerEngine is not installed; use "
            f"{without_transformer_engine(model)}, or pip install 'stoker[te]'"
        )


def _check_device(config: RunConfig) -> None:
    from ..device.choose_device import choose_device  # imports torch

    choose_device(config.root.trainer)


def _check_run_directory(config: RunConfig) -> None:
    manager, root = config.root.exp_manager, config.root
    if int(root.trainer.fast_dev_run):  # it writes to a directory of its own
        return
    directory = configured_run_directory(manager, root.name)
    parent = directory or user_path(manager.exp_dir or "runs", "exp_manager.exp_dir").absolute()
    existing = next(path for path in (parent, *parent.parents) if os.path.lexists(path))
    if not existing.is_dir():
        code = errno.EEXIST if existing == parent else errno.ENOTDIR
        raise cannot_write_run(OSError(code, os.strerror(code), str(parent)), str(parent), manager)
    if directory is not None:
        check_run_is_new(manager, checkpoint_directory(manager, directory))
