"""Adapters and the frozen weights they belong to: how a run begins with one, goes on with one, or is asked with one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from ...models.hf.config_fields import shown
from ..checkpoint.reader import BaseRecord, Checkpoint, find_checkpoint, trained_of
from ..config.run_config import RunConfig
from ..config.schema.root import RootBlock
from ..data.tokenizers.tokenizer import Tokenizer
from ..utils.environment import user_path
from ..utils.errors import UserError
from ..utils.local_shard import piece_of
from .from_peft import PeftFolder, is_peft_folder, read_peft_folder, trained_tensors
from .merge_adapter import first_difference
from .pretrained import BaseWeights, check_base, digest_of, find_base

KEY = "model.peft.restore_from_path"
_IN_PEFT = ("lora", "ia3")
"""Schemes that peft's format holds, which knows of its base no more than a name."""


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
        UserError: there is no adapter, or it does not fit the model, or was trained on another.
    """
    named = root.model.peft.restore_from_path
    if named is None:
        return
    path = user_path(named, KEY)
    if is_peft_folder(path):
        folder = read_peft_folder(path)
        yield from _doubts(folder, base)
        _load_peft_folder(folder, root, model, tokenizer)
        yield f"trained parameters from {path}"
        return
    checkpoint, complaints = find_checkpoint(path)
    yield from complaints
    if not checkpoint.is_adapter:
        raise UserError(f"`{KEY}`: {checkpoint.path} holds a whole model; set model.restore_from_path={path}")
    if base is not None:
        yield from _check_trained_on(checkpoint, base)
    checkpoint.load_weights(model, cast=True)
    yield f"trained parameters from {checkpoint.path}, trained for {checkpoint.state.step:,} steps"


def _check_trained_on(checkpoint: Checkpoint, base: BaseWeights) -> Iterator[str]:
    """See that an adapter was trained on these weights; a line where that cannot be known.

    The record is a hash of files, and the same weights may lie in others: converted, split or rounded. So where the
    hash differs, the weights decide, if those it was trained on are still there.

    Raises:
        UserError: it was trained on others.
    """
    wanted = checkpoint.state.base
    if wanted is None or digest_of(base) == wanted.sha256:
        return
    both = f"{checkpoint.path} was trained on {wanted.path}, and this run begins with {base.path}"
    former = _still_there(wanted)
    if former is None:
        yield f"warning: {both}: other files, and the former are no longer there, so whether weights differ is unknown"
        return
    different = first_difference(former, base)
    if different is None:
        return
    scheme = RunConfig.from_document(checkpoint.config_document, trusted=False).root.model.peft.peft_scheme
    raise UserError(
        f"`{KEY}`: {both}, whose weights are others ({different} is the first); set "
        f"model.restore_from_path={wanted.path}"
        + (
            f"; to move it to other weights all the same: stoker convert {checkpoint.path} FOLDER, and {KEY}=FOLDER"
            if scheme in _IN_PEFT
            else ""
        )
    )


def _still_there(record: BaseRecord) -> BaseWeights | None:
    """The weights of a record, if they are where they were and as they were."""
    try:
        base = find_base(Path(record.path))
        return base if digest_of(base) == record.sha256 else None
    except (UserError, OSError):
        return None


def _doubts(folder: PeftFolder, base: BaseWeights | None) -> Iterator[str]:
    """A line where a folder in peft's format names another base; a name proves nothing."""
    named = folder.config.get("base_model_name_or_path")
    if base is None or not isinstance(named, str) or not named.strip("/"):
        return
    last = re.split(r"[/\\]", named.rstrip("/"))[-1]
    if last not in re.split(r"[/\\]|--", str(base.path.absolute())):
        yield (
            f"warning: {folder.path} names {shown(named)} as the model it was trained on, and this run begins with "
            f"{base.path}; whether their weights differ cannot be seen"
        )


def _load_peft_folder(folder: PeftFolder, root: RootBlock, model: nn.Module, tokenizer: Tokenizer) -> None:
    wanted = trained_of(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in wanted.items()}
    found = trained_tensors(folder, root, tokenizer, shapes)
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
        UserError: they are not there, or `named` is, and there is nothing that could belong to it.
    """
    if not checkpoint.is_adapter or checkpoint.state.base is None:
        if named is not None:
            has = "an adapter of random weights, which are made again" if checkpoint.is_adapter else "a whole model"
            raise UserError(f"--base {named}: {checkpoint.path} holds {has}; leave --base out")
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
