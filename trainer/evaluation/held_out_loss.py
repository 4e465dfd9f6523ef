"""Held-out loss per token and per byte of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...models.parallel.stages import StageInput
from ..config.run_precision import RunPrecision
from ..data.dataloader import ShardFields
from ..data.datasets.samples import IGNORE_INDEX, AnySamples, batch_tensors
from ..device.precision import autocast_context
from ..distributed.pipeline import Pipeline
from ..distributed.process_group import DistributedContext
from ..utils.errors import UserError
from ..utils.progress import Progress


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Result of an evaluation.

    Attributes:
        loss: mean cross-entropy, nats per token.
        tokens: number of predicted tokens.
        bytes: UTF-8 bytes of the predicted tokens; 0 for data without text.
        metrics: metrics of the user's own by name, means over the predicted tokens.
    """

    loss: float
    tokens: int
    bytes: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Cross-entropy in bits per UTF-8 byte, or None without text.

        Independent of the tokenizer, unlike loss and perplexity. Tokens without bytes (eos) count in the numerator.
        """
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else None

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, for JSON (None if not finite); metrics of the user's own, if any, in `metrics`."""
        figures: dict[str, Any] = {**asdict(self), "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        own = _finite(figures.pop("metrics"))
        return _finite(figures) | ({"metrics": own} if own else {})


def _finite(figures: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: value if value is not None and math.isfinite(value) else None for name, value in figures.items()}


class ScoringModel(Protocol):
    """Interface of a model that can be evaluated; implemented by all families."""

    def batch_loss(self, batch: Mapping[str, Tensor], denominator: Tensor) -> Tensor:
        """Return the summed loss over all labels that are not ignored, divided by `denominator`; a scalar, or (1 + M,)
        with M metrics of the user's own.
        """
        ...


class StagedModel(Protocol):
    """Interface of a model that pipeline stages share; implemented by all families."""

    def run_stage(self, at: StageInput, batch: Mapping[str, Tensor], denominator: Tensor) -> tuple[Tensor, ...]:
        """Return the output of a stage, (loss,) of the last one."""
        ...


class EvaluationInterruptedError(Exception):
    """An evaluation was interrupted before it had a result."""


def loss_function(model: ScoringModel, precision: RunPrecision, device: torch.device) -> Callable[..., Tensor]:
    """Return a function for `evaluate` that sums a model's losses over a batch, in its precision."""

    def total(**fields: Tensor) -> Tensor:
        with autocast_context(precision, device):
            return model.batch_loss(fields, torch.ones((), device=device))

    return total


def pipelined_loss_function(
    model: StagedModel, pipeline: Pipeline, precision: RunPrecision, device: torch.device, metrics: int = 0
) -> Callable[..., Tensor]:
    """Return a function like that of `loss_function`, for a model with so many metrics of the user's own; it returns 0
    on ranks without the last stage of the pipeline.
    """
    one = torch.ones((), device=device)

    def total(**fields: Tensor) -> Tensor:
        with autocast_context(precision, device):
            loss = pipeline.forward(lambda at: model.run_stage(at, fields, one))
        return torch.zeros(1 + metrics, device=device) if loss is None else loss

    return total


@torch.no_grad()  # not inference_mode: FSDP2 reuses the weights it all-gathers here in training
def evaluate(
    loss: Callable[..., Tensor],
    samples: AnySamples,
    *,
    token_bytes: NDArray[np.int64],
    batch_size: int,
    limit_batches: int | None = None,
    device: torch.device | str = "cpu",
    ranks: DistributedContext | None = None,
    replicas: DistributedContext | None = None,
    pads_batches: bool = False,
    shard: ShardFields | None = None,
    counts_targets: bool = True,
    metrics: Sequence[str] = (),
    should_stop: Callable[[], bool] | None = None,
) -> EvaluationResult:
    """Evaluate a model on each sample once; batches are distributed round-robin over the ranks.

    Args:
        loss: maps the tensors of a batch by name to the summed cross-entropy over all labels that are not ignored, in
            nats, a scalar; without dropout. With `metrics` (1 + metrics,): their sums after it.
        token_bytes: UTF-8 bytes per token id, [V].
        batch_size: samples per forward pass; it affects the result by rounding only.
        limit_batches: maximum number of batches; None for all.
        ranks: ranks with other samples that evaluate together; each gets the total result. None: this process alone.
        replicas: ranks whose losses add up, if these are more than `ranks`.
        pads_batches: every forward pass has `batch_size` samples, also if there are fewer in all.
        shard: returns this rank's tokens of the fields of a batch; None: all.
        counts_targets: this rank counts the tokens of its batches; of several ranks with the same batches one does.
        metrics: names of the metrics that `loss` returns.
        should_stop: called after each batch but the last; must return the same value on all ranks.

    Raises:
        EvaluationInterruptedError: `should_stop` returned True.
        ValueError: `batch_size` or `limit_batches` below 1.
        UserError: all labels are ignored.
    """
    if batch_size < 1 or (limit_batches is not None and limit_batches < 1):
        raise ValueError(f"`batch_size` ({batch_size}) and `limit_batches` ({limit_batches}) must be at least 1")
    batches = -(-samples.samples // batch_size)
    if limit_batches is not None:
        batches = min(batches, limit_batches)
    ranks = ranks or DistributedContext()
    losses: list[Tensor] = []  # copied to the host once at the end, to avoid synchronizing in the loop
    tokens, text_bytes = 0, 0
    # Every rank makes the same number of calls, if need be with all labels ignored: all-gathers of sharded weights are
    # collective.
    rounds = -(-batches // ranks.world_size)
    with Progress("evaluating", batches, "batches") as progress:
        for round_index in range(rounds):
            if round_index and should_stop is not None and should_stop():
                raise EvaluationInterruptedError(f"after {round_index} of {rounds} batches")
            number = round_index * ranks.world_size + ranks.rank
            count = min(batch_size, samples.samples - number * batch_size) if number < batches else 0
            fields = batch_tensors(samples.batch(min(number, batches - 1) * batch_size, max(count, 1)))
            if count == 0:
                fields["labels"] = torch.full_like(fields["labels"], IGNORE_INDEX)
            labels = fields["labels"]
            counted = labels[labels != IGNORE_INDEX].numpy()
            # Pad a smaller last batch, which a compiled model would recompile for.
            if len(labels) < batch_size and (number > 0 or ranks.world_size > 1 or pads_batches):
                fields = {name: pad_rows(name, field, batch_size) for name, field in fields.items()}
            fields = fields if shard is None else shard(fields)
            losses.append(loss(**{name: field.to(device) for name, field in fields.items()}))
            if counts_targets:
                tokens += len(counted)
                text_bytes += int(token_bytes[counted].sum())
            progress.update(min(batches, number + ranks.world_size))
    totals = [sum(column) for column in zip(*torch.stack(losses).reshape(rounds, -1).tolist(), strict=True)]
    replicas = replicas or ranks
    if replicas.world_size > 1:
        sums = torch.tensor([*totals, tokens, text_bytes], dtype=torch.float64)
        *totals, tokens, text_bytes = replicas.all_reduce_(sums).tolist()
    if tokens == 0:
        raise UserError(
            f"there is nothing to evaluate: all labels of {min(batches * batch_size, samples.samples):,} held-out "
            "samples are ignored; evaluate more of the data, or other data"
        )
    loss_sum, *sums_of_metrics = totals
    means = {name: total / tokens for name, total in zip(metrics, sums_of_metrics, strict=True)}
    return EvaluationResult(loss_sum / tokens, int(tokens), int(text_bytes), means)


def pad_rows(name: str, field: Tensor, rows: int) -> Tensor:
    """Append rows whose labels are ignored to a field; their attention mask is True.

    Routers skip these tokens because they have no label (`models/moe/token_mask.py`).
    """
    value = IGNORE_INDEX if name == "labels" else field.dtype == torch.bool
    return torch.cat([field, field.new_full((rows - len(field), *field.shape[1:]), value)])
