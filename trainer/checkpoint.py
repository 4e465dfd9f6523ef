"""Checkpoints: a directory `step-N` of safetensors and JSON that is there completely or not at all.

    step-1000/
        model.safetensors      the parameters, by name
        optimizer.safetensors  parameter name + .main (fp32 main weight), .exp_avg, .exp_avg_sq
        state.json             step, consumed samples, seed, data fingerprint, validation loss, versions
        config.json            the configuration document
        tokenizer.json         the tokenizer document
        manifest.json          size and SHA-256 of every other file

It is written as `step-N.tmp-*` beside its final place, every file flushed to the disk, then renamed. Reading starts at
the manifest: a checkpoint is valid when every file has the recorded size and hash.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationError
from torch import Tensor, nn

from ..models.config.block import Block
from .errors import EXIT_IO, UserError
from .optim import AdamW
from .safe_io import (
    DamagedFileError,
    FileRecord,
    check_file,
    read_json,
    read_tensors,
    sync_directory,
    write_json,
    write_tensors,
)

FORMAT = 1
WEIGHTS, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
CONFIG, TOKENIZER, MANIFEST = "config.json", "tokenizer.json", "manifest.json"
_FILES = frozenset({WEIGHTS, OPTIMIZER, STATE, CONFIG, TOKENIZER})
_NAME = re.compile(r"step-(\d{1,15})")
_TEMPORARY = re.compile(r"step-\d{1,15}\.tmp-.*")


class RunState(Block):
    """What `state.json` holds: where a run stands, and what must be the same for it to go on exactly."""

    step: int = Field(ge=0)
    """Completed optimizer steps."""
    consumed_samples: int = Field(ge=0)
    """Samples trained on; the position in the data."""
    val_loss: float | None = None
    """Validation loss at this step, in nats per token; None where it was not measured."""
    seed: int
    """`model.seed`."""
    global_batch_size: int
    """Samples per step."""
    micro_batch_size: int
    """Samples per forward pass; dropout masks depend on it."""
    sequence_length: int
    """Tokens per sample."""
    precision: str
    """The precision plan, in words."""
    optimizer: dict[str, str | int | float | None]
    """Settings of optimizer and schedule."""
    data_fingerprint: str
    """Identity of the training data."""
    versions: dict[str, str]
    """Versions of what computes: stoker, torch, Python."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint directory whose files were verified by `open_checkpoint`."""

    path: Path
    state: RunState

    @property
    def config_document(self) -> dict[str, Any]:
        """The configuration document of the run that wrote it."""
        return _object(self.path / CONFIG)

    @property
    def tokenizer_document(self) -> dict[str, Any]:
        """The document its tokenizer is rebuilt from."""
        return _object(self.path / TOKENIZER)

    def load_weights(self, model: nn.Module, *, cast: bool = False) -> None:
        """Copy the weights into a model of the same geometry.

        Args:
            model: filled in place.
            cast: accept other dtypes than the model's, and convert.

        Raises:
            UserError: the weights do not fit the model; lists what differs.
        """
        self._fill(WEIGHTS, dict(model.named_parameters()), cast=cast)

    def load_optimizer(self, optimizer: AdamW) -> None:
        """Copy main weights and moments into an optimizer over a model with the same parameters.

        Raises:
            UserError: the tensors do not fit the optimizer; lists what differs.
        """
        self._fill(OPTIMIZER, optimizer.tensors())
        optimizer.step_count = self.state.step

    def _fill(self, file: str, destination: Mapping[str, Tensor], *, cast: bool = False) -> None:
        try:
            with torch.no_grad():
                for name, tensor in read_tensors(self.path / file, destination, any_dtype=cast):
                    destination[name].copy_(tensor)
        except ValueError as error:
            raise UserError(
                [
                    f"checkpoint {self.path} does not fit the model of this configuration:",
                    *(f"  {line}" for line in str(error).splitlines()),
                    f"use the geometry and precision it was trained with: {self.path / CONFIG}",
                ]
            ) from None


def write_checkpoint(
    directory: Path,
    state: RunState,
    *,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    config_document: Mapping[str, Any],
    tokenizer_document: Mapping[str, Any],
) -> Path:
    """Write `directory/step-N` so that it exists completely or not at all, whatever happens in between.

    Returns:
        The path of the new checkpoint.

    Raises:
        UserError: the disk is full, read-only or not ours (exit code 74); older checkpoints are untouched.
    """
    final = directory / f"step-{state.step}"
    temporary = directory / f"{final.name}.tmp-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        temporary.mkdir()
        records = {
            WEIGHTS: write_tensors(temporary / WEIGHTS, weights),
            OPTIMIZER: write_tensors(temporary / OPTIMIZER, optimizer),
            STATE: write_json(temporary / STATE, state.model_dump()),
            CONFIG: write_json(temporary / CONFIG, dict(config_document)),
            TOKENIZER: write_json(temporary / TOKENIZER, dict(tokenizer_document)),
        }
        files = {name: {"size": record.size, "sha256": record.sha256} for name, record in records.items()}
        write_json(temporary / MANIFEST, {"format": FORMAT, "files": files})
        sync_directory(temporary)
        # Only a damaged or an equal checkpoint of the same step can be in the way: newer valid ones are resumed from.
        replaced = _set_aside(final)
        temporary.rename(final)
        sync_directory(directory)
        _remove(replaced)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        complete = checkpoint_paths(directory)
        raise UserError(
            [
                f"cannot write checkpoint {final}: {error.strerror or error}",
                f"the newest checkpoint on disk is {complete[-1]}" if complete else "there is no older checkpoint",
            ],
            EXIT_IO,
        ) from error
    return final


def open_checkpoint(path: Path, *, with_optimizer: bool = True) -> Checkpoint:
    """Verify the files of a checkpoint directory and read its state.

    Args:
        path: a directory `step-N`.
        with_optimizer: verify the optimizer's file too, the largest; False where it is not going to be read.

    Raises:
        DamagedFileError: a file is missing, changed or not what it should be.
    """
    if not path.is_dir():
        raise DamagedFileError(f"{path} is not a directory")
    records = _read_manifest(path / MANIFEST)
    for name, record in records.items():
        if with_optimizer or name != OPTIMIZER:
            check_file(path / name, record)
    try:
        state = RunState.model_validate(read_json(path / STATE))
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedFileError(f"{STATE}: `{'.'.join(map(str, first['loc']))}`: {first['msg']}") from None
    return Checkpoint(path, state)


def newest_checkpoint(directory: Path, *, with_optimizer: bool = True) -> tuple[Checkpoint | None, list[str]]:
    """The valid checkpoint with the most steps in a directory, and one line for each damaged one passed over."""
    complaints: list[str] = []
    for path in reversed(checkpoint_paths(directory)):
        try:
            return open_checkpoint(path, with_optimizer=with_optimizer), complaints
        except DamagedFileError as error:
            complaints.append(f"{path} is damaged ({error}); using the one before it")
    return None, complaints


def find_checkpoint(path: Path, *, with_optimizer: bool = False) -> tuple[Checkpoint, list[str]]:
    """The checkpoint a user means by a path: a `step-N` directory, a directory of them, or a run directory.

    Returns:
        The checkpoint and one line for each damaged one that was passed over.

    Raises:
        UserError: there is none, or the one that was named is damaged.
    """
    if _NAME.fullmatch(path.name) or (path / MANIFEST).exists():
        try:
            return open_checkpoint(path, with_optimizer=with_optimizer), []
        except DamagedFileError as error:
            raise UserError(f"checkpoint {path} cannot be used: {error}") from None
    complaints: list[str] = []
    for directory in (path, path / "checkpoints"):
        checkpoint, found = newest_checkpoint(directory, with_optimizer=with_optimizer)
        complaints += found
        if checkpoint is not None:
            return checkpoint, complaints
    raise UserError([f"no usable checkpoint in {path}: give a run directory or a `step-N` directory", *complaints])


def checkpoint_paths(directory: Path) -> list[Path]:
    """The `step-N` directories in a directory, valid or not, by ascending step."""
    try:
        entries = list(directory.iterdir())
    except OSError:
        return []
    numbered = [(int(match[1]), path) for path in entries if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove what interrupted saves left; only while no other process writes there."""
    leftovers = [path for path in directory.glob("step-*") if _TEMPORARY.fullmatch(path.name)]
    for path in leftovers:
        _remove(path)
    return leftovers


def is_kept(candidate: RunState, others: list[RunState], *, save_top_k: int, save_last: bool) -> bool:
    """Whether a checkpoint survives among others: the best `save_top_k` do (-1: all), and the newest with `save_last`.

    A lower validation loss is better; a checkpoint without one ranks last, and a newer one before an older one.
    """
    if save_top_k == -1 or (save_last and all(candidate.step >= other.step for other in others)):
        return True
    return sum(_rank(other) < _rank(candidate) for other in others) < save_top_k


def apply_retention(directory: Path, *, save_top_k: int, save_last: bool) -> list[Path]:
    """Delete the checkpoints that are not kept (see `is_kept`); those whose state cannot be read are left alone.

    Returns:
        The paths that were deleted.
    """
    states: dict[Path, RunState] = {}
    for path in checkpoint_paths(directory):
        try:
            states[path] = RunState.model_validate(read_json(path / STATE))
        except (DamagedFileError, ValidationError):
            continue
    doomed = [
        path
        for path, state in states.items()
        if not is_kept(
            state,
            [other for other in states.values() if other is not state],
            save_top_k=save_top_k,
            save_last=save_last,
        )
    ]
    for path in doomed:
        _remove(_set_aside(path))
    return doomed


def _rank(state: RunState) -> tuple[float, int]:
    return (float("inf") if state.val_loss is None else state.val_loss, -state.step)


def _set_aside(path: Path) -> Path:
    """Rename a checkpoint, if there is one, so that a half-deleted one is never mistaken for one; returns the name."""
    aside = path.with_name(f"{path.name}.tmp-old-{os.getpid()}")
    if path.exists() or path.is_symlink():
        _remove(aside)
        path.rename(aside)
    return aside


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _read_manifest(path: Path) -> dict[str, FileRecord]:
    document = read_json(path, as_written=True)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DamagedFileError(f"{MANIFEST} is not of format {FORMAT}")
    files = document.get("files")
    if not isinstance(files, dict) or files.keys() != _FILES:
        raise DamagedFileError(f"{MANIFEST} does not list exactly {', '.join(sorted(_FILES))}")
    records: dict[str, FileRecord] = {}
    for name, entry in files.items():
        match entry:
            case {"size": int(size), "sha256": str(sha256)}:
                records[name] = FileRecord(size, sha256)
            case _:
                raise DamagedFileError(f"{MANIFEST} has no size and hash of {name}")
    return records


def _object(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path)
    except DamagedFileError as error:
        raise UserError(f"checkpoint {path.parent} cannot be used: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"checkpoint {path.parent} cannot be used: {path.name} is not a JSON object")
    return document
