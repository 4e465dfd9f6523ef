"""Tensors in safetensors files by rows: each rank writes its part, any number of ranks reads what it needs.

One process writes `model.safetensors`; rank r of R writes `model-0000r-of-0000R.safetensors`, in whose header
`__metadata__.rows` holds, as JSON, name -> [first row, rows of the whole tensor] of every tensor that is not whole.
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

from ..utils.local_shard import Piece
from ..utils.safetensors_io import (
    TENSOR_DTYPES,
    DamagedFileError,
    FileRecord,
    TensorFacts,
    open_tensors,
    tensor_dtype_name,
    write_tensors,
)

_NUMBERED = re.compile(r"(?P<kind>[a-z]+)(-(?P<rank>\d{5})-of-(?P<ranks>\d{5}))?\.safetensors")


def file_name(kind: str, rank: int, world_size: int) -> str:
    """The name of a rank's file of a kind: model, optimizer or ema."""
    return f"{kind}.safetensors" if world_size == 1 else f"{kind}-{rank:05}-of-{world_size:05}.safetensors"


def files_of(kind: str, names: Iterable[str]) -> list[str]:
    """The files of a kind among names, by rank; empty where there is none, or where the set is not complete."""
    found = [match for name in sorted(names) if (match := _NUMBERED.fullmatch(name)) and match["kind"] == kind]
    if not found:
        return []
    ranks = int(found[0]["ranks"] or 1)
    expected = [file_name(kind, rank, ranks) for rank in range(ranks)]
    return expected if [match[0] for match in found] == expected else []


def write_pieces(path: Path, pieces: Mapping[str, Piece]) -> FileRecord:
    """Write this rank's share of the rows of every tensor; see `Piece.share`."""
    shares = {name: piece.share() for name, piece in pieces.items()}
    written = {name: share for name, share in shares.items() if share.rows}
    rows = {
        name: [share.start, share.rows]
        for name, share in written.items()
        if share.local.ndim and share.local.shape[0] != share.rows
    }
    metadata = {"rows": json.dumps(rows, separators=(",", ":"))} if rows else None
    return write_tensors(path, {name: share.local for name, share in written.items()}, metadata)


@dataclass(frozen=True, slots=True)
class _Found:
    """Rows of a tensor in a file."""

    file: Any
    start: int
    count: int


def read_pieces(paths: Collection[Path], wanted: Mapping[str, Piece], *, any_dtype: bool = False) -> None:
    """Fill every piece, in place, from the files that hold its rows.

    Args:
        paths: all files of a kind.
        wanted: name to rows; together the files must hold exactly these tensors, whole.
        any_dtype: do not compare dtypes; values are converted.

    Raises:
        DamagedFileError: not safetensors files, or rows missing or twice.
        ValueError: other names, shapes or dtypes; one line for each of the first ten.
    """
    with ExitStack() as stack:
        found, described = _open(paths, stack)
        problems = _differences(described, wanted, any_dtype)
        if problems:
            raise ValueError("\n".join(problems))
        for name, piece in wanted.items():
            _check_cover(name, found[name], piece.rows)
            _fill(name, piece, found[name])


class WholeTensors:
    """The tensors of all files of a kind, whole, one at a time.

    Attributes:
        facts: name to dtype and shape.
    """

    def __init__(self, found: Mapping[str, list[_Found]], facts: Mapping[str, TensorFacts]) -> None:
        self._found = found
        self.facts = facts

    def read(self, name: str) -> Tensor:
        """A tensor in host memory.

        Raises:
            DamagedFileError: rows of it are missing or there twice.
        """
        of = self.facts[name]
        parts = self._found[name]
        if of.shape:
            _check_cover(name, parts, of.shape[0])
        if len(parts) == 1:
            return parts[0].file.get_tensor(name)
        return torch.cat([part.file.get_tensor(name) for part in sorted(parts, key=lambda part: part.start)])


class Overlaid:
    """The tensors of some files, those of others instead where these have them.

    Attributes:
        facts: name to dtype and shape, of the tensor that is read.
    """

    def __init__(self, below: WholeTensors, above: WholeTensors) -> None:
        self._below, self._above = below, above
        self.facts = {**below.facts, **above.facts}

    def read(self, name: str) -> Tensor:
        """A tensor in host memory; errors as in `WholeTensors.read`."""
        return (self._above if name in self._above.facts else self._below).read(name)


@contextmanager
def open_whole(paths: Collection[Path]) -> Iterator[WholeTensors]:
    """Open all files of a kind; what they hold is known from their headers.

    Raises:
        DamagedFileError: not safetensors files, or of a dtype that no checkpoint has.
    """
    with ExitStack() as stack:
        found, described = _open(paths, stack)
        facts: dict[str, TensorFacts] = {}
        for name, (shape, dtype) in described.items():
            if dtype not in TENSOR_DTYPES:
                raise DamagedFileError(f"{name} is of dtype {dtype}")
            facts[name] = TensorFacts(TENSOR_DTYPES[dtype], shape)
        yield WholeTensors(found, facts)


def _open(
    paths: Collection[Path], stack: ExitStack
) -> tuple[dict[str, list[_Found]], dict[str, tuple[tuple[int, ...], str]]]:
    """The rows of each tensor by file, and the shape and dtype of the whole, from the headers."""
    found: dict[str, list[_Found]] = {}
    described: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in paths:
        file = stack.enter_context(open_tensors(path))
        rows = _rows(path, file)
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            shape, dtype = tuple(part.get_shape()), part.get_dtype()
            start, whole = rows.get(name, (0, shape[0] if shape else 1))
            found.setdefault(name, []).append(_Found(file, start, shape[0] if shape else 1))
            facts = (whole, *shape[1:]) if shape else (), dtype
            if described.setdefault(name, facts) != facts:
                raise DamagedFileError(f"{path.name}: {name} is not what the other files say")
    return found, described


def _fill(name: str, piece: Piece, parts: list[_Found]) -> None:
    if not piece.local.ndim:
        piece.local.copy_(parts[0].file.get_tensor(name))
        return
    end = piece.start + piece.local.shape[0]
    for part in parts:
        first, last = max(piece.start, part.start), min(end, part.start + part.count)
        if first < last:
            rows = part.file.get_slice(name)[first - part.start : last - part.start]
            piece.local[first - piece.start : last - piece.start].copy_(rows)


def _check_cover(name: str, parts: list[_Found], rows: int) -> None:
    position = 0
    for part in sorted(parts, key=lambda part: (part.start, part.count)):
        if part.start != position:
            raise DamagedFileError(f"rows {position} to {part.start} of {name} are missing or there twice")
        position += part.count
    if position != rows:
        raise DamagedFileError(f"{name} has {position} rows in all files instead of {rows}")


def _rows(path: Path, file: Any) -> dict[str, tuple[int, int]]:
    try:
        document = json.loads((file.metadata() or {}).get("rows", "{}"))
        return {name: (int(start), int(whole)) for name, (start, whole) in document.items()}
    except (ValueError, TypeError, AttributeError):
        raise DamagedFileError(f"{path.name}: the rows in its header cannot be read") from None


def _differences(
    found: Mapping[str, tuple[tuple[int, ...], str]], wanted: Mapping[str, Piece], any_dtype: bool
) -> list[str]:
    lines = [f"{name} is missing" for name in wanted if name not in found]
    lines += [f"{name} has no place in this model" for name in found if name not in wanted]
    for name, piece in wanted.items():
        if name not in found:
            continue
        expected = piece.shape, found[name][1] if any_dtype else tensor_dtype_name(piece.local)
        if found[name] != expected:
            lines.append(f"{name} is {_describe(*found[name])}, the model needs {_describe(*expected)}")
    return lines if len(lines) <= 10 else [*lines[:10], f"and {len(lines) - 10} more"]


def _describe(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype.lower()} {list(shape)}"


def on_host(pieces: Mapping[str, Piece]) -> dict[str, Piece]:
    """Copies of this rank's shares in host memory, which training does not change while they are written."""
    shares = {name: piece.share() for name, piece in pieces.items()}
    copies: dict[str, Piece] = {}
    for name, share in shares.items():
        if share.rows:
            host = torch.empty_like(share.local, device="cpu", pin_memory=share.local.is_cuda)
            host.copy_(share.local, non_blocking=True)
            copies[name] = share.of(host)
    if any(share.local.is_cuda for share in shares.values()):
        torch.cuda.synchronize()
    return copies
