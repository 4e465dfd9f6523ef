"""Load adapters and their base weights for training, resuming and inference."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from ...models.hf.config_fields import format_value
from ...models.parallel.partition import names_elsewhere
from ..checkpoint.hf_files import is_peft_folder
from ..checkpoint.reader import BaseRecord, Checkpoint, find_checkpoint, trainable_tensors
from ..config.resolved_run import ResolvedRun
from ..data.tokenizers.tokenizer import Tokenizer
from ..utils.environment import user_path
from ..utils.errors import UserError
from ..utils.local_shard import local_shards
from .checkpoint_io import checkpoint_config
from .from_peft import PeftFolder, convert_adapter_tensors, read_peft_folder
from .merge_adapter import first_different_parameter
from .pretrained import PretrainedWeights, check_same_base, find_pretrained, weights_digest

RESTORE_KEY = "model.peft.restore_from_path"
_HF_PEFT_SCHEMES = ("lora", "ia3")
"""PEFT schemes with an equivalent in the format of Hugging Face PEFT, which identifies the base model by name only."""


def load_pretrained_adapter(
    run: ResolvedRun, model: nn.Module, tokenizer: Tokenizer, base: PretrainedWeights | None
) -> Iterator[str]:
    """Load the adapter of `model.peft.restore_from_path`, if it is set.

    Args:
        model: the model with its PEFT modules; its trainable parameters are loaded in place.
        base: the frozen base weights; None for randomly initialized ones.

    Yields:
        Log lines.

    Raises:
        UserError: there is no adapter, it does not fit the model, or was trained on other base weights.
    """
    named = run.model.peft.restore_from_path
    if named is None:
        return
    path = user_path(named, RESTORE_KEY)
    if is_peft_folder(path):
        folder = read_peft_folder(path)
        yield from _check_base_name(folder, base)
        _load_peft_folder(folder, run, model, tokenizer)
        yield f"trained parameters from {path}"
        return
    checkpoint, complaints = find_checkpoint(path)
    yield from complaints
    if not checkpoint.is_adapter:
        cure = shlex.quote(f"model.restore_from_path={path}")
        raise UserError(f"`{RESTORE_KEY}`: {checkpoint.path} holds a whole model; set {cure}")
    if base is not None:
        yield from _check_trained_on(checkpoint, base)
    checkpoint.load_weights(model, cast=True)
    yield f"trained parameters from {checkpoint.path}, trained for {checkpoint.state.step:,} steps"


def _check_trained_on(checkpoint: Checkpoint, base: PretrainedWeights) -> Iterator[str]:
    """Check that an adapter was trained on these base weights; yield a warning if that cannot be determined.

    The checkpoint records a hash of the weight files, but the same weights may be stored in other files (converted,
    split or rounded). So if the hash differs, the weights themselves are compared, if the original files still exist.

    Raises:
        UserError: it was trained on other weights.
    """
    recorded = checkpoint.state.base
    if recorded is None or weights_digest(base) == recorded.sha256:
        return
    both = f"{checkpoint.path} was trained on {recorded.path}, but this run starts from {base.path}"
    original = _unchanged_base(recorded)
    if original is None:
        yield f"warning: {both}: the files differ and the original ones are gone, so the weights cannot be compared"
        return
    different = first_different_parameter(original, base)
    if different is None:
        return
    scheme = checkpoint_config(checkpoint).root.model.peft.peft_scheme
    raise UserError(
        f"`{RESTORE_KEY}`: {both}, whose weights differ (first in {different}); set "
        + shlex.quote(f"model.restore_from_path={recorded.path}")
        + (
            f"; to use it with these weights anyway: stoker convert {shlex.quote(str(checkpoint.path))} FOLDER, then "
            f"{RESTORE_KEY}=FOLDER"
            if scheme in _HF_PEFT_SCHEMES
            else ""
        )
    )


def _unchanged_base(record: BaseRecord) -> PretrainedWeights | None:
    """Return the recorded base weights if they still exist at their path, unchanged; else None."""
    try:
        base = find_pretrained(Path(record.path))
        return base if weights_digest(base) == record.sha256 else None
    except (UserError, OSError):
        return None


def _check_base_name(folder: PeftFolder, base: PretrainedWeights | None) -> Iterator[str]:
    """Yield a warning if an adapter in Hugging Face PEFT format names another base model; a name proves nothing."""
    named = folder.config.get("base_model_name_or_path")
    if base is None or not isinstance(named, str) or not named.strip("/"):
        return
    last = re.split(r"[/\\]", named.rstrip("/"))[-1]
    if last not in re.split(r"[/\\]|--", str(base.path.absolute())):
        yield (
            f"warning: {folder.path} names {format_value(named)} as its base model, but this run starts from "
            f"{base.path}; "
            "the weights cannot be compared"
        )


def _load_peft_folder(folder: PeftFolder, run: ResolvedRun, model: nn.Module, tokenizer: Tokenizer) -> None:
    trainable = local_shards(model, trainable_tensors(model))
    shapes = {name: shard.shape for name, shard in trainable.items()}
    found = convert_adapter_tensors(folder, run, tokenizer, shapes, names_elsewhere(model))
    with torch.no_grad():
        for name, shard in trainable.items():
            shard.copy_from_full(found[name])


def find_base_of_adapter(checkpoint: Checkpoint, base_path: Path | None = None) -> PretrainedWeights | None:
    """Find the base weights of a checkpoint; None for a full model, or if they were randomly initialized.

    Args:
        base_path: current path of the base weights; None for the path recorded in the checkpoint.

    Raises:
        UserError: the base weights do not exist, or `base_path` is given but the checkpoint has no base weights.
    """
    if not checkpoint.is_adapter or checkpoint.state.base is None:
        if base_path is not None:
            content = "an adapter of randomly initialized weights" if checkpoint.is_adapter else "a whole model"
            raise UserError(f"--base {base_path}: {checkpoint.path} holds {content}; leave --base out")
        return None
    return find_recorded_base(checkpoint, base_path)


def load_with_base(checkpoint: Checkpoint, model: nn.Module, base: PretrainedWeights | None, *, cast: bool) -> None:
    """Load the weights of a checkpoint into a model: for an adapter, its base weights first.

    Args:
        base: base weights of an adapter; None for the path recorded in the checkpoint.
        cast: convert dtypes that differ from the model's instead of raising.

    Raises:
        UserError: the weights do not fit the model, or the base weights are missing or have changed.
    """
    recorded = checkpoint.state.base
    if checkpoint.is_adapter and recorded is not None:
        base = find_recorded_base(checkpoint) if base is None else base
        check_same_base(base, recorded, checkpoint.path)
        base.load(model)
    checkpoint.load_weights(model, cast=cast)


def find_recorded_base(checkpoint: Checkpoint, base_path: Path | None = None) -> PretrainedWeights:
    """Find the base weights of an adapter checkpoint: at `base_path`, or at the path recorded in it.

    Raises:
        UserError: the path does not exist.
    """
    if base_path is not None:
        return find_pretrained(base_path, "--base")
    assert checkpoint.state.base is not None
    path = Path(checkpoint.state.base.path)
    if not path.exists():
        raise UserError(
            f"checkpoint {checkpoint.path} holds an adapter of {path}, which does not exist; give its current path "
            "with --base FOLDER"
        )
    return find_pretrained(path, f"the base of {checkpoint.path}")
