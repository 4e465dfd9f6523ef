"""Start from the weights of another run: what fine-tuning begins with."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .checkpoint import find_checkpoint
from .config.schema import RootBlock
from .data.tokenizers import Tokenizer
from .environment import user_path
from .errors import UserError

_KEY = "model.restore_from_path"


def load_initial_weights(root: RootBlock, model: nn.Module, tokenizer: Tokenizer) -> Iterator[str]:
    """Copy the weights of the checkpoint that `model.restore_from_path` names, if it names one, in any dtype.

    Args:
        root: the configuration.
        model: of the same shape; filled in place. Its optimizer must be made afterwards, from these weights.
        tokenizer: of this run.

    Yields:
        Lines for the log.

    Raises:
        UserError: there is no such checkpoint, it is of another shape, or of another tokenizer, whose token ids mean
            other things.
    """
    if root.model.restore_from_path is None:
        return
    checkpoint, complaints = find_checkpoint(user_path(root.model.restore_from_path, _KEY))
    yield from complaints
    if checkpoint.tokenizer_document != tokenizer.to_document():
        raise UserError(
            f"`{_KEY}`: {checkpoint.path} has another tokenizer than this run, so its weights mean other tokens; use "
            "its `model.tokenizer`"
        )
    checkpoint.load_weights(model, cast=True)
    yield f"weights from {checkpoint.path}, trained for {checkpoint.state.step:,} steps"
