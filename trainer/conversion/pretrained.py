"""Pretrained weights for initialization: a stoker checkpoint or a Hugging Face model folder.

A Hugging Face folder is loaded tensor by tensor into an existing model; nothing is written to disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...models.model_cost import count_parameters
from ...models.parallel.partition import names_elsewhere
from ..checkpoint.hf_files import check_pretrained_path, is_hf_folder
from ..checkpoint.reader import (
    WEIGHTS,
    BaseRecord,
    Checkpoint,
    CheckpointMismatchError,
    base_tensors,
    find_checkpoint,
    read_manifest,
)
from ..checkpoint.sharded_safetensors import open_full_tensors, shard_files
from ..config.resolved_run import ResolvedRun
from ..utils.environment import user_path
from ..utils.errors import UserError
from ..utils.local_shard import local_shards
from ..utils.text import truncate_lines
from .from_hf import HFSource, MappedModel, map_source, mapped_tensors, open_source
from .hf_folder import weight_paths
from .tensor_source import TensorSource, describe_differences

RESTORE_KEY = "model.restore_from_path"
_SHOWN = 10
_FINETUNE = "use stoker finetune, which takes all model keys from there"
_MIN_ITEMSIZE = 2
"""Bytes per weight of the narrowest supported dtype."""


@dataclass(frozen=True, slots=True)
class PretrainedWeights:
    """Pretrained weights given by `model.restore_from_path`.

    Attributes:
        path: the `step-N` directory or Hugging Face folder.
        checkpoint: the stoker checkpoint; None for a Hugging Face folder.
        warnings: one message for each damaged checkpoint that was skipped.
    """

    path: Path
    checkpoint: Checkpoint | None
    warnings: tuple[str, ...] = ()

    @property
    def files(self) -> list[Path]:
        """Weight files."""
        return weight_paths(self.path) if self.checkpoint is None else self.checkpoint.weight_files

    def record(self) -> BaseRecord:
        """Return the path and the digest of the weight files."""
        return BaseRecord(path=str(self.path.absolute()), sha256=weights_digest(self))

    def load(self, model: nn.Module) -> None:
        """Load the weights into a model in place, converting dtypes; parameters added by PEFT are unchanged.

        Raises:
            UserError: the weights do not match the model; lists the differences.
        """
        if self.checkpoint is not None:
            try:
                self.checkpoint.load_weights(model, cast=True)
            except CheckpointMismatchError as error:
                raise UserError([*error.lines[:-1], _FINETUNE]) from None
        else:
            with self.open_tensors() as tensors:
                _fill(self.path, tensors, model)

    @contextmanager
    def open_tensors(self) -> Iterator[TensorSource]:
        """Open the weights under stoker's parameter names, to read them one at a time.

        Raises:
            UserError: a Hugging Face model is not supported; lists every reason.
            DamagedFileError: the files of a checkpoint are damaged.
        """
        if self.checkpoint is not None:
            with open_full_tensors(self.checkpoint.weight_files) as tensors:
                yield tensors
        else:
            with open_source(self.path) as source:
                yield mapped_tensors(map_hf_model(source), source.tensors)


def find_pretrained(path: Path, key: str = RESTORE_KEY, *, verify: bool = True) -> PretrainedWeights:
    """Find the pretrained weights at a path.

    Args:
        path: a stoker checkpoint or run directory, or a Hugging Face model folder.
        key: configuration key that gave the path, for messages.
        verify: compare the hashes of the files.

    Raises:
        UserError: the path is neither, or is an adapter, which has no base weights.
    """
    if is_hf_folder(path):
        return PretrainedWeights(path, None)
    check_pretrained_path(path, key)
    checkpoint, complaints = find_checkpoint(path, verify=verify)
    if checkpoint.is_adapter:
        base = checkpoint.state.base
        raise UserError(
            f"`{key}`: {checkpoint.path} holds an adapter"
            + (f" of {base.path}" if base else "")
            + ", not a whole model; to continue its training set model.peft.restore_from_path, or merge it: "
            f"stoker convert --merge {path} FOLDER"
        )
    return PretrainedWeights(checkpoint.path, checkpoint, tuple(complaints))


def find_configured_pretrained(path: str | None) -> PretrainedWeights | None:
    """Apply `find_pretrained` to `model.restore_from_path`; None for None."""
    return None if path is None else find_pretrained(user_path(path, RESTORE_KEY))


def weights_digest(base: PretrainedWeights) -> str:
    """Return the SHA-256 of the names and hashes of the weight files; for a checkpoint those of its manifest."""
    if base.checkpoint is not None:
        records = read_manifest(base.path)
        hashes = [(name, records[name].sha256) for name in shard_files(WEIGHTS, records)]
    else:
        hashes: list[tuple[str, str]] = []
        for path in sorted(base.files):
            with path.open("rb") as file:
                hashes.append((path.name, hashlib.file_digest(file, "sha256").hexdigest()))
    listing = "".join(f"{name}:{sha256}\n" for name, sha256 in hashes)
    return hashlib.sha256(listing.encode()).hexdigest()


def check_same_base(base: PretrainedWeights, expected: BaseRecord, adapter: Path) -> None:
    """Check that base weights are those an adapter was trained on.

    Raises:
        UserError: they differ.
    """
    if weights_digest(base) != expected.sha256:
        raise UserError(
            f"{adapter} holds an adapter trained on {expected.path}; the weights in {base.path} differ from those"
        )


def check_model_size(
    checkpoint: Checkpoint, run: ResolvedRun, vocab_size: int, base: PretrainedWeights | None = None
) -> None:
    """Check before allocating anything that the weight files can hold the parameters of the configuration.

    Args:
        base: base weights, if the checkpoint is an adapter.

    Raises:
        UserError: the model is too large for the files, or the base is not the one the adapter was trained on.
    """
    unpadded = {"make_vocab_size_divisible_by": 1}  # Hugging Face vocabularies are not padded
    keys = run.model if base is None else run.model.model_copy(update=unpadded)
    parameters = count_parameters(keys, keys.override_vocab_size or vocab_size, run.batch_spec)
    files = checkpoint.weight_files if base is None else base.files
    total_bytes = sum(file.stat().st_size for file in files)
    if parameters * _MIN_ITEMSIZE > total_bytes:
        if base is not None and checkpoint.state.base is not None:
            check_same_base(base, checkpoint.state.base, checkpoint.path)  # a wrong --base is the likelier reason
        raise UserError(
            f"checkpoint {checkpoint.path} does not fit the model of its configuration, which has {parameters:,} "
            f"parameters: its weights have {total_bytes:,} bytes"
        )


def map_hf_model(source: HFSource) -> MappedModel:
    """Map an open Hugging Face model to a stoker model, with a byte-level tokenizer if the folder has none.

    Raises:
        UserError: the model is not supported; lists every reason.
    """
    return map_source(source, None if has_tokenizer(source) else "byte-level", ())


def has_tokenizer(source: HFSource) -> bool:
    """Return True if the folder has a supported tokenizer."""
    try:
        source.find_tokenizer(source.config.get("vocab_size"))
    except UserError:
        return False
    return True


def hf_tokenizer_keys(path: Path) -> dict[str, Any]:
    """Return the `model.tokenizer` keys of a Hugging Face folder; empty if it has no supported tokenizer."""
    with open_source(path) as source:
        if not has_tokenizer(source):
            return {}
        return source.find_tokenizer(source.config.get("vocab_size")).keys_for(path.absolute())


def _fill(path: Path, found: TensorSource, model: nn.Module) -> None:
    wanted = local_shards(model, base_tensors(model))
    own = {name: spec for name, spec in found.specs.items() if name not in names_elsewhere(model)}
    problems = describe_differences(own, {name: shard.shape for name, shard in wanted.items()})
    if problems:
        raise UserError(
            [
                f"`{RESTORE_KEY}`: {path} does not fit the model of this configuration:",
                *truncate_lines(problems, _SHOWN, indent="  "),
                _FINETUNE,
            ]
        )
    with torch.no_grad():
        for name, shard in wanted.items():
            shard.copy_from_full(found.read(name))
