"""Hugging Face model folders: config.json and tensors, treated as untrusted input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.hf.config_fields import format_value
from ..checkpoint.hf_files import WEIGHT_FILES, read_object, resolve_in_folder
from ..utils.errors import UserError
from ..utils.safetensors_io import TENSOR_DTYPES, DamagedFileError, TensorSpec, open_safetensors
from .torch_files import TorchFile

_ROWS = 1024


@dataclass(frozen=True, slots=True)
class FolderTensors:
    """Tensors of a folder, by canonical name.

    Attributes:
        unsupported_dtypes: name to dtype of tensors with an unsupported dtype.
        readers: name to a function that returns the tensor, or reads its slices.
    """

    specs: Mapping[str, TensorSpec]
    unsupported_dtypes: Mapping[str, str]
    readers: Mapping[str, Callable[[], Any]]

    def read(self, name: str) -> Tensor:
        """Read a tensor to host memory; it may be memory-mapped."""
        return self.readers[name]()[...]

    def are_equal(self, one: str, other: str) -> bool:
        """Return True if two tensors are bitwise equal; compares a few rows at a time."""
        if self.specs[one] != self.specs[other]:
            return False
        left, right = self.readers[one](), self.readers[other]()
        shape = self.specs[one].shape
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
                    raise UserError(
                        f"{folder}: {format_value(name)} occurs twice, in {found[known]} and in {path.name}"
                    )
                found[known] = path.name
                readers[known] = lambda file=file, name=name: file.slice_of(name)
                if dtype in TENSOR_DTYPES:
                    facts[known] = TensorSpec(TENSOR_DTYPES[dtype], shape)
                else:
                    unreadable[known] = dtype
        absent = sorted(name for name in index if canonical(name) not in found)
        if absent:
            raise UserError(f"{folder}: the index lists {join_names(absent, 3)}, which the files do not contain")
        yield FolderTensors(facts, unreadable, readers)


def weight_paths(folder: Path) -> list[Path]:
    """Return the weight files of a folder.

    Raises:
        UserError: no weights, or an invalid index.
    """
    return _files(folder)[0]


def join_names(names: Sequence[str], limit: int) -> str:
    """Join untrusted names with commas, the first `limit` of them."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(format_value, names[:limit])) + more


def _files(folder: Path) -> tuple[list[Path], Sequence[str]]:
    """Return the weight files, and the tensor names listed in the index."""
    for stem, ending in WEIGHT_FILES:
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
    expected = " or ".join(f"{stem}{ending}" for stem, ending in WEIGHT_FILES)
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
