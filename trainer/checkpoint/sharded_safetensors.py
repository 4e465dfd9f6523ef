"""Sharded safetensors: each rank writes its rows of every tensor; any number of ranks can read them (resharding).

A single process writes `model.safetensors`; rank r of R writes `model-0000r-of-0000R.safetensors`, whose header holds
in `__metadata__.rows`, as JSON, for every sharded tensor by name one of

- [first row, rows of the full tensor]: consecutive rows,
- [[first row, number of rows, ...], rows of the full tensor]: several ranges, two numbers for each (fused weights),
- [[first row, number of rows, ...], rows, first column, columns of the full tensor]: some columns of such rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..utils.local_shard import LocalShard, whole_shard
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
_MAX_RANGES = 256
"""Row ranges of a tensor in a file: one for each projection of a fused weight."""
_MAX_SIZE = 1 << 63


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
    """Write this rank's share of every tensor, see `LocalShard.part_to_save`."""
    shares = {name: shard.part_to_save() for name, shard in shards.items()}
    written = {name: share for name, share in shares.items() if share.num_rows}
    rows = {
        name: _row_entry(share)
        for name, share in written.items()
        if share.local.ndim and tuple(share.local.shape) != share.shape
    }
    metadata = {"rows": json.dumps(rows, separators=(",", ":"))} if rows else None
    return write_safetensors(path, {name: share.local for name, share in written.items()}, metadata)


def _row_entry(share: LocalShard) -> list[Any]:
    """Return the entry of `__metadata__.rows`."""
    if share.columns is None and len(share.rows) == 1:
        return [share.rows[0].first, share.num_rows]
    ranges = [number for rows in share.rows for number in (rows.first, rows.size)]
    return [ranges, share.num_rows, *(share.columns or ())]


class _FilePart(NamedTuple):
    """Part of a tensor in a file: ranges of rows, and a range of columns or None for all."""

    file: Any
    rows: Sequence[tuple[int, int]]
    columns: tuple[int, int] | None


def read_shards(
    paths: Collection[Path], shards: Mapping[str, LocalShard], *, cast: bool = False, elsewhere: Set[str] = frozenset()
) -> None:
    """Load every local shard in place from the files that hold its rows.

    Args:
        paths: all files of a kind.
        shards: local shards by name; the files together must hold exactly these tensors, in full.
        cast: convert values of other dtypes instead of raising.
        elsewhere: names of parameters that other ranks read, with all their tensors (`NAME` and `NAME.KEY`).

    Raises:
        DamagedFileError: a file is not safetensors, or a part of a tensor is missing or duplicated.
        ValueError: names, shapes or dtypes differ; one line for each of the first ten.
    """
    with ExitStack() as stack:
        found, described = _read_headers(paths, stack)
        own = {name: each for name, each in described.items() if elsewhere.isdisjoint((name, name.rpartition(".")[0]))}
        problems = _differences(own, shards, cast)
        if problems:
            raise ValueError("\n".join(problems))
        for name, shard in shards.items():
            _check_complete(name, found[name], shard.shape)
            _load_shard(name, shard, found[name])


class FullTensors:
    """Read access to the full tensors of sharded files, one at a time.

    Attributes:
        specs: dtype and shape by name.
    """

    def __init__(self, found: Mapping[str, list[_FilePart]], specs: Mapping[str, TensorSpec]) -> None:
        self._found = found
        self.specs = specs

    def read(self, name: str) -> Tensor:
        """Read a full tensor into host memory.

        Raises:
            DamagedFileError: a part of it is missing or duplicated.
        """
        spec, parts = self.specs[name], self._found[name]
        _check_complete(name, parts, spec.shape)
        if len(parts) == 1:
            return parts[0].file.get_tensor(name)
        full = torch.empty(spec.shape, dtype=spec.dtype)
        _load_shard(name, whole_shard(full), parts)
        return full


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
) -> tuple[dict[str, list[_FilePart]], dict[str, tuple[tuple[int, ...], str]]]:
    """Read the headers: the part of each tensor in each file, and shape and dtype of the full tensor."""
    found: dict[str, list[_FilePart]] = {}
    described: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in paths:
        file = stack.enter_context(open_safetensors(path))
        entries = _read_row_metadata(path, file)
        for name in file.keys():  # noqa: SIM118
            stored = file.get_slice(name)
            shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
            part, full = _FilePart(file, ((0, shape[0] if shape else 1),), None), shape
            if name in entries and shape:
                try:
                    rows, columns, full = _parse_entry(entries[name], shape)
                except (ValueError, TypeError, LookupError):
                    raise DamagedFileError(f"{path.name}: the rows of {name} in its header do not fit") from None
                part = _FilePart(file, rows, columns)
            found.setdefault(name, []).append(part)
            if described.setdefault(name, (full, dtype)) != (full, dtype):
                raise DamagedFileError(f"{path.name}: shape or dtype of {name} differs from the other files")
    return found, described


def _parse_entry(
    entry: Any, shape: tuple[int, ...]
) -> tuple[Sequence[tuple[int, int]], tuple[int, int] | None, tuple[int, ...]]:
    """Return row ranges, column range and full shape of an entry of `__metadata__.rows`, for a stored `shape`.

    Raises:
        ValueError, TypeError, LookupError: the entry is malformed, or does not fit the stored shape.
    """
    ranges, num_rows, *columns = entry
    if not isinstance(ranges, list):  # almost all entries
        if columns or not type(ranges) is type(num_rows) is int or not 0 <= ranges <= num_rows - shape[0] < _MAX_SIZE:
            raise ValueError
        return ((ranges, shape[0]),), None, (num_rows, *shape[1:])
    rows = list(zip(ranges[::2], ranges[1::2], strict=True))
    if len(rows) > _MAX_RANGES or {type(number) for number in (*ranges, num_rows, *columns)} != {int}:
        raise ValueError
    position = 0
    for first, count in rows:
        if first < position or count < 0:
            raise ValueError
        position = first + count
    if not position <= num_rows < _MAX_SIZE or sum(ranges[1::2]) != shape[0]:
        raise ValueError
    if not columns:
        return rows, None, (num_rows, *shape[1:])
    first_column, num_columns = columns
    if not 0 <= first_column <= num_columns - shape[1] < _MAX_SIZE:
        raise ValueError
    return rows, (first_column, shape[1]), (num_rows, num_columns, *shape[2:])


def _load_shard(name: str, shard: LocalShard, parts: list[_FilePart]) -> None:
    """Copy what the files hold of a shard; only that is read."""
    if not shard.local.ndim:
        shard.local.copy_(parts[0].file.get_tensor(name))
        return
    wanted = [(start - rows.first, rows.first, rows.first + rows.size) for start, rows in shard.local_ranges()]
    for part in parts:
        offset = 0
        for first, size in part.rows:
            for shift, low, high in wanted:
                start, end = max(low, first), min(high, first + size)
                if start < end:
                    stored = slice(start - first + offset, end - first + offset)
                    _load_rows(name, shard, shard.local[start + shift : end + shift], part, stored)
            offset += size


def _load_rows(name: str, shard: LocalShard, local: Tensor, part: _FilePart, stored: slice) -> None:
    """Copy stored rows of a part, and of them the columns of the shard, into rows of the shard."""
    source = part.file.get_slice(name)
    if shard.columns is None and part.columns is None:
        local.copy_(source[stored])
        return
    own, size = shard.columns.first if shard.columns else 0, local.shape[1]
    first, stored_size = part.columns or (0, shard.shape[1])
    start, end = max(own, first), min(own + size, first + stored_size)
    if start < end:
        local[:, start - own : end - own].copy_(source[stored, start - first : end - first])


def _check_complete(name: str, parts: list[_FilePart], shape: tuple[int, ...]) -> None:
    """Check that the parts in all files are the full tensor, each element once.

    One partition is saved at a time, so parts have the same columns or none in common: first the columns must be
    complete, then the rows of each range of columns.

    Raises:
        DamagedFileError: a part is missing or duplicated.
    """
    rows_of: dict[tuple[int, int] | None, list[tuple[int, int]]] = {}
    for part in parts:
        has_all = part.columns is not None and part.columns == (0, shape[1])
        rows_of.setdefault(None if has_all else part.columns, []).extend(part.rows)
    if set(rows_of) != {None}:
        _check_ranges(f"columns {{}} of {name}", (each or (0, shape[1]) for each in rows_of), shape[1])
    for columns, rows in rows_of.items():
        where = "" if columns is None else f", columns {columns[0]} to {sum(columns)},"
        _check_ranges(f"rows {{}}{where} of {name}", rows, shape[0] if shape else 1)


def _check_ranges(what: str, ranges: Iterable[tuple[int, int]], size: int) -> None:
    position = 0
    for first, count in sorted((*(each for each in ranges if each[1]), (size, 0))):
        if first != position:
            low, high = sorted((first, position))
            state = "missing" if first > position else "duplicated"
            raise DamagedFileError(f"{what.format(f'{low} to {high}')} are {state}")
        position += count


def _read_row_metadata(path: Path, file: Any) -> dict[str, Any]:
    try:
        return dict(json.loads((file.metadata() or {}).get("rows", "{}")).items())
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
        stored = TENSOR_DTYPES.get(found[name][1])
        same_kind = stored is not None and stored.is_floating_point == shard.local.is_floating_point()
        expected = shard.shape, found[name][1] if any_dtype and same_kind else tensor_dtype_name(shard.local)
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
