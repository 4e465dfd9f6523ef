"""Which held-out samples a validation takes: `trainer.limit_val_batches` and `model.data.validation_drop_last`."""

from __future__ import annotations

from ..config.schema.root import RootBlock
from ..core.debug_runs import FirstSamples
from ..utils.errors import UserError
from ..utils.text import counted
from .datasets.seq2seq import AnySamples


def validated_samples(root: RootBlock, samples: AnySamples) -> AnySamples:
    """The samples that validations choose from; a number of batches (`limit_val_batches`, int) is counted in these.

    Args:
        root: the configuration.
        samples: all that are held out for validation.

    Raises:
        UserError: no whole batch is left of them, where only whole ones count.
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
                f"{part}, no whole batch of `model.global_batch_size` ({size}); use "
                "model.data.validation_drop_last=false"
            )
        count -= count % size
    return samples if count == samples.samples else FirstSamples(samples, count)
