"""Run `stoker preprocess`: from inputs to `P.bin`, `P.idx` and `P.json` (P: output prefix), resumable part by part."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ...utils.durable_files import atomic_write
from ...utils.errors import EXIT_IO, UserError
from ...utils.progress import Progress
from ...utils.text import pluralize
from ..sources.indexed_tokens import MAX_METADATA_BYTES, IndexedWriter, bin_path, idx_path, token_dtype
from ..tokenizers.own_tokenizer import OwnTokenizer
from ..tokenizers.tokenizer import Tokenizer
from ..tokenizers.tokenizer_document import tokenizer_from_dict
from .input_sources import InputSource, find_sources
from .journal import TOKENIZER, Journal, parts_folder
from .partition import WorkUnit, make_units, part_bytes
from .read_documents import DAMAGED, ReadOptions, line_number
from .streams import read_stream_chunks
from .train_tokenizer import train_tokenizer
from .worker_pool import Task, WorkerPool
from .worker_process import DocumentCounts

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Job:
    """Arguments of the command.

    Attributes:
        inputs: files, folders, patterns, `hf:NAME`.
        prefix: output prefix P.
        tokenizer: the tokenizer; None trains one.
        vocab_size: of the tokenizer to train; 0 trains none.
        append_eod: end each document with EOS.
        workers: number of processes.
        stop_on_error: stop at the first document that is rejected.
        overwrite: replace an existing result.
    """

    inputs: Sequence[str]
    prefix: Path
    tokenizer: Tokenizer | None
    vocab_size: int
    reading: ReadOptions
    append_eod: bool
    workers: int
    stop_on_error: bool
    overwrite: bool


@dataclass(frozen=True, slots=True)
class PreprocessResult:
    """Result of `stoker preprocess`.

    Attributes:
        summary: the content of `P.json`.
        rejection_summary: one line for each kind of rejection, with its first location.
        already_done: the result already existed.
        resumed_parts: parts that an earlier run had finished.
    """

    summary: Mapping[str, Any]
    rejection_summary: Sequence[str]
    already_done: bool = False
    resumed_parts: int = 0


def preprocess(job: Job, log: Callable[[str], None]) -> PreprocessResult:
    """Run the command, or resume an earlier run of it.

    Raises:
        UserError: inputs, tokenizer or output are unusable; finished parts are kept, unless an input has no document.
    """
    sources = find_sources(job.inputs)
    size, chunk = part_bytes(sources)
    identity = _identity(job, sources)
    existing = _existing_outcome(job, identity)
    if existing is not None:
        return existing
    units = make_units(sources, job.reading, size)
    with Journal(job.prefix, identity, start_over=job.overwrite) as journal:
        resumed = len(journal.parts)
        if resumed:
            log(f"resuming from {journal.folder}: {pluralize(resumed, 'finished part')}")
        tokenizer = job.tokenizer or _load_or_train_tokenizer(job, sources, units, journal, log)
        if job.append_eod and tokenizer.eos_id is None:
            raise UserError(
                "the tokenizer has no end-of-document token with a usual name; set --eod-token TOKEN, "
                "or use --no-append-eod"
            )
        tally = _Work(job, sources, units, chunk, tokenizer, journal).run()
        try:
            _check_documents(tally, sources)
        except UserError:
            journal.remove()  # the same command would fail again, and its parts would refuse the corrected one
            raise
        summary = {
            "format": FORMAT,
            "tokenizer": tokenizer.to_dict(),
            "documents": tally.documents,
            "tokens": tally.tokens,
            "bytes": tally.bytes,
            "skipped": {kind: count for kind, (count, _) in sorted(tally.skipped.items())},
            "inputs": identity["inputs"],
            "options": identity["options"],
        }
        log(f"joining {pluralize(len(journal.parts), 'part')}")
        _publish(job, tokenizer, journal, summary)
    return PreprocessResult(summary, _reject_lines(tally, sources), resumed_parts=resumed)


@dataclass(eq=False)
class _Work:
    """Distribute the parts to workers and record their results in the journal."""

    job: Job
    sources: Sequence[InputSource]
    units: Sequence[WorkUnit]
    chunk: int
    tokenizer: Tokenizer
    journal: Journal
    weight: int = 0
    session: DocumentCounts = field(default_factory=DocumentCounts)

    @cached_property
    def progress(self) -> Progress:
        return Progress("tokenizing", sum(source.size for source in self.sources), "bytes")

    def run(self) -> DocumentCounts:
        """Process the unfinished parts; return the counts of all parts."""
        for number, unit in enumerate(self.units):
            self.weight += sum(span.weight for span in unit.spans) if (number, 0) in self.journal.parts else 0
            self.weight += self.sources[unit.stream].size if self._stream_is_done(number) else 0
        self.progress.resume(self.weight)
        settings = {
            "tokenizer": self.tokenizer.to_dict(),
            "imports": [type(self.tokenizer.inner).__module__] if isinstance(self.tokenizer, OwnTokenizer) else [],
            "eod_id": self.tokenizer.eos_id if self.job.append_eod else None,
            "stop": self.job.stop_on_error,
            "reading": asdict(self.job.reading),
            "paths": [source.path for source in self.sources],
            "kinds": [source.kind for source in self.sources],
        }
        with self.progress, WorkerPool(self.job.workers, settings) as pool:
            pool.run(self._tasks(), self._on_answer, self._report)
        tally = DocumentCounts()
        for key in sorted(self.journal.parts):
            tally.add(self.journal.parts[key])
        if self.job.stop_on_error and tally.skipped:  # from parts of an earlier run without `--on-error stop`
            raise UserError(_reject_lines(tally, self.sources))
        return tally

    def _stream_is_done(self, number: int) -> bool:
        count = self.journal.chunks.get(number)
        return count is not None and all((number, part) in self.journal.parts for part in range(count))

    def _tasks(self) -> Iterator[Task]:
        for number, unit in enumerate(self.units):
            if unit.stream >= 0:
                if not self._stream_is_done(number):
                    yield from self._chunks(number, unit.stream)
            elif (number, 0) not in self.journal.parts:
                spans = [(span.source, span.start, span.end) for span in unit.spans]
                yield self._task((number, 0), {"spans": spans}, None, sum(span.weight for span in unit.spans))

    def _chunks(self, number: int, source: int) -> Iterator[Task]:
        before = count = 0
        for count, chunk in enumerate(read_stream_chunks(self.sources[source], self.job.reading, self.chunk), 1):
            key = (number, count - 1)
            weight, before = chunk.consumed - before, chunk.consumed
            if chunk.damaged:
                if self.job.stop_on_error:
                    raise UserError(f"{self.sources[source].path}:{chunk.first_line}: {DAMAGED}")
                self.journal.add_damage(key, source, chunk.first_line)
            elif key in self.journal.parts:
                self.weight += weight
                self.progress.resume(weight)
            else:
                yield self._task(key, {"source": source, "first_line": chunk.first_line}, chunk.data, weight)
        self.journal.add_end(number, count)

    def _task(self, key: tuple[int, int], message: dict[str, Any], data: bytes | None, weight: int) -> Task:
        return Task(key, {**message, "prefix": str(self.journal.part_prefix(key))}, data, weight)

    def _on_answer(self, task: Task, answer: Mapping[str, Any]) -> None:
        match answer:
            case {"done": tally}:
                self.journal.add_part(task.key, tally)
                self.session.add(tally)
                self.weight += task.weight
            case {"stopped": [source, kind, place, is_offset, note]}:
                raise UserError(
                    f"{_place(self.sources[source], place, is_offset)}: {kind}{f'; {note}' if note else ''}"
                )
            case {"error": lines, "exit_code": code}:
                raise UserError(lines, code)
            case _:
                raise RuntimeError(f"a worker process failed:\n{answer.get('bug')}")

    def _report(self) -> None:
        done = min(self.weight, self.progress.total)
        self.progress.update(done, pluralize(self.session.documents, "document"))


def _identity(job: Job, sources: Sequence[InputSource]) -> dict[str, Any]:
    document = None if job.tokenizer is None else json.dumps(job.tokenizer.to_dict(), sort_keys=True)
    return {
        "format": FORMAT,
        "inputs": [source.to_dict() for source in sources],
        "options": {
            "json_key": job.reading.json_key,
            "text_lines": job.reading.text_lines,
            "append_eod": job.append_eod,
            "train_tokenizer": job.vocab_size,
        },
        "tokenizer": None if document is None else hashlib.sha256(document.encode()).hexdigest(),
    }


def _existing_outcome(job: Job, identity: Mapping[str, Any]) -> PreprocessResult | None:
    """Return the outcome of an identical earlier run; None if there is no result, or it may be replaced."""
    summary_path = metadata_path(job.prefix)
    results = [summary_path, bin_path(job.prefix), idx_path(job.prefix), tokenizer_path(job.prefix)]
    folder = next((path for path in results if path.is_dir() and not path.is_symlink()), None)
    if folder is not None:
        raise UserError(f"{folder} is a folder and is not replaced; use another --output-prefix, or remove it")
    if parts_folder(job.prefix).is_dir() or job.overwrite:
        return None
    existing = [path for path in (results if job.vocab_size else results[:3]) if os.path.lexists(path)]
    if not existing:
        return None
    if summary_path.is_file() and summary_path.stat().st_size <= MAX_METADATA_BYTES and len(existing) >= 3:
        summary: dict[str, Any] = {}
        try:
            summary = json.loads(summary_path.read_bytes())
            same_inputs = all(summary[name] == json.loads(json.dumps(identity[name])) for name in ("inputs", "options"))
            same_tokenizer = job.tokenizer is None or summary["tokenizer"] == job.tokenizer.to_dict()
        except (ValueError, KeyError, TypeError, RecursionError):
            same_inputs = same_tokenizer = False
        if same_inputs and same_tokenizer:
            return PreprocessResult(summary, [], already_done=True)
    raise UserError(f"{existing[0]} already exists, from another command; use another --output-prefix, or --overwrite")


def _load_or_train_tokenizer(
    job: Job, sources: Sequence[InputSource], units: Sequence[WorkUnit], journal: Journal, say: Callable[[str], None]
) -> Tokenizer:
    """Return the tokenizer that an earlier run has trained, or train one."""
    path = journal.folder / TOKENIZER
    if path.is_file():
        try:
            return tokenizer_from_dict(json.loads(path.read_bytes()))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: {error}; remove {journal.folder} to start over") from None
    say(f"training a byte-level BPE of {job.vocab_size:,} tokens on a sample of at most 128 MiB")
    tokenizer = train_tokenizer(job.vocab_size, sources, units, job.reading)
    _write_atomically(path, json.dumps(tokenizer.to_dict()).encode())
    return tokenizer


def _check_documents(tally: DocumentCounts, sources: Sequence[InputSource]) -> None:
    """Reject an input of which no line is usable: the key or the file is wrong."""
    lines = []
    for number, source in enumerate(sources):
        documents, rejects = tally.sources.get(str(number), [0, 0])
        if documents == 0 and rejects > 0 and not (rejects == 1 and source.kind == "text" and len(sources) > 1):
            lines.append(f"{source.path}: none of {rejects:,} is a usable document")
    if not tally.documents and not lines:
        lines = ["the inputs hold no document"]
    if lines:
        raise UserError([*lines, *_reject_lines(tally, sources)])


def _reject_lines(tally: DocumentCounts, sources: Sequence[InputSource]) -> list[str]:
    lines = []
    for kind, (count, (source, place, is_offset, *note)) in sorted(tally.skipped.items(), key=lambda item: -item[1][0]):
        hints = "".join(f"; {text}" for text in note if text)  # parts of an earlier version have no note
        lines.append(f"{kind}: {count:,}, first at {_place(sources[source], place, is_offset)}{hints}")
    return lines


def _place(source: InputSource, place: int, is_offset: bool) -> str:
    name = f"hf:{source.path}" if source.kind == "hf" else source.path
    return f"{name}:{line_number(Path(source.path), place) if is_offset else place}"


def _publish(job: Job, tokenizer: Tokenizer, journal: Journal, summary: Mapping[str, Any]) -> None:
    """Join the parts and write the results; P.json, which marks them as complete, comes last."""
    metadata_path(job.prefix).unlink(missing_ok=True)
    joining = Progress("joining", len(journal.parts), "parts")
    with joining, IndexedWriter(job.prefix, token_dtype(tokenizer.vocab_size)) as writer:
        for key in joining.over(sorted(journal.parts)):
            if journal.parts[key]["documents"]:
                writer.add_index(journal.part_prefix(key))
        writer.finish()
    if job.vocab_size:
        tokenizer_path(job.prefix).unlink(missing_ok=True)
        _write_atomically(tokenizer_path(job.prefix), tokenizer.to_dict()["definition"].encode())
    _write_atomically(metadata_path(job.prefix), json.dumps(summary, indent=1, ensure_ascii=False).encode() + b"\n")
    journal.remove()


def metadata_path(prefix: Path) -> Path:
    """Return the path of P.json, the metadata of the dataset."""
    return prefix.with_name(prefix.name + ".json")


def tokenizer_path(prefix: Path) -> Path:
    """Return the path of P-tokenizer.json, the tokenizer trained for the dataset."""
    return prefix.with_name(prefix.name + "-tokenizer.json")


def _write_atomically(path: Path, data: bytes) -> None:
    try:
        atomic_write(path, data)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", EXIT_IO) from None
