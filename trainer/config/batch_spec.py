"""Shape of the samples of a run (`SampleForm`), from its configuration."""

from __future__ import annotations

from ...models.config.batch_shape import SampleForm
from .data_task import task_of
from .schema.root import RootBlock


def sample_form(root: RootBlock) -> SampleForm:
    """Return the sample shape of the configured task.

    Raises:
        ValueError: the sequence lengths are invalid; configuration rules report that earlier.
    """
    task, data = task_of(root), root.model.data
    return SampleForm(
        length=task.length,
        decoder_length=task.decoder_length,
        packed=task.packed,
        restart=task.packed if task.has_two_sides or task.name == "sft" else data.reset_position_ids,
        padded=task.padded,
    )
