"""Divide the inputs into work units: the same units in the same order for any number of workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .input_sources import InputSource
from .read_documents import ReadOptions, open_parquet

_SMALLEST_PART, _SMALLEST_CHUNK, _LARGEST_CHUNK = 32 << 20, 16 << 20, 256 << 20
_TARGET_PARTS = 4096
_MAX_SPANS = 10_000
_COMPRESSED = ("jsonl.gz", "jsonl.zst", "hf")


@dataclass(frozen=True, slots=True)
class Span:
    """A range of one input.

    Attributes:
        source: index of the input.
        start, end: byte range of a file, or row groups of a parquet file.
        weight: bytes of the file, for progress.
    """

    source: int
    start: int
    end: int
    weight: int


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """A part that a worker reads by itself, or an input that must be read sequentially.

    Attributes:
        spans: the ranges that the worker reads, in order; empty for an input that is read in the main process.
        stream: the index of that input; -1 if there are spans.
    """

    spans: tuple[Span, ...] = ()
    stream: int = -1


def part_bytes(sources: Sequence[InputSource]) -> tuple[int, int]:
    """Return the size of a part of a plain file and of a chunk of a compressed one: about 4,096 for large inputs."""
    share = sum(source.size for source in sources if source.kind != "hf") // _TARGET_PARTS
    return max(_SMALLEST_PART, share), min(max(_SMALLEST_CHUNK, share), _LARGEST_CHUNK)


def make_units(sources: Sequence[InputSource], reading: ReadOptions, size: int) -> list[WorkUnit]:
    """Return all work units, in the order of the documents.

    Args:
        size: bytes of a part; small files share one.

    Raises:
        UserError: a parquet file cannot be read.
    """
    units: list[WorkUnit] = []
    pending: list[Span] = []
    weight = 0

    def close() -> None:
        nonlocal weight
        if pending:
            units.append(WorkUnit(tuple(pending)))
            pending.clear()
            weight = 0

    for number, source in enumerate(sources):
        if source.kind in _COMPRESSED:
            close()
            units.append(WorkUnit(stream=number))
            continue
        for span in _spans(number, source, reading, size):
            pending.append(span)
            weight += span.weight
            if weight >= size or len(pending) >= _MAX_SPANS:
                close()
    close()
    return units


def _spans(number: int, source: InputSource, reading: ReadOptions, size: int) -> Iterator[Span]:
    if source.kind == "parquet":
        groups = open_parquet(Path(source.path), reading.json_key).metadata.num_row_groups
        for group in range(groups):
            yield Span(number, group, group + 1, source.size // groups)
    elif source.kind == "text" and not reading.text_lines:
        yield Span(number, 0, source.size, source.size)
    else:
        for start in range(0, source.size, size):
            end = min(start + size, source.size)
            yield Span(number, start, end, end - start)
