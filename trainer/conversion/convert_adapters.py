"""Convert adapters: to peft format, from it, or merged into their base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..checkpoint.hf_files import is_peft_folder
from ..checkpoint.reader import (
    ADAPTER,
    WEIGHTS,
    Checkpoint,
    RunState,
    damage_as_user_error,
    find_checkpoint,
    trainable_tensors,
)
from ..checkpoint.run_environment import main_versions
from ..config import dotted_paths
from ..config.load import config_from_document
from ..config.resolved_run import ResolvedRun
from ..config.run_config import RunConfig
from ..data.tokenizers.tokenizer import Tokenizer
from ..utils.errors import UserError
from .adapter_weights import find_recorded_base
from .checkpoint_io import checkpoint_config, checkpoint_tokenizer, initial_state, write_converted_checkpoint
from .from_hf import build_meta_model, open_source
from .from_peft import convert_adapter_tensors, peft_config_keys, read_peft_folder
from .merge_adapter import open_merged
from .output_folder import atomic_folder
from .pretrained import PretrainedWeights, find_pretrained, map_hf_model
from .tensor_source import cast_tensors, host_tensors
from .to_hf import convert_to_hf
from .to_peft import convert_to_peft


def is_adapter(source: Path) -> bool:
    """Return True if a path is an adapter: a stoker checkpoint or a folder in peft format."""
    if is_peft_folder(source):
        return True
    try:
        return find_checkpoint(source, verify=False)[0].is_adapter
    except UserError:
        return False


def convert_adapter(
    source: Path,
    target: Path,
    *,
    merge: bool,
    to: str | None,
    base: Path | None,
    dtype: torch.dtype | None,
    tokenizer: str | None,
    model_type: str | None,
    ema: bool = False,
    overwrite: bool = False,
) -> list[str]:
    """Convert an adapter to another format, or merge it into its base model.

    Args:
        source: a run directory or checkpoint with an adapter, or a folder in peft format.
        to: `hf` or `stoker`; None for the format `source` does not have, and `hf` with `merge`.
        base: current path of the base weights.
        dtype: output dtype; None keeps the dtype of each tensor.
        tokenizer: `--tokenizer`, for a merged Hugging Face model.
        model_type: `--model-type`, the architecture of the base in transformers.

    Returns:
        Summary lines.

    Raises:
        UserError: the adapter cannot be read or converted, its base is missing, or an option has no effect.
    """
    output_format = "stoker" if is_peft_folder(source) else to or "hf"
    if tokenizer is not None and not (merge and output_format == "hf"):
        raise UserError(f"--tokenizer {tokenizer}: the output keeps its tokenizer, or has none; leave it out")
    if model_type is not None and output_format == "stoker":
        raise UserError(f"--model-type {model_type} applies to --to hf; leave it out")
    if is_peft_folder(source):
        if merge or to == "hf":
            raise UserError(f"{source} is in peft format: convert it to a stoker adapter first, without --merge")
        if ema:
            raise UserError(f"--ema: {source} is in peft format, which has no moving average")
        return convert_from_peft(source, target, base, dtype, overwrite=overwrite)
    checkpoint, complaints = find_checkpoint(source)
    checkpoint = checkpoint.with_ema() if ema else checkpoint
    run = checkpoint_config(checkpoint).resolved
    if not merge:
        if to == "stoker":
            raise UserError(f"--to stoker: {source} already has that format; --merge makes a whole model of it")
        weights = None if base is None else _base_of(checkpoint, base)
        return [
            *complaints,
            *convert_to_peft(
                checkpoint, run, target, dtype=dtype, model_type=model_type, base=weights, overwrite=overwrite
            ),
        ]
    weights = _base_of(checkpoint, base)
    if to == "stoker":
        return [*complaints, *_merge_to_stoker(checkpoint, run, weights, target, dtype, overwrite=overwrite)]
    return convert_to_hf(
        checkpoint.path,
        target,
        dtype=dtype,
        tokenizer=tokenizer,
        model_type=model_type,
        base=weights,
        ema=ema,
        overwrite=overwrite,
    )


def _base_of(checkpoint: Checkpoint, named: Path | None) -> PretrainedWeights:
    if checkpoint.state.base is None:
        raise UserError(
            f"checkpoint {checkpoint.path}: its adapter was trained on random weights, which were not saved"
        )
    return find_recorded_base(checkpoint, named)


def _merge_to_stoker(
    checkpoint: Checkpoint,
    run: ResolvedRun,
    base: PretrainedWeights,
    target: Path,
    dtype: torch.dtype | None,
    *,
    overwrite: bool,
) -> list[str]:
    tokenizer = checkpoint_tokenizer(checkpoint)
    document = checkpoint.config_document
    document["model"] = {**document["model"], "peft": {}, "restore_from_path": None}
    state, tokenizer_document = _fresh(checkpoint.state), checkpoint.tokenizer_document_with_chat
    notes: list[str] = []
    with (
        damage_as_user_error(checkpoint.path),
        open_merged(checkpoint, run, tokenizer, base, dtype, notes.append) as tensors,
        atomic_folder(target, overwrite=overwrite) as folder,
    ):
        write_converted_checkpoint(folder, WEIGHTS, tensors, state, document, tokenizer_document)
    return [f"{target}: {checkpoint.path} merged into {base.path}", *notes]


def _fresh(state: RunState) -> RunState:
    """Return the state at step 0."""
    return state.model_copy(
        update={
            "step": 0,
            "updates": None,
            "consumed_samples": 0,
            "base": None,
            "val_loss": None,
            "metrics": {},
            "versions": main_versions(),
        }
    )


# ---------------------------------------------------------------- from peft


def convert_from_peft(
    source: Path, target: Path, base: Path | None, dtype: torch.dtype | None, *, overwrite: bool = False
) -> list[str]:
    """Convert a folder in peft format to an adapter checkpoint; arguments as in `convert_adapter`."""
    folder = read_peft_folder(source)
    named = folder.config.get("base_model_name_or_path")
    if base is None and not (isinstance(named, str) and named and Path(named).is_dir()):
        raise UserError(f"{source}: its base ({str(named)[:80]}) is not a local folder; give it with --base FOLDER")
    weights = find_pretrained(base or Path(str(named)), "--base")
    config, tokenizer = load_base_config(weights)
    keys = peft_config_keys(folder, config.resolved, tokenizer)
    document = dict(config.document)
    for name, value in keys.items():
        dotted_paths.put(document, f"model.peft.{name}", value)
    dotted_paths.put(document, "model.restore_from_path", str(weights.path.absolute()))
    whole = config_from_document(document, trusted=False, origin=str(source))
    model = build_meta_model(whole.resolved, tokenizer, whole.resolved.peft)
    shapes = {name: tuple(tensor.shape) for name, tensor in trainable_tensors(model).items()}
    tensors = convert_adapter_tensors(folder, whole.resolved, tokenizer, shapes)
    source_tensors = cast_tensors(host_tensors(tensors), dtype)
    state = initial_state(whole.resolved).model_copy(update={"base": weights.record()})
    with atomic_folder(target, overwrite=overwrite) as place:
        write_converted_checkpoint(place, ADAPTER, source_tensors, state, whole.document, tokenizer.to_dict())
    numbers = sum(tensor.numel() for tensor in tensors.values())
    return [f"{target}: {folder.kind} with {numbers:,} parameters, of {weights.path}"]


def load_base_config(base: PretrainedWeights) -> tuple[RunConfig, Tokenizer]:
    """Return the configuration of a base model, and its tokenizer."""
    if base.checkpoint is not None:
        return checkpoint_config(base.checkpoint), checkpoint_tokenizer(base.checkpoint)
    with open_source(base.path) as source:
        incoming = map_hf_model(source)
        return incoming.config, incoming.tokenizer


def adapter_keys(adapter: Path, base: Path) -> dict[str, Any]:
    """Read the `model.peft` keys an adapter was trained with, by dotted path.

    Args:
        adapter: a stoker adapter, or a folder in Hugging Face PEFT format.

    Raises:
        UserError: there is no adapter, or it belongs to another model.
    """
    base_weights = find_pretrained(base, verify=False)
    if is_peft_folder(adapter):
        config, tokenizer = load_base_config(base_weights)
        found = peft_config_keys(read_peft_folder(adapter), config.resolved, tokenizer)
    else:
        model = find_checkpoint(adapter, verify=False)[0].config_document.get("model")
        peft = model.get("peft") if isinstance(model, dict) else None
        found = dict(dotted_paths.leaves(peft)) if isinstance(peft, dict) else {}
    return {f"model.peft.{name}": value for name, value in found.items() if name != "restore_from_path"}
