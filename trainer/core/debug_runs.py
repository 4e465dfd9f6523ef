"""Runs for those who develop: a trial of a few steps (`fast_dev_run`), and learning a few batches by heart
(`overfit_batches`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..config.run_config import RunConfig
from ..config.schema.root import RootBlock
from ..data.build_datasets import Data
from ..data.dataloader import fields_of
from ..data.datasets.samples import Batch
from ..data.datasets.seq2seq import AnySamples, NamedTensors
from ..utils.errors import UserError
from ..utils.text import counted

TRIAL = "fast_dev_run"
"""Directory of a trial, in the run directory that the configuration names: nothing of a real run is touched."""


def trial_of(config: RunConfig) -> RunConfig:
    """The configuration of the trial that `trainer.fast_dev_run` asks for; without it `config` itself.

    Model, data, optimizer and schedule stay as they are. Steps and validation batches are few; checkpoints, early
    stopping and loggers are off.
    """
    root = config.root
    steps = int(root.trainer.fast_dev_run)
    if not steps:
        return config
    sched = root.model.optim.sched
    optim = root.model.optim.model_copy(
        update={"sched": sched.model_copy(update={"max_steps": sched.max_steps or root.trainer.max_steps})}
    )
    trainer = root.trainer.model_copy(
        update={
            "max_steps": steps,
            "log_every_n_steps": 1,
            "val_check_interval": steps,
            "limit_val_batches": steps if root.trainer.limit_val_batches else 0,
        }
    )
    manager = root.exp_manager.model_copy(
        update={
            "create_checkpoint_callback": False,
            "create_early_stopping_callback": False,
            "create_tensorboard_logger": False,
            "create_wandb_logger": False,
            "create_mlflow_logger": False,
            "create_csv_logger": False,
            "resume_if_exists": False,
            "resume_from_checkpoint": None,
            "checkpoint_callback_params": root.exp_manager.checkpoint_callback_params.model_copy(
                update={"dirpath": None}
            ),
            **_place(root),
        }
    )
    update = {"trainer": trainer, "exp_manager": manager, "model": root.model.model_copy(update={"optim": optim})}
    return replace(config, root=root.model_copy(update=update))


def _place(root: RootBlock) -> dict[str, str | None]:
    keys = root.exp_manager
    if keys.explicit_log_dir is not None:
        return {"explicit_log_dir": f"{keys.explicit_log_dir}/{TRIAL}"}
    return {"explicit_log_dir": f"{keys.exp_dir or 'runs'}/{keys.name or root.name}/{TRIAL}"}


def overfitted(data: Data, root: RootBlock) -> Data:
    """The data that `trainer.overfit_batches` asks for: the first global batches, again and again.

    Validation and test are the same samples. Without the key `data` itself.

    Raises:
        UserError: the training data have fewer samples than that.
    """
    asked, size = root.trainer.overfit_batches, root.model.global_batch_size
    if not asked:
        return data
    whole = data.train.samples // size
    # A part of an epoch is one of its whole batches.
    batches = asked if isinstance(asked, int) else max(1, min(whole, int(asked * data.train.samples / size + 0.5)))
    if batches > whole:
        cure = f"use at most {whole}" if whole else "use a smaller `model.global_batch_size`, or more data"
        raise UserError(
            f"`trainer.overfit_batches` ({asked}) asks for {counted(batches * size, 'sample')}, but the training data "
            f"have {data.train.samples:,}; {cure}"
        )
    few = FirstSamples(data.train, batches * size)
    return replace(
        data,
        train=few,
        validation=few,
        test=few,
        fingerprint=f"{data.fingerprint}, the first {few.samples} samples",
        description=f"{data.description}; only its first {counted(few.samples, 'training sample')}, for validation too",
    )


class FirstSamples:
    """The first samples of others, again and again.

    Args:
        others: where they come from.
        samples: how many.
    """

    def __init__(self, others: AnySamples, samples: int) -> None:
        self._others = others
        self.sequence_length = others.sequence_length
        self.samples = samples

    def batch(self, first: int, count: int) -> Any:
        """The samples at positions `first` to `first + count - 1`."""
        parts: list[Any] = []
        while count > 0:
            start = first % self.samples
            taken = min(count, self.samples - start)
            parts.append(self._others.batch(start, taken))
            first, count = first + taken, count - taken
        if len(parts) == 1:
            return parts[0]
        fields = [fields_of(part) for part in parts]
        joined: NamedTensors = {name: torch.cat([part[name] for part in fields]) for name in fields[0]}
        return Batch(**joined) if isinstance(parts[0], Batch) else joined
