"""LightningDataModule of the data that a configuration describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from ..config.resolved_run import ResolvedRun
from ..config.run_config import RunConfig
from ..core.run_context import build_data_by_rank
from ..data.batch_sampler import BatchSchedule, RankBatchSampler
from ..data.build_datasets import Data
from ..data.dataloader import PrefetchingDataLoader
from ..data.datasets.samples import IGNORE_INDEX, AnySamples, batch_tensors
from ..data.subsets import validation_subset
from ..data.tokenizers.tokenizer import Tokenizer
from ..distributed.process_group import DistributedContext
from ..evaluation.held_out_loss import pad_rows
from ..lightning.lightning_imports import pl
from ..utils.errors import UserError
from .runs import check_config
from .trainer_arguments import resolve_for_trainer

Batch = dict[str, Any]
"""Fields of a micro batch by name, tensors [B, ...]; in training also `micro_batch`, its index in the global batch, and
`num_targets`, the labels of all micro batches of this rank and step that are not ignored, int64."""


class TokenDataModule(pl.LightningDataModule):
    """Data of a configuration, as micro batches for `GPTModule`, `T5Module` and `BertModule` in any `pl.Trainer`.

    Samples are a function of (seed, step): a run that is resumed from a checkpoint of Lightning's goes on with the next
    sample, and any number of data-parallel ranks reads the same global batches. Do not combine it with a sampler.

    Args:
        config: from `stoker.load_config`.

    Attributes:
        data: the datasets, after `setup`.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        check_config(config)
        self.config = config
        self.data: Data | None = None
        self._run: ResolvedRun | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, after `setup`."""
        return self._data.tokenizer

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the model, after `setup`."""
        return self._data.vocab_size

    def setup(self, stage: str | None = None) -> None:
        """Read and tokenize the data; without a trainer for one process.

        Raises:
            UserError: the data cannot be used.
        """
        if self.data is None:
            self._run = self.config.resolved if self.trainer is None else resolve_for_trainer(self.config, self.trainer)
            self.data = build_data_by_rank(self._run, ranks_of(self.trainer))

    def train_dataloader(self) -> MicroBatches:
        """Return the micro batches of this rank; one iteration ends with the epoch."""
        samples, run, trainer = self._data.train, self._resolved, self.trainer
        return MicroBatches(
            samples,
            run,
            ranks_of(trainer).rank // run.mesh.model_ranks,
            torch.device("cpu") if trainer is None else trainer.strategy.root_device,
            (lambda: 0) if trainer is None else (lambda: trainer.global_step),
        )

    def val_dataloader(self) -> EvaluationBatches | list[Any]:
        """Return the batches of the validation split; none if it is empty or `trainer.limit_val_batches` is 0."""
        return self._evaluation(self._data.validation, "validation")

    def test_dataloader(self) -> EvaluationBatches | list[Any]:
        """Return the batches of the test split."""
        return self._evaluation(self._data.test, "test")

    def _evaluation(self, samples: AnySamples | None, split: str) -> EvaluationBatches | list[Any]:
        run = self._resolved
        limit = run.data.limit_val_batches if split == "validation" else None
        if samples is None or limit == 0:
            return []
        if split == "validation":
            samples = validation_subset(run.data, samples)
        size, ranks = run.model.micro_batch_size, run.mesh.data
        batches = -(-samples.samples // size)
        if isinstance(limit, int):
            batches = min(batches, limit * (run.model.global_batch_size // size))
        return EvaluationBatches(samples, size, batches, ranks_of(self.trainer).rank // run.mesh.model_ranks, ranks)

    @property
    def _data(self) -> Data:
        if self.data is None:
            raise UserError("TokenDataModule has no data before setup(); call it, or let a pl.Trainer do so")
        return self.data

    @property
    def _resolved(self) -> ResolvedRun:
        assert self._run is not None
        return self._run


class MicroBatches:
    """Micro batches of one rank, from the current step to the end of its epoch.

    Args:
        samples: the training samples.
        run: the run.
        rank: data-parallel rank.
        device: device of the batches.
        current_step: returns the completed optimizer steps.
    """

    def __init__(
        self, samples: AnySamples, run: ResolvedRun, rank: int, device: torch.device, current_step: Callable[[], int]
    ) -> None:
        self._samples = samples
        self._run = run
        self._rank = rank
        self._device = device
        self._current_step = current_step
        self._steps = samples.samples // run.model.global_batch_size
        if not self._steps:
            raise UserError(
                f"an epoch has {samples.samples:,} samples, less than a global batch; use a smaller "
                f"`model.global_batch_size` ({run.model.global_batch_size}), or more data"
            )

    def __len__(self) -> int:
        """Return the micro batches of an epoch on this rank."""
        return self._steps * self._run.micro_batches

    def __iter__(self) -> Iterator[Batch]:
        step, keys = self._current_step(), self._run.model
        schedule = BatchSchedule(keys.global_batch_size, first_step=step, consumed=step * keys.global_batch_size)
        loader = PrefetchingDataLoader(
            self._samples,
            RankBatchSampler(schedule, keys.micro_batch_size, self._rank, self._run.mesh.data),
            self._device,
            keys.data.num_workers,
        )
        try:
            for batch in islice(loader, self._steps - step % self._steps):
                targets = batch.num_targets.long()
                for number, fields in batch.micro_batches():
                    yield {**fields, "micro_batch": number, "num_targets": targets}
        finally:
            loader.close()


class EvaluationBatches:
    """Batches of one data-parallel rank, every one of the same size; those past the end have ignored labels."""

    def __init__(self, samples: AnySamples, size: int, batches: int, rank: int, ranks: int) -> None:
        self._samples = samples
        self._size = size
        self._batches = batches
        self._rank = rank
        self._ranks = ranks

    def __len__(self) -> int:
        """Return the batches of this rank."""
        return -(-self._batches // self._ranks)

    def __iter__(self) -> Iterator[Batch]:
        for index in range(len(self)):
            number = index * self._ranks + self._rank
            first = min(number, self._batches - 1) * self._size
            count = min(self._size, self._samples.samples - first)
            fields = batch_tensors(self._samples.batch(first, count))
            if number >= self._batches:
                fields["labels"] = torch.full_like(fields["labels"], IGNORE_INDEX)
            yield {name: pad_rows(name, field, self._size) for name, field in fields.items()}


def ranks_of(trainer: pl.Trainer | None) -> DistributedContext:
    """Return the ranks of a trainer."""
    if trainer is None:
        return DistributedContext()
    return DistributedContext(trainer.global_rank, trainer.world_size, trainer.local_rank)
