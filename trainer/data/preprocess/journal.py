"""Folder of finished parts, with a journal that lists them and identifies the command.

The journal is JSON lines, each flushed to disk: first the identity of the command, then a line for each finished part.
An incomplete last line, from a process killed while writing, is dropped.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from ...utils.errors import EXIT_IO, UserError
from ...utils.owned_files import check_owned, make_owned_directory, open_owned
from ..sources.indexed_tokens import bin_path, idx_path
from .read_documents import DAMAGED, RejectedDocument
from .worker_process import DocumentCounts

_JOURNAL, _LOCK, TOKENIZER = "journal.jsonl", "lock", "tokenizer.json"
_MAX_LINE = 256 << 20
PartKey = tuple[int, int]


class Journal:
    """The folder `P.parts` of one command, locked while it is open.

    Args:
        prefix: the output prefix P.
        identity: inputs and options, JSON; parts with another identity cannot be reused.
        start_over: drop the parts of another command, instead of raising.

    Attributes:
        folder: location of the parts.
        parts: finished parts and their counts.
        chunks: the number of chunks of each compressed input that was read to its end.

    Raises:
        UserError: the folder belongs to another command, is in use, is or holds a link, or cannot be written.
    """

    def __init__(self, prefix: Path, identity: Mapping[str, Any], *, start_over: bool) -> None:
        self.folder = parts_folder(prefix)
        self.parts: dict[PartKey, dict[str, Any]] = {}
        self.chunks: dict[int, int] = {}
        with ExitStack() as opened:
            try:
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                make_owned_directory(self.folder.parent, self.folder.name)
                check_owned(self.folder, _JOURNAL, _LOCK, TOKENIZER)
                self._lock = opened.enter_context(self._open(_LOCK, os.O_WRONLY | os.O_CREAT, "wb"))
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                valid_bytes = self._read(json.loads(json.dumps(identity)), start_over)
                self._remove_unfinished()
                self._file = opened.enter_context(self._open(_JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, "ab"))
                self._file.truncate(valid_bytes)
                if valid_bytes == 0:
                    self._write({"command": identity})
            except BlockingIOError:
                raise UserError(f"{self.folder} is in use by another stoker preprocess") from None
            except OSError as error:
                raise UserError(f"cannot write {self.folder}: {error.strerror}", EXIT_IO) from None
            self._opened = opened.pop_all()

    def _open(self, name: str, flags: int, mode: str) -> IO[bytes]:
        return os.fdopen(open_owned(self.folder, name, flags), mode)

    def part_prefix(self, key: PartKey) -> Path:
        """Return the output prefix of a part."""
        return self.folder / f"{key[0]:07d}-{key[1]:07d}"

    def add_part(self, key: PartKey, tally: Mapping[str, Any]) -> None:
        """Record a finished part."""
        self.parts[key] = dict(tally)
        self._write({"part": list(key), **tally})

    def add_damage(self, key: PartKey, source: int, line: int) -> None:
        """Record that a compressed input is unreadable from a line on, as a part without data."""
        if key not in self.parts:
            counts = DocumentCounts()
            counts.count(source, RejectedDocument(DAMAGED, line))
            self.add_part(key, vars(counts))

    def add_end(self, unit: int, chunks: int) -> None:
        """Record that a compressed input was read to its end."""
        self.chunks[unit] = chunks
        self._write({"end": [unit, chunks]})

    def remove(self) -> None:
        """Remove the folder, when all is done."""
        self._file.close()
        shutil.rmtree(self.folder)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.folder.is_dir() and not self._is_worth_keeping(self.parts.values()):
            self.remove()  # it would only refuse the corrected command
        self._opened.close()

    def _is_worth_keeping(self, entries: Iterable[Mapping[str, Any]]) -> bool:
        """Return True if a part holds documents, or a tokenizer was trained."""
        return (self.folder / TOKENIZER).exists() or any(entry.get("documents") for entry in entries)

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, identity: Any, start_over: bool) -> int:
        """Read the journal; return the number of its valid bytes."""
        entries, valid_bytes = _entries(self.folder / _JOURNAL)
        if not entries:
            return 0
        if entries[0].get("command") != identity:
            if start_over or not self._is_worth_keeping(entries):
                (self.folder / TOKENIZER).unlink(missing_ok=True)
                return 0
            raise UserError(
                f"{self.folder} holds parts of another command ({_difference(entries[0].get('command'), identity)}); "
                "run that command again to resume, or add --overwrite to start over"
            )
        for entry in entries[1:]:
            if "part" in entry:
                key = tuple(entry.pop("part"))
                prefix = self.part_prefix(key)
                if entry["documents"] == 0 or (bin_path(prefix).is_file() and idx_path(prefix).is_file()):
                    self.parts[key] = entry
            elif "end" in entry:
                unit, chunks = entry["end"]
                self.chunks[unit] = chunks
        return valid_bytes

    def _remove_unfinished(self) -> None:
        prefixes = [self.part_prefix(key) for key in self.parts]
        kept = {_JOURNAL, _LOCK, TOKENIZER, *(path.name for one in prefixes for path in (bin_path(one), idx_path(one)))}
        for path in self.folder.iterdir():
            if path.name not in kept and path.is_file():
                path.unlink()


def parts_folder(prefix: Path) -> Path:
    """Return the folder of the parts of an output prefix."""
    return prefix.with_name(prefix.name + ".parts")


def _entries(path: Path) -> tuple[list[dict[str, Any]], int]:
    entries: list[dict[str, Any]] = []
    valid_bytes = 0
    if path.is_file():
        with path.open("rb") as file:
            while (line := file.readline(_MAX_LINE)).endswith(b"\n"):
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):
                    break
                if not isinstance(entry, dict):
                    break
                entries.append(entry)
                valid_bytes += len(line)
    return entries, valid_bytes


def _difference(before: Any, now: Any) -> str:
    """Describe the first difference between two identities."""
    if not isinstance(before, dict):
        return "its journal is of another version"
    for name, value in now["options"].items():
        was = before.get("options", {}).get(name)
        if was != value:
            return f"{name} was {was}, now {value}"
    for was, is_now in zip(before.get("inputs", []), now["inputs"], strict=False):
        if was != is_now:
            return f"{is_now['path']} was changed" if was["path"] == is_now["path"] else "other inputs"
    return "other inputs" if before.get("inputs") != now["inputs"] else "another tokenizer"
