"""Sharded safetensors: each rank writes its rows of every tensor; any number of ranks can read them (resharding).

A single process writes `model.safetensors`; rank r of R writes `model-0000r-of-0000R.safetensors`, whose header holds
in `__metadata__.rows`, as JSON, name -> [first row, rows of the full tensor] for every sharded tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..utils.local_shard import LocalShard
from ..utils.safetensors_io import (
    TENSOR_DTYPES,
    DamagedFileError,
    FileRecord,
    TensorSpec,
    open_safetensors,
    tensor_dtype_name,
    write_safetensors,
)
from ..utils.text import truncate_lines

_FILE_NAME = re.compile(r"(?P<kind>[a-z]+)(-(?P<rank>\d{5})-of-(?P<ranks>\d{5}))?\.safetensors")


def shard_file_name(kind: str, rank: int, world_size: int) -> str:
    """Return the file name of a rank's shard; `kind` is model, optimizer or ema."""
    return f"{kind}.safetensors" if world_size == 1 else f"{kind}-{rank:05}-of-{world_size:05}.safetensors"


def shard_files(kind: str, names: Iterable[str]) -> list[str]:
    """Return the files of a kind among names, by rank; empty if there are none or the set is incomplete."""
    found = [match for name in sorted(names) if (match := _FILE_NAME.fullmatch(name)) and match["kind"] == kind]
    if not found:
        return []
    ranks = int(found[0]["ranks"] or 1)
    expected = [shard_file_name(kind, rank, ranks) for rank in range(ranks)]
    return expected if [match[0] for match in found] == expected else []


def write_shards(path: Path, shards: Mapping[str, LocalShard]) -> FileRecord:
    """Write this rank's share of the rows of every tensor, see `LocalShard.part_to_save`."""
    shares = {name: shard.part_to_save() for name, shard in shards.items()}
    written = {name: share for name, share in shares.items() if share.num_rows}
    rows = {
        name: [share.first_row, share.num_rows]
        for name, share in written.items()
        if share.local.ndim and share.local.shape[0] != share.num_rows
    }
    metadata = {"rows": json.dumps(rows, separators=(",", ":"))} if rows else None
    return write_safetensors(path, {name: share.local for name, share in written.items()}, metadata)


@dataclass(frozen=True, slots=True)
class _RowRange:
    """Row range of a tensor in a file."""

    file: Any
    start: int
    count: int


def read_shards(paths: Collection[Path], shards: Mapping[str, LocalShard], *, cast: bool = False) -> None:
    """Load every local shard in place from the files that hold its rows.

    Args:
        paths: all files of a kind.
        shards: local shards by name; the files together must hold exactly these tensors, in full.
        cast: convert values of other dtypes instead of raising.

    Raises:
        DamagedFileError: a file is not safetensors, or rows are missing or duplicated.
        ValueError: names, shapes or dtypes differ; one line for each of the first ten.
    """
    with ExitStack() as stack:
        found, described = _read_headers(paths, stack)
        problems = _differences(described, shards, cast)
        if problems:
            raise ValueError("\n".join(problems))
        for name, shard in shards.items():
            _check_complete(name, found[name], shard.num_rows)
            _load_shard(name, shard, found[name])


class FullTensors:
    """Read access to the full tensors of sharded files, one at a time.

    Attributes:
        specs: dtype and shape by name.
    """

    def __init__(self, found: Mapping[str, list[_RowRange]], specs: Mapping[str, TensorSpec]) -> None:
        self._found = found
        self.specs = specs

    def read(self, name: str) -> Tensor:
        """Read a full tensor into host memory.

        Raises:
            DamagedFileError: rows of it are missing or duplicated.
        """
        shape = self.specs[name].shape
        parts = self._found[name]
        if shape:
            _check_complete(name, parts, shape[0])
        if len(parts) == 1:
            return parts[0].file.get_tensor(name)
        return torch.cat([part.file.get_tensor(name) for part in sorted(parts, key=lambda part: part.start)])


class OverlaidTensors:
    """The tensors of `base`, overridden by those of `override`.

    Attributes:
        specs: dtype and shape by name, of the tensor that is read.
    """

    def __init__(self, base: FullTensors, override: FullTensors) -> None:
        self._base, self._override = base, override
        self.specs = {**base.specs, **override.specs}

    def read(self, name: str) -> Tensor:
        """Read a full tensor into host memory; errors as in `FullTensors.read`."""
        return (self._override if name in self._override.specs else self._base).read(name)


@contextmanager
def open_full_tensors(paths: Collection[Path]) -> Iterator[FullTensors]:
    """Open all files of a kind for reading full tensors; only the headers are read at first.

    Raises:
        DamagedFileError: a file is not safetensors, or a dtype is not supported.
    """
    with ExitStack() as stack:
        found, described = _read_headers(paths, stack)
        specs: dict[str, TensorSpec] = {}
        for name, (shape, dtype) in described.items():
            if dtype not in TENSOR_DTYPES:
                raise DamagedFileError(f"{name} is of dtype {dtype}")
            specs[name] = TensorSpec(TENSOR_DTYPES[dtype], shape)
        yield FullTensors(found, specs)


def _read_headers(
    paths: Collection[Path], stack: ExitStack
) -> tuple[dict[str, list[_RowRange]], dict[str, tuple[tuple[int, ...], str]]]:
    """Read the headers: the row ranges of each tensor by file, and shape and dtype of the full tensor."""
    found: dict[str, list[_RowRange]] = {}
    described: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in paths:
        file = stack.enter_context(open_safetensors(path))
        rows = _read_row_metadata(path, file)
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            shape, dtype = tuple(part.get_shape()), part.get_dtype()
            start, whole = rows.get(name, (0, shape[0] if shape else 1))
            found.setdefault(name, []).append(_RowRange(file, start, shape[0] if shape else 1))
            specs = (whole, *shape[1:]) if shape else (), dtype
            if described.setdefault(name, specs) != specs:
                raise DamagedFileError(f"{path.name}: shape or dtype of {name} differs from the other files")
    return found, described


def _load_shard(name: str, shard: LocalShard, parts: list[_RowRange]) -> None:
    if not shard.local.ndim:
        shard.local.copy_(parts[0].file.get_tensor(name))
        return
    end = shard.first_row + shard.local.shape[0]
    for part in parts:
        first, last = max(shard.first_row, part.start), min(end, part.start + part.count)
        if first < last:
            rows = part.file.get_slice(name)[first - part.start : last - part.start]
            shard.local[first - shard.first_row : last - shard.first_row].copy_(rows)


def _check_complete(name: str, parts: list[_RowRange], rows: int) -> None:
    position = 0
    for part in sorted(parts, key=lambda part: (part.start, part.count)):
        if part.start != position:
            raise DamagedFileError(f"rows {position} to {part.start} of {name} are missing or duplicated")
        position += part.count
    if position != rows:
        raise DamagedFileError(f"{name} has {position} rows in all files instead of {rows}")


def _read_row_metadata(path: Path, file: Any) -> dict[str, tuple[int, int]]:
    try:
        document = json.loads((file.metadata() or {}).get("rows", "{}"))
        return {name: (int(start), int(whole)) for name, (start, whole) in document.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise DamagedFileError(f"{path.name}: the rows in its header cannot be read") from None


def _differences(
    found: Mapping[str, tuple[tuple[int, ...], str]], wanted: Mapping[str, LocalShard], any_dtype: bool
) -> list[str]:
    lines = [f"{name} is missing" for name in wanted if name not in found]
    lines += [f"{name} does not exist in this model" for name in found if name not in wanted]
    for name, shard in wanted.items():
        if name not in found:
            continue
        expected = shard.shape, found[name][1] if any_dtype else tensor_dtype_name(shard.local)
        if found[name] != expected:
            lines.append(f"{name} is {_describe(*found[name])}, the model needs {_describe(*expected)}")
    return truncate_lines(lines, 10)


def _describe(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype.lower()} {list(shape)}"


def copy_to_host(shards: Mapping[str, LocalShard]) -> dict[str, LocalShard]:
    """Copy this rank's shares to host memory, for writing while training continues."""
    shares = {name: shard.part_to_save() for name, shard in shards.items()}
    copies: dict[str, LocalShard] = {}
    for name, share in shares.items():
        if share.num_rows:
            host = torch.empty_like(share.local, device="cpu", pin_memory=share.local.is_cuda)
            host.copy_(share.local, non_blocking=True)
            copies[name] = share.with_local(host)
    if any(share.local.is_cuda for share in shares.values()):
        torch.cuda.synchronize()
    return copies
