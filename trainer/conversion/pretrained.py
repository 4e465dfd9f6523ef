"""The weights that a run begins with: those of a stoker checkpoint, or of a folder of Hugging Face's as it is.

A folder is read tensor by tensor into a model that is there already; nothing is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.reader import WEIGHTS, BaseRecord, Checkpoint, base_of, find_checkpoint, read_manifest
from ..checkpoint.sharded_safetensors import files_of
from ..utils.environment import user_path
from ..utils.errors import UserError
from ..utils.local_shard import piece_of
from .from_hf import Incoming, Source, check, open_source
from .hf_folder import CONFIG, has_weights, read_object, weight_paths

KEY = "model.restore_from_path"
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """What `model.restore_from_path` names.

    Attributes:
        path: the checkpoint `step-N`, or the folder.
        checkpoint: of stoker's; None for a folder of Hugging Face's.
        complaints: damaged checkpoints that were passed over, a line for each.
    """

    path: Path
    checkpoint: Checkpoint | None
    complaints: tuple[str, ...] = ()

    @property
    def files(self) -> list[Path]:
        """That hold the weights."""
        return weight_paths(self.path) if self.checkpoint is None else self.checkpoint.weight_files

    def record(self) -> BaseRecord:
        """The path, and a hash of the files of the weights."""
        return BaseRecord(path=str(self.path.absolute()), sha256=digest_of(self))

    def load(self, model: nn.Module) -> None:
        """Copy the weights, in any dtype, into what a model has of them; all else in it stays.

        Raises:
            UserError: they do not fit the model; lists what differs.
        """
        if self.checkpoint is not None:
            self.checkpoint.load_weights(model, cast=True)
        else:
            with open_source(self.path) as source:
                _fill(self.path, source, checked(source), model)


def find_base(path: Path, key: str = KEY, *, verify: bool = True) -> BaseWeights:
    """What a path names.

    Args:
        path: a stoker checkpoint or run directory, or a folder of Hugging Face's.
        key: that named it, for messages.
        verify: compare the hashes of its files.

    Raises:
        UserError: it is neither, or an adapter, which has no weights of its own.
    """
    if is_foreign(path):
        return BaseWeights(path, None)
    if path.suffix == ".gguf":
        raise UserError(
            f"`{key}`: {path} is a GGUF file; turn it into a checkpoint first: stoker convert {path} FOLDER"
        )
    if not path.exists():
        raise UserError(
            f"`{key}`: no usable checkpoint in {path}: there is no such folder; a model of the hub comes in by "
            "`stoker convert ORG/NAME FOLDER`"
        )
    checkpoint, complaints = find_checkpoint(path, verify=verify)
    if checkpoint.is_adapter:
        base = checkpoint.state.base
        raise UserError(
            f"`{key}`: {checkpoint.path} holds an adapter"
            + (f" of {base.path}" if base else "")
            + ", not a whole model; to go on with it set model.peft.restore_from_path, or make one model of both: "
            f"stoker convert --merge {path} FOLDER"
        )
    return BaseWeights(checkpoint.path, checkpoint, tuple(complaints))


def base_of_run(path: str | None, key: str = KEY) -> BaseWeights | None:
    """`find_base` of a path that the user wrote; None for none."""
    return None if path is None else find_base(user_path(path, key), key)


def is_foreign(path: Path) -> bool:
    """Whether a path is a folder of Hugging Face's, rather than one of stoker's."""
    if not path.is_dir() or (path / "manifest.json").exists() or (path / "checkpoints").is_dir():
        return False
    if any(path.glob("step-*")):
        return False
    return has_weights(path) or "model_type" in (read_object(path, CONFIG) or {})


def digest_of(base: BaseWeights) -> str:
    """SHA-256 of the names and hashes of the files of weights: of a checkpoint those its manifest has."""
    if base.checkpoint is not None:
        records = read_manifest(base.path)
        names = files_of(WEIGHTS, records)
        return _digest((name, records[name].sha256) for name in names)
    files = ((path.name, _sha256(path)) for path in sorted(base.files))
    return _digest(files)


def check_base(base: BaseWeights, wanted: BaseRecord, adapter: Path) -> None:
    """See that weights are those that an adapter was trained on.

    Raises:
        UserError: they are others.
    """
    if digest_of(base) != wanted.sha256:
        raise UserError(
            f"{adapter} holds an adapter of {wanted.path} as it was then; the weights in {base.path} are others"
        )


@contextmanager
def foreign_keys(path: Path) -> Iterator[Incoming]:
    """A folder of Hugging Face's as a model of stoker's: its keys, its tokenizer, where its weights lie.

    Raises:
        UserError: it is none that stoker knows, with every reason.
    """
    with open_source(path) as source:
        yield checked(source)


def checked(source: Source) -> Incoming:
    """An open folder as a model of stoker's; one without a tokenizer gets bytes, which need no file.

    Raises:
        UserError: it is none that stoker knows, with every reason.
    """
    return check(source, None if has_tokenizer(source) else "byte-level", ())


def has_tokenizer(source: Source) -> bool:
    """Whether a folder has a tokenizer that stoker reads."""
    try:
        source.find_tokenizer(source.config.get("vocab_size"))
    except UserError:
        return False
    return True


def tokenizer_keys(path: Path) -> dict[str, Any]:
    """`model.tokenizer` of a folder of Hugging Face's; empty where it holds none that stoker reads."""
    with open_source(path) as source:
        if not has_tokenizer(source):
            return {}
        return source.find_tokenizer(source.config.get("vocab_size")).keys_in(path.absolute())


def _fill(path: Path, source: Source, incoming: Incoming, model: nn.Module) -> None:
    wanted = base_of(model)
    placed = {entry.ours: entry for entry in incoming.placed}
    problems = [f"{name} is missing" for name in wanted if name not in placed]
    problems += [f"{name} has no place in this model" for name in placed if name not in wanted]
    problems += [
        f"{name} is {list(placed[name].shape)}, the model needs {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in placed and tuple(tensor.shape) != tuple(placed[name].shape)
    ]
    if problems:
        more = [f"  and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise UserError(
            [
                f"`{KEY}`: {path} does not fit the model of this configuration:",
                *(f"  {problem}" for problem in problems[:_SHOWN]),
                *more,
                "leave the geometry to it: stoker finetune takes every key of the model from there",
            ]
        )
    with torch.no_grad():
        for name, tensor in wanted.items():
            piece = piece_of(tensor)
            parts = [source.tensors.read(theirs) for theirs, _ in placed[name].theirs]
            kind = parts[0].dtype
            for part in parts:
                kind = torch.promote_types(kind, part.dtype)
            whole = placed[name].join([part.to(kind) for part in parts], incoming.geometry)
            piece.local.copy_(whole[piece.start : piece.start + len(piece.local)] if piece.local.ndim else whole)


def _digest(files: Iterable[tuple[str, str]]) -> str:
    told = "".join(f"{name}:{sha256}\n" for name, sha256 in files)
    return hashlib.sha256(told.encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
