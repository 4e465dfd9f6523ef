"""Subsets of samples: of a validation (`limit_val_batches`), and repeated ones (`overfit_batches`)."""

from __future__ import annotations

from typing import Any

from ..config.resolved_run import DataSpec
from ..utils.errors import UserError
from ..utils.text import pluralize
from .datasets.samples import AnySamples, concatenate_batches


def validation_subset(spec: DataSpec, samples: AnySamples) -> AnySamples:
    """Return the validation samples after a fractional `limit_val_batches` and `validation_drop_last`.

    An integer `limit_val_batches` is applied later, as a number of batches of these.

    Raises:
        UserError: no complete batch is left with `validation_drop_last`.
    """
    limit, size = spec.limit_val_batches, spec.global_batch_size
    count = samples.samples
    if isinstance(limit, float):
        count = max(1, int(limit * count + 0.5))
    if spec.keys.validation_drop_last:
        if count < size:
            part = f" (`trainer.limit_val_batches` {limit:g} of {samples.samples:,})" if count < samples.samples else ""
            raise UserError(
                f"`model.data.validation_drop_last` (True) leaves nothing to validate on: {pluralize(count, 'sample')}"
                f"{part}, less than a batch of `model.global_batch_size` ({size}); use "
                "model.data.validation_drop_last=false"
            )
        count -= count % size
    return samples if count == samples.samples else RepeatedSubset(samples, count)


class RepeatedSubset:
    """The first samples of a dataset, repeated endlessly."""

    def __init__(self, others: AnySamples, samples: int) -> None:
        self._others = others
        self.sequence_length = others.sequence_length
        self.samples = samples

    def batch(self, first: int, count: int) -> Any:
        """Return the samples at positions `first` to `first + count - 1`."""
        parts: list[Any] = []
        while count > 0:
            start = first % self.samples
            taken = min(count, self.samples - start)
            parts.append(self._others.batch(start, taken))
            first, count = first + taken, count - taken
        return parts[0] if len(parts) == 1 else concatenate_batches(parts)
