"""Adapters and the frozen weights they belong to: how a run begins with one, goes on with one, or is asked with one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from .base_weights import BaseWeights, check_base, digest_of, find_base
from .checkpoint import Checkpoint, find_checkpoint, trained_of
from .config.schema import RootBlock
from .conversion.from_peft import is_peft_folder, read_peft_folder, trained_tensors
from .data.tokenizers import Tokenizer
from .distributed.pieces import piece_of
from .environment import user_path
from .errors import UserError

KEY = "model.peft.restore_from_path"


def load_initial_adapter(
    root: RootBlock, model: nn.Module, tokenizer: Tokenizer, base: BaseWeights | None
) -> Iterator[str]:
    """Copy the trained parameters that `model.peft.restore_from_path` names, if it names some.

    Args:
        root: the configuration.
        model: with what `model.peft` adds; its trained parameters are filled in place.
        tokenizer: of this run.
        base: the frozen weights; None for random ones.

    Yields:
        Lines for the log.

    Raises:
        UserError: there is no adapter, or it does not fit the model.
    """
    named = root.model.peft.restore_from_path
    if named is None:
        return
    path = user_path(named, KEY)
    if is_peft_folder(path):
        _load_peft_folder(path, root, model, tokenizer)
        yield f"trained parameters from {path}"
        return
    checkpoint, complaints = find_checkpoint(path)
    yield from complaints
    if not checkpoint.is_adapter:
        raise UserError(f"`{KEY}`: {checkpoint.path} holds a whole model; set model.restore_from_path={path}")
    checkpoint.load_weights(model, cast=True)
    wanted = checkpoint.state.base
    if base is not None and wanted is not None and digest_of(base) != wanted.sha256:
        yield f"warning: {checkpoint.path} was trained on {wanted.path}, whose weights are others than {base.path}"
    yield f"trained parameters from {checkpoint.path}, trained for {checkpoint.state.step:,} steps"


def _load_peft_folder(path: Path, root: RootBlock, model: nn.Module, tokenizer: Tokenizer) -> None:
    wanted = trained_of(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in wanted.items()}
    found = trained_tensors(read_peft_folder(path), root, tokenizer, shapes)
    with torch.no_grad():
        for name, parameter in wanted.items():
            piece = piece_of(parameter)
            piece.local.copy_(found[name][piece.start : piece.start + len(piece.local)])


def base_of_adapter(checkpoint: Checkpoint, named: Path | None = None) -> BaseWeights | None:
    """The frozen weights that a checkpoint belongs to; None for a whole model, and where they were random.

    Args:
        checkpoint: a whole model or an adapter.
        named: where they are now; None: where they were when it was written.

    Raises:
        UserError: they are not there.
    """
    if not checkpoint.is_adapter or checkpoint.state.base is None:
        return None
    return find_named_base(checkpoint) if named is None else find_base(named, "--base")


def load_with_base(checkpoint: Checkpoint, model: nn.Module, base: BaseWeights | None, *, cast: bool) -> None:
    """Copy the weights of a checkpoint into a model: those of an adapter after the weights it belongs to.

    Args:
        checkpoint: a whole model or an adapter.
        model: as its configuration describes it.
        base: the frozen weights of an adapter; None takes them from where they were when it was written.
        cast: accept other dtypes than the model's, and convert.

    Raises:
        UserError: the weights do not fit the model, or those of the base are not there or are others.
    """
    wanted = checkpoint.state.base
    if checkpoint.is_adapter and wanted is not None:
        base = find_named_base(checkpoint) if base is None else base
        check_base(base, wanted, checkpoint.path)
        base.load(model)
    checkpoint.load_weights(model, cast=cast)


def find_named_base(checkpoint: Checkpoint) -> BaseWeights:
    """The frozen weights that an adapter names.

    Raises:
        UserError: they are not where they were.
    """
    assert checkpoint.state.base is not None
    path = Path(checkpoint.state.base.path)
    if not path.exists():
        raise UserError(
            f"checkpoint {checkpoint.path} holds an adapter of {path}, which is not there; put it back, or name the "
            "place it has now: --base FOLDER"
        )
    return find_base(path, f"the base of {checkpoint.path}")
