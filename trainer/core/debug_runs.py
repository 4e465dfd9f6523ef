"""Debug runs: a few steps (`fast_dev_run`), and overfitting a few batches (`overfit_batches`)."""

from __future__ import annotations

from dataclasses import replace

from ..config.run_config import RunConfig
from ..data.build_datasets import Data
from ..data.subsets import RepeatedSubset
from ..loggers.logger_backends import BACKENDS
from ..utils.environment import user_path
from ..utils.errors import UserError
from ..utils.owned_files import check_owned
from ..utils.text import pluralize

FAST_DEV_RUN = "fast_dev_run"
"""Subdirectory of the run directory, so that a debug run never touches files of a real run."""


def fast_dev_run(config: RunConfig) -> RunConfig:
    """Apply `trainer.fast_dev_run` to a configuration; return `config` unchanged if it is off.

    Model, data, optimizer and schedule are unchanged. Steps and validation batches are limited; checkpoints, early
    stopping and loggers are disabled.

    Raises:
        UserError: a link is in place of the subdirectory.
    """
    root = config.root
    steps = int(root.trainer.fast_dev_run)
    if not steps:
        return config
    sched = root.model.optim.sched
    length = root.trainer.max_steps if root.trainer.max_steps > 0 else None
    optim = root.model.optim.model_copy(
        update={"sched": sched.model_copy(update={"max_steps": sched.max_steps or length})}
    )
    trainer = root.trainer.model_copy(
        update={
            "max_steps": steps,
            "max_epochs": None,
            "log_every_n_steps": 1,
            "val_check_interval": steps,
            "limit_val_batches": steps if root.trainer.limit_val_batches else 0,
        }
    )
    keys = root.exp_manager
    run_directory = f"{keys.exp_dir or 'runs'}/{keys.name or root.name}"
    if keys.explicit_log_dir is not None:
        run_directory = keys.explicit_log_dir
    check_owned(user_path(run_directory, "exp_manager.explicit_log_dir"), FAST_DEV_RUN)
    manager = keys.model_copy(
        update={
            "create_checkpoint_callback": False,
            "create_early_stopping_callback": False,
            **{f"create_{name}_logger": False for name in BACKENDS},
            "resume_if_exists": False,
            "resume_from_checkpoint": None,
            "checkpoint_callback_params": keys.checkpoint_callback_params.model_copy(update={"dirpath": None}),
            "explicit_log_dir": f"{run_directory}/{FAST_DEV_RUN}",
        }
    )
    update = {"trainer": trainer, "exp_manager": manager, "model": root.model.model_copy(update={"optim": optim})}
    return replace(config, root=root.model_copy(update=update))


def overfit_batches(data: Data, limit: int | float, size: int) -> Data:
    """Apply `trainer.overfit_batches`: train, validate and test on the first global batches only.

    Args:
        data: the whole data.
        limit: `trainer.overfit_batches`: number of global batches, or fraction of an epoch; 0 returns `data` unchanged.
        size: samples of a global batch.

    Raises:
        UserError: the training set has fewer samples than requested.
    """
    if not limit:
        return data
    whole = data.train.samples // size
    # A fraction is rounded to whole global batches of an epoch.
    batches = limit if isinstance(limit, int) else max(1, min(whole, int(limit * data.train.samples / size + 0.5)))
    if batches > whole:
        hint = f"use at most {whole}" if whole else "use a smaller `model.global_batch_size`, or more data"
        raise UserError(
            f"`trainer.overfit_batches` ({limit}) needs {pluralize(batches * size, 'sample')}, but the training data "
            f"have {data.train.samples:,}; {hint}"
        )
    few = RepeatedSubset(data.train, batches * size)
    return replace(
        data,
        train=few,
        validation=few,
        test=few,
        fingerprint=f"{data.fingerprint}, the first {few.samples} samples",
        description=f"{data.description}; only its first {pluralize(few.samples, 'training sample')}, "
        "for validation too",
    )
