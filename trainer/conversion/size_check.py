"""Check the model size claimed by a checkpoint's configuration against its weight files, before allocating anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...models.model_cost import count_parameters
from ..config.batch_spec import batch_spec
from ..utils.errors import UserError

if TYPE_CHECKING:
    from ..checkpoint.reader import Checkpoint
    from ..config.schema.root import RootBlock
    from .pretrained import PretrainedWeights

_MIN_ITEMSIZE = 2
"""Bytes per weight of the narrowest supported dtype."""


def check_model_size(
    checkpoint: Checkpoint, root: RootBlock, vocab_size: int, base: PretrainedWeights | None = None
) -> None:
    """Raise if the configuration has more parameters than the weight files can hold.

    Args:
        checkpoint: checkpoint with the configuration.
        root: the configuration.
        vocab_size: vocabulary size of the tokenizer.
        base: base weights, if the checkpoint is an adapter.

    Raises:
        UserError: the model is too large for the files, or the base is not the one the adapter was trained on.
    """
    unpadded = {"make_vocab_size_divisible_by": 1}  # Hugging Face vocabularies are not padded
    keys = root.model if base is None else root.model.model_copy(update=unpadded)
    parameters = count_parameters(keys, keys.override_vocab_size or vocab_size, batch_spec(root))
    files = checkpoint.weight_files if base is None else base.files
    total_bytes = sum(file.stat().st_size for file in files)
    if parameters * _MIN_ITEMSIZE > total_bytes:
        if base is not None and checkpoint.state.base is not None:
            from .pretrained import check_same_base

            check_same_base(base, checkpoint.state.base, checkpoint.path)  # a wrong --base is the likelier reason
        raise UserError(
            f"checkpoint {checkpoint.path} does not fit the model of its configuration, which has {parameters:,} "
            f"parameters: its weights have {total_bytes:,} bytes"
        )
