"""Convert a Hugging Face model folder or GGUF file to a stoker checkpoint, tensor by tensor.

The result can be used like a run directory:

    checkpoints/step-0/          checkpoint: weights, configuration, tokenizer, no optimizer
    tokenizer/                   unchanged tokenizer files
    conf/model/converted.yaml    model keys, for model=converted
    conf/tokenizer/converted.yaml
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from torch import Tensor

from ...kernels.attention.flags import AttentionFlags
from ...models.build import LanguageModel, build_model
from ...models.config.peft import PeftSlice
from ...models.hf.architecture import Architecture, geometry_of, slice_from_keys, unflatten_keys
from ...models.hf.architectures import architecture_of, model_types
from ...models.hf.config_fields import HFConfig, format_value
from ...models.hf.llama import LLAMA
from ...models.hf.weight_layout import Geometry, Shape
from ...models.hf.weight_map import ParameterMapping
from ..checkpoint.hf_files import CONFIG, read_object
from ..checkpoint.reader import WEIGHTS, model_tensors
from ..config.load import config_from_document
from ..config.resolved_run import ResolvedRun
from ..config.run_config import RunConfig
from ..data.tokenizers.tokenizer import Tokenizer, tokenizer_state
from ..data.tokenizers.vocabulary import model_vocab_size
from ..utils.errors import UserError
from ..utils.safetensors_io import TensorSpec
from ..utils.text import pluralize, truncate_lines
from .checkpoint_io import initial_state, write_converted_checkpoint
from .hf_folder import FolderTensors, join_names, open_folder_tensors
from .output_folder import atomic_folder
from .tensor_source import ComputedTensors, TensorSource, cast_tensors
from .tokenizer_copy import (
    TOKENIZER_FOLDER,
    TokenizerFolder,
    find_tokenizer,
    tokenizer_for_vocabulary,
    tokenizer_from_option,
)

CONVERTED = "converted"
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class MappedModel:
    """A Hugging Face model mapped to a stoker model.

    Attributes:
        keys: nested `model` configuration.
        config: configuration of a run of the unmodified model.
        skipped: names of weights that stoker does not support and skips.
    """

    architecture: Architecture
    keys: dict[str, Any]
    config: RunConfig
    tokenizer_folder: TokenizerFolder
    tokenizer: Tokenizer
    placed: Sequence[ParameterMapping]
    geometry: Geometry
    skipped: Sequence[str]


def convert_to_stoker(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: str | None = None,
    ignored: Collection[str] = (),
    overwrite: bool = False,
) -> list[str]:
    """Convert a Hugging Face model folder or GGUF file to a stoker checkpoint.

    Args:
        dtype: dtype of the weights; None keeps the dtype of each.
        tokenizer: `--tokenizer`; None for the tokenizer of `source`.
        ignored: fields of config.json to ignore.

    Returns:
        Summary lines.

    Raises:
        UserError: the model is not supported or malformed, with every reason; or a write error.
    """
    with open_source(source) as found:
        incoming = map_source(found, tokenizer, ignored)
        tensors = mapped_tensors(incoming, cast_tensors(found.tensors, dtype))
        with atomic_folder(target, overwrite=overwrite) as folder:
            _write(folder, target.absolute(), source, incoming, tensors)
    numbers = sum(math.prod(shape) for entry in incoming.placed for _, shape in entry.hf_tensors)
    kinds = ", ".join(sorted({_dtype_name(spec) for spec in tensors.specs.values()}))
    lines = [f"{target}: {incoming.architecture.name} with {numbers:,} parameters in {kinds}"]
    if incoming.skipped:
        lines.append(f"skipped weights that stoker does not support: {join_names(incoming.skipped, 8)}")
    return [
        *lines,
        f"train on: stoker train --config-dir {shlex.quote(f'{target}/conf')} model={CONVERTED} "
        f"tokenizer={CONVERTED} {shlex.quote(f'model.restore_from_path={target}')}",
    ]


def mapped_tensors(incoming: MappedModel, tensors: TensorSource) -> TensorSource:
    """Return the parameters of a stoker model, computed one at a time from the tensors of a Hugging Face model.

    Each has the promoted dtype of the tensors it is computed from.
    """
    mappings = {entry.parameter: entry for entry in incoming.placed}

    def dtype(entry: ParameterMapping) -> torch.dtype:
        return reduce(torch.promote_types, (tensors.specs[name].dtype for name, _ in entry.hf_tensors))

    specs = {name: TensorSpec(dtype(entry), entry.shape) for name, entry in mappings.items()}

    def read(name: str) -> Tensor:
        parts = [tensors.read(theirs).to(specs[name].dtype) for theirs, _ in mappings[name].hf_tensors]
        return mappings[name].join(parts, incoming.geometry)

    return ComputedTensors(specs, read)


@dataclass(frozen=True, slots=True)
class HFSource:
    """An open Hugging Face folder or GGUF file.

    Attributes:
        config_name: name of the source of `config`, for messages.
        config: fields of config.json.
        find_tokenizer: returns the tokenizer files, given the vocabulary size.
    """

    path: Path
    config_name: str
    config: Mapping[str, Any]
    architecture: Architecture
    tensors: FolderTensors
    find_tokenizer: Callable[[Any], TokenizerFolder]

    @property
    def origin(self) -> str:
        """Origin of the configuration, for messages."""
        return f"{self.path} ({self.config_name})"


@contextmanager
def open_source(path: Path) -> Iterator[HFSource]:
    """Open a Hugging Face model folder or GGUF file.

    Raises:
        UserError: it is neither, or the architecture is not supported.
    """
    if path.suffix == ".gguf" and path.is_file():
        from .gguf_file import GGUFModel

        model = GGUFModel(path)
        with TemporaryDirectory() as folder:
            written = Path(folder)
            yield HFSource(
                path, "its metadata", model.config, LLAMA, model.tensors, lambda _: model.write_tokenizer(written)
            )
        return
    config = read_object(path, CONFIG)
    if config is None:
        raise UserError(f"{path} holds no {CONFIG}")
    try:
        architecture, known = architecture_of(config), ", ".join(model_types())
    except ValueError as error:
        raise UserError(str(error)) from None
    if architecture is None:
        raise UserError(
            f"{path}: `model_type` ({format_value(config.get('model_type'))}) is none of {known}; if you have a "
            "`weight_map` of your own for it, give its module with --import"
        )
    with open_folder_tensors(path, architecture.weights.canonical_name) as tensors:
        yield HFSource(
            path,
            CONFIG,
            config,
            architecture,
            tensors,
            lambda vocab_size: find_tokenizer(path, architecture.family, vocab_size),
        )


def map_source(source: HFSource, tokenizer: str | None, ignored: Collection[str]) -> MappedModel:
    """Map a model to a stoker model from its config and file headers, before any weights are allocated.

    Args:
        tokenizer: `--tokenizer`; None for its own.
        ignored: config fields to ignore.

    Raises:
        UserError: the model is not supported; lists every reason.
    """
    architecture, tensors = source.architecture, source.tensors
    own_head = _has_own_head(architecture, tensors)
    keys, problems = architecture.to_keys(HFConfig(source.config, own_head), ignored)
    problems = [f"{source.config_name}: {problem}" for problem in problems]
    found: TokenizerFolder | None = None
    try:
        if tokenizer is None:
            found = source.find_tokenizer(keys.get("override_vocab_size"))
        else:
            found = tokenizer_from_option(tokenizer, architecture.family)
    except UserError as error:
        problems += error.lines
    problems += [f"{source.config_name}: {problem}" for problem in _excessive_counts(keys, tensors)]
    if problems or found is None:
        raise UserError([f"{source.path} cannot be converted:", *(f"  {problem}" for problem in problems)])
    model_keys = {"family": architecture.family, **unflatten_keys(keys), "micro_batch_size": 1}
    config = _run_config(model_keys, found.keys_for(found.folder or source.path), source.origin)
    try:
        made = tokenizer_for_vocabulary(config.resolved.data, keys["override_vocab_size"])
    except UserError as error:
        raise UserError(f"{source.path}: {error}") from None
    placed, geometry = _placed(architecture, config.resolved, made)
    problems, left_out = _compare(architecture, placed, tensors)
    if problems:
        title = f"{source.path}: the weights do not fit {source.config_name}:"
        raise UserError([title, *(f"  {problem}" for problem in problems)])
    return MappedModel(architecture, model_keys, config, found, made, placed, geometry, left_out)


# ---------------------------------------------------------------- configuration


def _has_own_head(architecture: Architecture, tensors: FolderTensors) -> bool:
    head, embedding = architecture.weights.head, architecture.weights.embedding
    if head not in tensors.specs:
        return False
    return embedding in tensors.specs and not tensors.are_equal(head, embedding)


def _excessive_counts(keys: Mapping[str, Any], tensors: FolderTensors) -> Iterator[str]:
    """Yield counts that exceed the number of tensors, before a model of absurd size is built from them."""
    num_tensors = len(tensors.specs) + len(tensors.unsupported_dtypes)
    layers = sum(keys.get(f"{stack}num_layers", 0) for stack in ("", "encoder.", "decoder."))
    if layers > num_tensors:
        yield f"there are {layers:,} layers, but only {pluralize(num_tensors, 'tensor')}"
    elif (keys.get("num_moe_experts") or 0) * layers > num_tensors:
        yield (
            f"there are {keys['num_moe_experts']:,} experts in each layer, but only {pluralize(num_tensors, 'tensor')}"
        )


def _run_config(model_keys: Mapping[str, Any], tokenizer_keys: Mapping[str, Any], origin: str) -> RunConfig:
    document = {"name": CONVERTED, "model": {**model_keys, "tokenizer": tokenizer_keys}}
    return config_from_document(document, trusted=False, origin=origin)


def _placed(
    architecture: Architecture, run: ResolvedRun, tokenizer: Tokenizer
) -> tuple[list[ParameterMapping], Geometry]:
    """Return the mapping of each parameter to the source tensors, and the attention geometry."""
    shapes, geometry = parameter_layout(run, tokenizer)
    placed, unmapped = architecture.weights.map_parameters(shapes, geometry)
    if unmapped:  # of a user's own: built-in architectures have all parameters of the models that they describe
        raise UserError([f"{architecture.name}: no rule for", *(f"  {name}" for name in unmapped)])
    return placed, geometry


def parameter_layout(run: ResolvedRun, tokenizer: Tokenizer) -> tuple[dict[str, Shape], Geometry]:
    """Return names and shapes of the checkpoint tensors of a configuration, and its attention geometry."""
    tensors = model_tensors(build_meta_model(run, tokenizer))
    model = slice_from_keys(run.model, model_vocab_size(run.data.vocab_size, tokenizer), run.batch_spec)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}, geometry_of(model)


def build_meta_model(run: ResolvedRun, tokenizer: Tokenizer, peft: PeftSlice | None = None) -> LanguageModel:
    """Build the model of a configuration on the meta device, with the parameters that `peft` adds."""
    return build_model(
        run.model,
        vocab_size=model_vocab_size(run.data.vocab_size, tokenizer),
        device="meta",
        dtype=torch.float32,
        flags=AttentionFlags(),
        micro_batch_size=1,
        batch_spec=run.batch_spec,
        peft=peft,
    )


# ---------------------------------------------------------------- the tensors


def _compare(
    architecture: Architecture, placed: Iterable[ParameterMapping], tensors: FolderTensors
) -> tuple[list[str], list[str]]:
    """Return the problems of the tensors, and the names of those that are skipped."""
    wanted = {name: shape for entry in placed for name, shape in entry.hf_tensors}
    weights = architecture.weights
    missing = [name for name in wanted if name not in tensors.specs and name not in tensors.unsupported_dtypes]
    others: list[str] = []
    unknown: list[str] = []
    left_out: list[str] = []
    for name in sorted({*tensors.specs, *tensors.unsupported_dtypes} - set(wanted)):
        original = weights.original_name(name, tied=weights.head not in wanted)
        if weights.is_buffer(name):
            continue
        if weights.is_ignored(name):
            left_out.append(name)
        elif original is None:
            unknown.append(name)
        elif original not in tensors.specs:
            pass  # the missing original is reported
        elif name not in tensors.specs or not tensors.are_equal(name, original):
            others.append(f"{name} must equal {original}, which it duplicates")
    for name, shape in wanted.items():
        if name in tensors.unsupported_dtypes:
            others.append(f"{name} is of dtype {tensors.unsupported_dtypes[name]}, which is not supported")
        elif name in tensors.specs:
            spec = tensors.specs[name]
            if spec.dtype not in _FLOATS:
                others.append(f"{name} is of dtype {_dtype_name(spec)}, which is not supported")
            if spec.shape != shape:
                others.append(f"{name} has the shape {list(spec.shape)}, which must be {list(shape)}")
    problems = truncate_lines((f"missing: {name}" for name in missing), _SHOWN, more="missing: {} more")
    problems += truncate_lines(
        (f"unknown: {format_value(name, 120)}" for name in unknown), _SHOWN, more="unknown: {} more"
    )
    return problems + truncate_lines(others, _SHOWN, more="and {} more of these"), left_out


def _write(folder: Path, target: Path, source: Path, incoming: MappedModel, tensors: TensorSource) -> None:
    keys = incoming.tokenizer_folder.keys_for(target / TOKENIZER_FOLDER)
    config = _run_config(incoming.keys, keys, str(source / CONFIG))
    state, tokenizer = initial_state(config.resolved), tokenizer_state(incoming.tokenizer)
    write_converted_checkpoint(folder, WEIGHTS, tensors, state, config.document, tokenizer)
    incoming.tokenizer_folder.copy(folder / TOKENIZER_FOLDER)
    for group, block in (("model", incoming.keys), ("tokenizer", keys)):
        path = folder / "conf" / group / f"{CONVERTED}.yaml"
        path.parent.mkdir(parents=True)
        about = "# @package model.tokenizer\n" if group == "tokenizer" else ""
        about += f"# {incoming.architecture.name}, converted from {_printable_ascii(source)}\n"
        path.write_text(about + yaml.safe_dump(block, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _printable_ascii(path: Path) -> str:
    return re.sub(r"[^\x20-\x7e]", "?", str(path))


def _dtype_name(spec: TensorSpec) -> str:
    return str(spec.dtype).removeprefix("torch.")
