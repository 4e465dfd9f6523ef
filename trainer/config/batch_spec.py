"""Shape of the samples of a run (`BatchSpec`), from its configuration."""

from __future__ import annotations

from ...models.config.batch_shape import BatchSpec
from .data_task import task_from_config
from .schema.root import RootBlock


def sample_form(root: RootBlock) -> BatchSpec:
    """Return the sample shape of the configured task.

    Raises:
        ValueError: the sequence lengths are invalid; configuration rules report that earlier.
    """
    task, data = task_from_config(root), root.model.data
    return BatchSpec(
        length=task.length,
        decoder_length=task.decoder_length,
        packed=task.packed,
        restart=task.packed if task.is_encoder_decoder or task.name == "sft" else data.reset_position_ids,
        padded=task.padded,
    )
