"""Hugging Face model folders: config.json and tensors, treated as untrusted input."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.hf.config_fields import shown
from ..utils.errors import UserError
from ..utils.safetensors_io import TENSOR_DTYPES, DamagedFileError, TensorSpec, open_safetensors, read_json
from .torch_files import TorchFile

CONFIG = "config.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_KINDS = (("model", ".safetensors"), ("pytorch_model", ".bin"))
"""Weight file names, in order of preference."""
_ROWS = 1024


def resolve_in_folder(folder: Path, name: str) -> Path | None:
    """Resolve a file name in a folder; None if there is no such file.

    Symlinks may point to files in the folder, and from a snapshot of the hub cache to its blobs.

    Raises:
        UserError: not a plain file name, or a link that points elsewhere.
    """
    if not _FILE_NAME.fullmatch(name):
        raise UserError(f"{folder}: {name[:80]!r} is not the plain name of a file")
    path = (folder / name).resolve()
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
    try:
        document = read_json(path)
    except DamagedFileError as error:
        raise UserError(f"{folder}: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"{folder / name} must hold a JSON object")
    return document


class FolderTensors:
    """Tensors of a folder, by canonical name.

    Attributes:
        facts: name to dtype and shape.
        unsupported_dtypes: name to dtype of tensors with an unsupported dtype.
    """

    def __init__(
        self,
        facts: Mapping[str, TensorSpec],
        unreadable: Mapping[str, str],
        readers: Mapping[str, Callable[[], Any]],
    ) -> None:
        self.facts = facts
        self.unsupported_dtypes = unreadable
        self._readers = readers

    def read(self, name: str) -> Tensor:
        """Read a tensor to host memory; it may be memory-mapped."""
        return self._readers[name]()[...]

    def are_equal(self, one: str, other: str) -> bool:
        """Return True if two tensors are bitwise equal; compares a few rows at a time."""
        if self.facts[one] != self.facts[other]:
            return False
        left, right = self._readers[one](), self._readers[other]()
        shape = self.facts[one].shape
        rows = shape[0] if shape else 1
        for start in range(0, rows, _ROWS):
            part = slice(start, start + _ROWS) if shape else ...
            if not torch.equal(_bits(left[part]), _bits(right[part])):
                return False
        return True


@dataclass(frozen=True, slots=True)
class _File:
    """An open tensor file: shape and dtype name of each tensor, and access by slice."""

    described: Mapping[str, tuple[tuple[int, ...], str]]
    slice_of: Callable[[str], Any]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def open_folder_tensors(folder: Path, canonical: Callable[[str], str]) -> Iterator[FolderTensors]:
    """Open the tensors of a folder: one file, or several listed in an index.

    Args:
        folder: Hugging Face model folder.
        canonical: maps names in the files to canonical names.

    Raises:
        UserError: no weights, an invalid index, or a malformed file.
    """
    paths, index = _files(folder)
    facts: dict[str, TensorSpec] = {}
    unreadable: dict[str, str] = {}
    readers: dict[str, Callable[[], Any]] = {}
    found: dict[str, str] = {}
    with ExitStack() as stack:
        for path in paths:
            file = _open(path, folder, stack)
            for name, (shape, dtype) in file.described.items():
                known = canonical(name)
                if known in found:
                    raise UserError(f"{folder}: {shown(name)} occurs twice, in {found[known]} and in {path.name}")
                found[known] = path.name
                readers[known] = lambda file=file, name=name: file.slice_of(name)
                if dtype in TENSOR_DTYPES:
                    facts[known] = TensorSpec(TENSOR_DTYPES[dtype], shape)
                else:
                    unreadable[known] = dtype
        absent = sorted(name for name in index if canonical(name) not in found)
        if absent:
            raise UserError(f"{folder}: the index lists {_few(absent)}, which the files do not contain")
        yield FolderTensors(facts, unreadable, readers)


def has_weights(folder: Path) -> bool:
    """Return True if a folder holds weight files."""
    names = [f"{stem}{ending}{more}" for stem, ending in _KINDS for more in ("", ".index.json")]
    return any((folder / name).exists() for name in names)


def weight_paths(folder: Path) -> list[Path]:
    """Return the weight files of a folder.

    Raises:
        UserError: no weights, or an invalid index.
    """
    return _files(folder)[0]


def _few(names: Sequence[str]) -> str:
    return ", ".join(map(shown, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _files(folder: Path) -> tuple[list[Path], Sequence[str]]:
    """Return the weight files, and the tensor names listed in the index."""
    for stem, ending in _KINDS:
        whole = resolve_in_folder(folder, f"{stem}{ending}")
        if whole is not None:
            return [whole], ()
        index = read_object(folder, f"{stem}{ending}.index.json")
        if index is None:
            continue
        weight_map = index.get("weight_map")
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(isinstance(name, str) for name in weight_map.values())
        ):
            raise UserError(f"{folder}: {stem}{ending}.index.json has no `weight_map` from tensors to files")
        paths: list[Path] = []
        for name in sorted(set(weight_map.values())):
            path = resolve_in_folder(folder, name) if name.endswith(ending) else None
            if path is None:
                raise UserError(f"{folder}: the index lists {name[:80]!r}, which is not a {ending} file in this folder")
            paths.append(path)
        return paths, tuple(weight_map)
    expected = " or ".join(f"{stem}{ending}" for stem, ending in _KINDS)
    raise UserError(f"{folder} holds no weights: no {expected}, and no index of them")


def _open(path: Path, folder: Path, stack: ExitStack) -> _File:
    if path.suffix == ".bin" or (path.parent.name == "blobs" and _is_torch(path)):
        file = TorchFile(path)
        return _File(file.described, file.tensor)
    try:
        opened = stack.enter_context(open_safetensors(path))
    except DamagedFileError as error:
        raise UserError(f"{folder}: {error}") from None
    described: dict[str, tuple[tuple[int, ...], str]] = {}
    for name in opened.keys():  # noqa: SIM118
        part = opened.get_slice(name)
        described[name] = tuple(part.get_shape()), part.get_dtype()
    return _File(described, lambda name: _LazyTensor(opened, name))


def _is_torch(path: Path) -> bool:
    """Return True if a hub cache blob is a torch file, by its magic bytes: a zip archive, or a legacy pickle."""
    with path.open("rb") as file:
        return file.read(2) in (b"PK", b"\x80\x02")


@dataclass(frozen=True, slots=True)
class _LazyTensor:
    """Lazily read tensor of a safetensors file."""

    file: Any
    name: str

    def __getitem__(self, part: Any) -> Tensor:
        if part is ...:
            return self.file.get_tensor(self.name)
        return self.file.get_slice(self.name)[part]
