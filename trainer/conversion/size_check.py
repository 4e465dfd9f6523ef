"""A checkpoint's configuration may claim any size; its weights, which are there, say whether that can be true."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...models.config.parameter_count import count_parameters
from ..config.batch_spec import sample_form
from ..utils.errors import UserError

if TYPE_CHECKING:
    from ..checkpoint.reader import Checkpoint
    from ..config.schema.root import RootBlock
    from .pretrained import BaseWeights

_NARROWEST = 2
"""Bytes of a weight, of all dtypes that a checkpoint may have."""


def check_claimed_size(
    checkpoint: Checkpoint, root: RootBlock, vocab_size: int, base: BaseWeights | None = None
) -> None:
    """Refuse a configuration of more parameters than the files of weights can hold, before anything is built of it.

    Args:
        checkpoint: that has the configuration.
        root: its configuration.
        vocab_size: tokens of its tokenizer.
        base: the weights, where they are not in the checkpoint: those that an adapter belongs to.

    Raises:
        UserError: it claims more; or the base is none that the adapter was trained on.
    """
    plain = {"make_vocab_size_divisible_by": 1}  # files of others have no padding
    keys = root.model if base is None else root.model.model_copy(update=plain)
    parameters = count_parameters(keys, keys.override_vocab_size or vocab_size, sample_form(root))
    files = checkpoint.weight_files if base is None else base.files
    there = sum(file.stat().st_size for file in files)
    if parameters * _NARROWEST > there:
        if base is not None and checkpoint.state.base is not None:
            from .pretrained import check_base

            check_base(base, checkpoint.state.base, checkpoint.path)  # a wrong --base is the likelier reason
        raise UserError(
            f"checkpoint {checkpoint.path} does not fit the model of its configuration, which has {parameters:,} "
            f"parameters: its weights have {there:,} bytes"
        )
