"""Convert a stoker checkpoint to a Hugging Face model folder, tensor by tensor, in files of at most 5 GB."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from ...models.config.families import FamilyKeys
from ...models.hf.architecture import Architecture, slice_differences, slice_from_keys, unflatten_keys
from ...models.hf.architectures import all_architectures, model_types
from ...models.hf.config_fields import FieldError, HFConfig
from ...models.hf.weight_layout import Geometry
from ...models.hf.weight_map import ParameterMapping
from ..checkpoint.hf_files import CONFIG
from ..checkpoint.reader import Checkpoint, damage_as_user_error, find_checkpoint
from ..config.resolved_run import DataSpec, ResolvedRun
from ..config.schema.root import MODEL_BLOCKS
from ..data.tokenizers.tokenizer import Tokenizer
from ..data.tokenizers.vocabulary import model_vocab_size
from ..utils.errors import UserError
from ..utils.progress import Progress
from ..utils.safetensors_io import TensorSpec, write_json, write_safetensors_stream
from ..utils.text import truncate_lines
from .checkpoint_io import checkpoint_config, checkpoint_tokenizer
from .from_hf import parameter_layout
from .merge_adapter import open_merged
from .output_folder import atomic_folder
from .pretrained import PretrainedWeights, check_model_size
from .tensor_source import TensorSource, cast_tensors, describe_differences
from .tokenizer_copy import (
    given_tokenizer_files,
    original_tokenizer_files,
    read_settings,
    special_ids,
    write_template,
    write_tokenizer,
)

SHARD_BYTES = 5_000_000_000
_CACHED = 4
"""Stoker parameters cached in memory while their parts are written, which are interleaved within a layer."""
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class HFModel:
    """A stoker model mapped to a Hugging Face architecture.

    Attributes:
        config: config.json, without special tokens and dtype.
    """

    architecture: Architecture
    config: dict[str, Any]
    placed: Sequence[ParameterMapping]
    geometry: Geometry


def convert_to_hf(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: str | None = None,
    model_type: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    base: PretrainedWeights | None = None,
    ema: bool = False,
    overwrite: bool = False,
) -> list[str]:
    """Convert a stoker checkpoint to a Hugging Face model folder.

    Args:
        source: a run directory, its checkpoints directory, or one step.
        dtype: dtype of the weights; None keeps the dtype of each.
        tokenizer: `--tokenizer`, a folder with tokenizer files; None for the files the run used, or new ones.
        model_type: architecture; None for the first that supports the model.
        shard_bytes: maximum file size; a larger tensor gets a file of its own.
        base: base weights to merge the adapter in `source` into; None for a whole model.

    Returns:
        Summary lines.

    Raises:
        UserError: no usable checkpoint, no architecture supports the model, or a write error.
    """
    checkpoint, complaints = find_checkpoint(source)
    checkpoint = checkpoint.with_ema() if ema else checkpoint
    run = checkpoint_config(checkpoint).resolved
    ours = checkpoint_tokenizer(checkpoint)
    check_model_size(checkpoint, run, model_vocab_size(run.data.vocab_size, ours), base)
    outgoing = choose_architecture(run, ours, model_type)
    notes: list[str] = []
    opened = (
        checkpoint.open_weights() if base is None else open_merged(checkpoint, run, ours, base, dtype, notes.append)
    )
    with damage_as_user_error(checkpoint.path), opened as tensors:
        _check_weights(checkpoint, outgoing, tensors)
        with atomic_folder(target, overwrite=overwrite) as folder:
            specs = _write_weights(folder, outgoing, cast_tensors(tensors, dtype), shard_bytes)
            _write_tokenizer(folder, run.data, ours, checkpoint, tokenizer)
            kinds = [spec.dtype for spec in specs.values()]
            _write_config(folder, outgoing, ours, max(set(kinds), key=kinds.count))
    numbers = sum(spec.num_bytes // spec.dtype.itemsize for spec in specs.values())
    name = outgoing.architecture.name
    return [*complaints, f"{target}: {name} with {numbers:,} parameters, of {checkpoint.path}", *notes]


def choose_architecture(run: ResolvedRun, tokenizer: Tokenizer, model_type: str | None) -> HFModel:
    """Choose the Hugging Face architecture of a model.

    Args:
        model_type: architecture to use; None tries all.

    Raises:
        UserError: none supports the model; lists the problems of the closest one.
    """
    tried: list[tuple[str, list[str]]] = []
    shapes, geometry = parameter_layout(run, tokenizer)
    vocab_size = geometry.vocab_size
    for architecture in _architectures():
        if architecture.family != run.model.family or model_type not in (None, architecture.model_type):
            continue
        problems: list[str] = []
        try:
            config = architecture.to_config(run.model, vocab_size=vocab_size)
            problems = _changes(architecture, config, run, vocab_size)
        except FieldError as error:
            config = {}
            problems = str(error).splitlines()
        placed, unmapped = architecture.weights.map_parameters(shapes, geometry)
        problems += [f"{name} has no counterpart there" for name in unmapped]
        if not problems:
            return HFModel(architecture, config, placed, geometry)
        tried.append((architecture.name, problems))
    if not tried:
        raise UserError(
            f"--model-type {model_type} is none of {', '.join(model_types())}, or not of `family: {run.model.family}`"
        )
    closest, problems = min(tried, key=lambda entry: len(entry[1]))
    names = ", ".join(dict.fromkeys(name for name, _ in tried))
    lines = truncate_lines(problems, _SHOWN, indent="  ")
    raise UserError([f"no Hugging Face architecture supports this model ({names}); problems with {closest}:", *lines])


def _architectures() -> tuple[Architecture, ...]:
    try:
        return all_architectures()
    except ValueError as error:
        raise UserError(str(error)) from None


def _changes(architecture: Architecture, config: Mapping[str, Any], run: ResolvedRun, vocab_size: int) -> list[str]:
    """Return the differences between the model and the one that the written config.json describes."""
    tied = not config.get("tie_word_embeddings", True)
    keys, problems = architecture.to_keys(HFConfig(config, has_separate_head=tied))
    if problems:
        return problems
    try:
        back = MODEL_BLOCKS[architecture.family].model_validate({"family": architecture.family, **unflatten_keys(keys)})
    except ValidationError as error:
        return [f"`{'.'.join(map(str, first['loc']))}`: {first['msg']}" for first in error.errors()]
    form = run.batch_spec
    return slice_differences(
        slice_from_keys(run.model, vocab_size, form), slice_from_keys(_with_length(back, run.model), vocab_size, form)
    )


def _with_length(back: FamilyKeys, ours: FamilyKeys) -> FamilyKeys:
    """Copy the sequence lengths, which a T5's config.json does not store."""
    names = {"seq_length", "max_position_embeddings"} if hasattr(ours, "seq_length") else set()
    return back.model_copy(update={name: getattr(ours, name) for name in names})


# ---------------------------------------------------------------- the tensors


def _check_weights(checkpoint: Checkpoint, outgoing: HFModel, tensors: TensorSource) -> None:
    problems = describe_differences(tensors.specs, {entry.parameter: entry.shape for entry in outgoing.placed})
    problems += [
        f"{name} has the unsupported dtype {spec.dtype}"
        for name, spec in tensors.specs.items()
        if not spec.dtype.is_floating_point
    ]
    if problems:
        lines = truncate_lines(problems, _SHOWN, indent="  ")
        raise UserError([f"checkpoint {checkpoint.path} does not fit its configuration:", *lines])


def _hf_tensors(outgoing: HFModel, tensors: TensorSource) -> Callable[[str], Tensor]:
    """Return a function that computes a Hugging Face tensor from the stoker parameter that holds it."""
    placed = {
        theirs: (entry, number) for entry in outgoing.placed for number, (theirs, _) in enumerate(entry.hf_tensors)
    }
    read_cached = lru_cache(_CACHED)(tensors.read)

    def read(name: str) -> Tensor:
        entry, number = placed[name]
        return entry.hf_tensor(number, read_cached(entry.parameter), outgoing.geometry)

    return read


def _write_weights(folder: Path, outgoing: HFModel, tensors: TensorSource, shard_bytes: int) -> dict[str, TensorSpec]:
    """Write the tensors to one file, or to several with an index; return their names, dtypes and shapes."""
    specs = {
        theirs: TensorSpec(tensors.specs[entry.parameter].dtype, shape)
        for entry in outgoing.placed
        for theirs, shape in entry.hf_tensors
    }
    shards: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.num_bytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += spec.num_bytes
    read = _hf_tensors(outgoing, tensors)
    total = sum(spec.num_bytes for spec in specs.values())
    weight_map: dict[str, str] = {}
    with Progress("writing", total, "bytes") as progress:
        for number, shard in enumerate(shards, start=1):
            name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            write_safetensors_stream(folder / name, shard, read, {"format": "pt"}, progress.advance)
            weight_map |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / "model.safetensors.index.json", index)
    return specs


# ---------------------------------------------------------------- tokenizer and config


def _write_tokenizer(folder: Path, spec: DataSpec, ours: Tokenizer, checkpoint: Checkpoint, named: str | None) -> None:
    document = checkpoint.tokenizer_document
    found = given_tokenizer_files(named, spec, document) if named else original_tokenizer_files(spec, document)
    if found is not None and found.files:
        found.copy(folder)
        write_template(folder, ours)
    else:
        write_tokenizer(folder, ours)


def _write_config(folder: Path, outgoing: HFModel, tokenizer: Tokenizer, dtype: torch.dtype) -> None:
    ids = special_ids(read_settings(folder), tokenizer)
    if outgoing.architecture.family == "t5":
        ids["decoder_start_token_id"] = ids["pad_token_id"]
    word = str(dtype).removeprefix("torch.")
    write_json(folder / CONFIG, {**outgoing.config, **ids, "dtype": word, "torch_dtype": word})
