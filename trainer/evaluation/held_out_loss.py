"""Loss of a model on held-out samples, per token and per byte of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.dataloader import fields_of
from ..data.datasets.samples import IGNORED_LABEL
from ..data.datasets.seq2seq import AnySamples
from ..device.precision import PrecisionPlan
from ..distributed.process_group import Ranks
from ..utils.errors import UserError


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What a model makes of held-out text.

    Attributes:
        loss: mean cross-entropy, nats per token.
        tokens: how many tokens were predicted.
        bytes: UTF-8 bytes of text those tokens stand for; 0 for data without text.
    """

    loss: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        """exp(loss): the number of equally likely tokens that would be as hard to predict."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """All bits the tokens cost over the bytes they stand for, or None without text.

        It does not depend on the tokenizer, unlike loss and perplexity. Tokens without bytes (eos) cost bits too.
        """
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else None

    def to_document(self) -> dict[str, Any]:
        """All figures, for JSON (null where one is not a finite number)."""
        figures = {**asdict(self), "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {name: value if value is not None and math.isfinite(value) else None for name, value in figures.items()}


class ScoringModel(Protocol):
    """What a model must offer to be evaluated; those of all families do."""

    def batch_loss(self, batch: Mapping[str, Tensor], denominator: Tensor) -> Tensor:
        """Sum of the losses of the labels that count, divided by `denominator`; a scalar."""
        ...


class StoppedError(Exception):
    """An evaluation was told to stop before it had a result."""


def summed_loss(model: ScoringModel, precision: PrecisionPlan, device: torch.device) -> Callable[..., Tensor]:
    """The sum of a model's losses over a batch, in the arithmetic of its precision: what `evaluate` takes."""

    def total(**fields: Tensor) -> Tensor:
        with precision.context(device):
            return model.batch_loss(fields, torch.ones((), device=device))

    return total


@torch.no_grad()  # not inference mode: FSDP2 keeps the weights it gathers here
def evaluate(
    loss: Callable[..., Tensor],
    samples: AnySamples,
    *,
    token_bytes: NDArray[np.int64],
    batch_size: int,
    limit_batches: int | None = None,
    device: torch.device | str = "cpu",
    ranks: Ranks | None = None,
    is_told_to_stop: Callable[[], bool] | None = None,
) -> EvaluationResult:
    """Run a model over samples, each once; the ranks take turns with the batches.

    Args:
        loss: the tensors of some samples by name to the sum of the cross-entropies of the labels that count, in nats,
            a scalar; without dropout.
        samples: what to evaluate on.
        token_bytes: bytes each token id stands for, [vocabulary].
        batch_size: samples that go through the model at once; the result depends on it by rounding only.
        limit_batches: stop after this many batches; None goes to the end.
        device: where the model is.
        ranks: the processes that evaluate together; each gets the result of all. None: this one alone.
        is_told_to_stop: asked after each batch but the last; all ranks must get the same answer.

    Raises:
        StoppedError: `is_told_to_stop` said so.
        ValueError: `batch_size` or `limit_batches` below 1.
        UserError: no label counts.
    """
    if batch_size < 1 or (limit_batches is not None and limit_batches < 1):
        raise ValueError(f"`batch_size` ({batch_size}) and `limit_batches` ({limit_batches}) must be at least 1")
    batches = -(-samples.samples // batch_size)
    if limit_batches is not None:
        batches = min(batches, limit_batches)
    ranks = ranks or Ranks()
    losses: list[Tensor] = []  # read once at the end, so that the device never waits for the host
    tokens, text_bytes = 0, 0
    # Every rank makes the same number of calls, the last ones perhaps with nothing to count: sharded weights are
    # gathered by all or by none.
    turns = -(-batches // ranks.world_size)
    for turn in range(turns):
        if turn and is_told_to_stop is not None and is_told_to_stop():
            raise StoppedError(f"after {turn} of {turns} batches")
        number = turn * ranks.world_size + ranks.rank
        count = min(batch_size, samples.samples - number * batch_size) if number < batches else 0
        fields = fields_of(samples.batch(min(number, batches - 1) * batch_size, max(count, 1)))
        if count == 0:
            fields["labels"] = torch.full_like(fields["labels"], IGNORED_LABEL)
        labels = fields["labels"]
        counted = labels[labels != IGNORED_LABEL].numpy()
        # A compiled model would be compiled again for a smaller last batch.
        if len(labels) < batch_size and (number > 0 or ranks.world_size > 1):
            fields = {name: _with_rows(name, field, batch_size) for name, field in fields.items()}
        losses.append(loss(**{name: field.to(device) for name, field in fields.items()}))
        tokens += len(counted)
        text_bytes += int(token_bytes[counted].sum())
    total = sum(torch.stack(losses).tolist())
    if ranks.world_size > 1:
        total, tokens, text_bytes = ranks.sum_(torch.tensor([total, tokens, text_bytes], dtype=torch.float64)).tolist()
    if tokens == 0:
        raise UserError(
            f"there is nothing to measure: not one token of {min(batches * batch_size, samples.samples):,} held-out "
            "samples counts, every label is ignored; evaluate more of the data, or other data"
        )
    return EvaluationResult(total / tokens, int(tokens), int(text_bytes))


def _with_rows(name: str, field: Tensor, rows: int) -> Tensor:
    """A field with rows in which nothing counts added behind; all their tokens are there, to be looked at.

    Experts leave them out, since they have no label (`models/moe/token_mask.py`).
    """
    value = IGNORED_LABEL if name == "labels" else field.dtype == torch.bool
    return torch.cat([field, field.new_full((rows - len(field), *field.shape[1:]), value)])
