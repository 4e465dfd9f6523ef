"""Validation subset: `trainer.limit_val_batches` and `model.data.validation_drop_last`."""

from __future__ import annotations

from ..config.schema.root import RootBlock
from ..core.debug_runs import RepeatedSubset
from ..utils.errors import UserError
from ..utils.text import counted
from .datasets.seq2seq import AnySamples


def validated_samples(root: RootBlock, samples: AnySamples) -> AnySamples:
    """Return the validation samples after a fractional `limit_val_batches` and `validation_drop_last`.

    An integer `limit_val_batches` is applied later, as a number of batches of these.

    Args:
        root: the configuration.
        samples: all validation samples.

    Raises:
        UserError: no complete batch is left with `validation_drop_last`.
    """
    limit, size = root.trainer.limit_val_batches, root.model.global_batch_size
    count = samples.samples
    if isinstance(limit, float):
        count = max(1, int(limit * count + 0.5))
    if root.model.data.validation_drop_last:
        if count < size:
            part = f" (`trainer.limit_val_batches` {limit:g} of {samples.samples:,})" if count < samples.samples else ""
            raise UserError(
                f"`model.data.validation_drop_last` (True) leaves nothing to validate on: {counted(count, 'sample')}"
                f"{part}, less than a batch of `model.global_batch_size` ({size}); use "
                "model.data.validation_drop_last=false"
            )
        count -= count % size
    return samples if count == samples.samples else RepeatedSubset(samples, count)
