"""Recognize Hugging Face model and PEFT folders, and read their JSON files; treated as untrusted input."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ..utils.errors import UserError
from .checkpoint_paths import RESOLVED_CONFIG

CONFIG = "config.json"
ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
WEIGHT_FILES = (("model", ".safetensors"), ("pytorch_model", ".bin"))
"""Weight file names, in order of preference."""


def resolve_in_folder(folder: Path, name: str) -> Path | None:
    """Resolve a file name in a folder; None if there is no such file.

    Symlinks may point to files in the folder, and from a snapshot of the hub cache to its blobs.

    Raises:
        UserError: not a plain file name, or a link that points elsewhere.
    """
    if not _FILE_NAME.fullmatch(name):
        raise UserError(f"{folder}: {name[:80]!r} is not the plain name of a file")
    try:
        path = (folder / name).resolve()
    except (OSError, RuntimeError):  # RuntimeError before Python 3.13
        raise UserError(f"{folder / name} is a link that leads back to itself; replace it by the file") from None
    if not path.exists():
        return None
    top = folder.resolve()
    allowed = [top, *([top.parent.parent / "blobs"] if top.parent.name == "snapshots" else [])]
    if not any(path.is_relative_to(directory) for directory in allowed):
        raise UserError(
            f"{folder / name} is a link that leads out of its folder; replace it by the file if that is intended"
        )
    if not path.is_file():
        raise UserError(f"{folder / name} is not a file")
    return path


def read_object(folder: Path, name: str) -> dict[str, Any] | None:
    """Read a JSON object; None if there is no such file.

    Raises:
        UserError: not a JSON object, or too large.
    """
    path = resolve_in_folder(folder, name)
    if path is None:
        return None
    from ..utils.safetensors_io import DamagedFileError, read_json  # imports torch

    try:
        document = read_json(path)
    except DamagedFileError as error:
        raise UserError(f"{folder}: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"{folder / name} must hold a JSON object")
    return document


def has_weights(folder: Path) -> bool:
    """Return True if a folder holds weight files."""
    names = [f"{stem}{ending}{more}" for stem, ending in WEIGHT_FILES for more in ("", ".index.json")]
    return any((folder / name).exists() for name in names)


def has_checkpoints(folder: Path) -> bool:
    """Return True if a folder is a stoker checkpoint, even one without its manifest, holds some, or is a run's."""
    files = (folder / name for name in ("manifest.json", "state.json", RESOLVED_CONFIG))
    return any(map(os.path.lexists, files)) or (folder / "checkpoints").is_dir() or any(folder.glob("step-*"))


def is_hf_folder(path: Path) -> bool:
    """Return True for a Hugging Face model folder."""
    if not path.is_dir() or has_checkpoints(path):
        return False
    return has_weights(path) or "model_type" in (read_object(path, CONFIG) or {})


def is_model_folder(path: Path) -> bool:
    """Return True if a path may hold a model: a stoker run or checkpoint, or a Hugging Face or PEFT folder."""
    return path.is_dir() and (has_checkpoints(path) or is_hf_folder(path) or is_peft_folder(path))


def check_pretrained_path(path: Path, key: str) -> None:
    """Check that the path of pretrained weights exists and is not a GGUF file.

    Raises:
        UserError: it does not, or is.
    """
    if path.suffix == ".gguf":
        raise UserError(
            f"`{key}`: {path} is a GGUF file; convert it to a checkpoint first: stoker convert {path} FOLDER"
        )
    if not path.exists():
        raise UserError(
            f"`{key}`: no usable checkpoint in {path}: there is no such folder; import a Hugging Face hub model with "
            "`stoker convert ORG/NAME FOLDER`"
        )


def missing_model_hint(path: Path) -> str:
    """Return the hint to show for a path that holds no stoker checkpoint."""
    if not path.exists():
        return "there is no such folder"
    if is_peft_folder(path):
        return (
            "it is an adapter in peft format; set model.peft.restore_from_path to it, or convert it to a checkpoint: "
            f"stoker convert {path} FOLDER"
        )
    if is_hf_folder(path):
        return f"it is a Hugging Face model; convert it to a checkpoint: stoker convert {path} FOLDER"
    return "give a run directory or a `step-N` directory"


def is_peft_folder(path: Path) -> bool:
    """Return True for a folder in peft format."""
    return path.is_dir() and (path / ADAPTER_CONFIG).exists()
