"""What the samples of a run look like to its model."""

from __future__ import annotations

from ..models.config.samples import SampleForm
from .config.schema import RootBlock
from .data.task import task_of


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
