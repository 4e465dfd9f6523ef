"""What the samples of a run look like to its model."""

from __future__ import annotations

from ...models.config.batch_shape import SampleForm
from .data_task import task_of
from .schema.root import RootBlock


def sample_form(root: RootBlock) -> SampleForm:
    """The samples that the configuration asks for.

    Raises:
        ValueError: lengths that no text fills; the rules of the configuration have found that before.
    """
    task, data = task_of(root), root.model.data
    return SampleForm(
        length=task.length,
        decoder_length=task.decoder_length,
        packed=task.packed,
        restart=task.packed if task.has_two_sides or task.name == "sft" else data.reset_position_ids,
        padded=task.padded,
    )
