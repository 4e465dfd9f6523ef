"""Worker process: tokenizes one part after the other and writes each as an indexed dataset.

Main process and workers exchange JSON over a pipe; the bytes of a compressed input follow their message.
"""

from __future__ import annotations

import errno
import importlib
import json
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...utils.environment import disable_tokenizer_threads
from ...utils.errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_IO, UserError
from ...utils.signals import EXIT_CODES
from ..sources.indexed_tokens import IndexedWriter, token_dtype
from ..tokenizers.tokenizer import Tokenizer
from ..tokenizers.tokenizer_document import tokenizer_from_dict
from .read_documents import ReadOptions, RejectedDocument, read_chunk, read_span

_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 512, 1 << 20
_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM)


class RejectedDocumentError(Exception):
    """A rejected document under `--on-error stop`."""

    def __init__(self, source: int, reject: RejectedDocument) -> None:
        super().__init__(reject.kind)
        self.source = source
        self.reject = reject


@dataclass
class DocumentCounts:
    """Counts of a part.

    Attributes:
        documents, tokens, bytes: output counts, and the UTF-8 bytes of the text.
        skipped: kind of rejection to [count, [source, place, place is an offset, note] of the first].
        sources: number of an input (as text, for JSON) to its [documents, rejections].
    """

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped: dict[str, list[Any]] = field(default_factory=dict)
    sources: dict[str, list[int]] = field(default_factory=dict)

    def count(self, source: int, reject: RejectedDocument | None) -> None:
        """Count one document, or one rejection, of an input."""
        counts = self.sources.setdefault(str(source), [0, 0])
        counts[reject is not None] += 1
        if reject is not None:
            entry = self.skipped.setdefault(reject.kind, [0, [source, reject.place, reject.is_offset, reject.note]])
            entry[0] += 1

    def add(self, other: Mapping[str, Any]) -> None:
        """Add the counts of the next part, in the order of the documents."""
        self.documents += other["documents"]
        self.tokens += other["tokens"]
        self.bytes += other["bytes"]
        for kind, (count, first) in other["skipped"].items():
            self.skipped.setdefault(kind, [0, first])[0] += count
        for source, (documents, rejects) in other["sources"].items():
            counts = self.sources.setdefault(source, [0, 0])
            counts[0] += documents
            counts[1] += rejects


def run_worker(connection: Any) -> None:
    """Process parts until the main process closes the pipe, a `multiprocessing` Connection; settings come first.

    The worker exits immediately if its main process is killed.
    """
    threading.Thread(target=_exit_with_main, name="main", daemon=True).start()
    for number in set(EXIT_CODES) - {signal.SIGTERM}:  # they may reach all processes; the main one ends the workers
        signal.signal(number, signal.SIG_IGN)
    disable_tokenizer_threads()
    try:
        settings = json.loads(connection.recv_bytes())
        for module in settings["imports"]:
            importlib.import_module(module)
        tokenizer = tokenizer_from_dict(settings["tokenizer"])
        while True:
            task = json.loads(connection.recv_bytes())
            data = connection.recv_bytes() if task["has_data"] else None
            connection.send_bytes(json.dumps(_process_task(task, data, settings, tokenizer)).encode())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _exit_with_main() -> None:
    main = multiprocessing.parent_process()
    if main is not None:
        main.join()
        os._exit(EXIT_FAILURE)


def _process_task(
    task: Mapping[str, Any], data: bytes | None, settings: Mapping[str, Any], tokenizer: Tokenizer
) -> Any:
    try:
        return {"done": vars(_tokenize_part(task, data, settings, tokenizer))}
    except RejectedDocumentError as stop:
        reject = stop.reject
        return {"stopped": [stop.source, reject.kind, reject.place, reject.is_offset, reject.note]}
    except UserError as error:
        return {"error": error.lines, "exit_code": error.exit_code}
    except MemoryError:
        return {"error": ["out of memory; use fewer --workers"], "exit_code": EXIT_BAD_INPUT}
    except OSError as error:
        code = EXIT_IO if error.errno in _DISK_ERRNOS else EXIT_BAD_INPUT
        return {"error": [f"{error.filename or 'a file'}: {error.strerror or error}"], "exit_code": code}
    except Exception:
        return {"bug": traceback.format_exc()}


def _tokenize_part(
    task: Mapping[str, Any], data: bytes | None, settings: Mapping[str, Any], tokenizer: Tokenizer
) -> DocumentCounts:
    tally = DocumentCounts()
    end = np.array([] if settings["eod_id"] is None else [settings["eod_id"]], np.int64)
    texts: list[str] = []
    buffered_characters = 0
    with IndexedWriter(Path(task["prefix"]), token_dtype(tokenizer.vocab_size)) as writer:

        def flush() -> None:
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                writer.add_document(np.concatenate([ids, end.astype(ids.dtype)]))
                tally.bytes += len(text) if text.isascii() else len(text.encode())
            texts.clear()

        for source, found in _documents(task, data, settings, tokenizer):
            if isinstance(found, RejectedDocument):
                if settings["stop"]:
                    raise RejectedDocumentError(source, found)
                tally.count(source, found)
                continue
            tally.count(source, None)
            texts.append(found)
            buffered_characters += len(found)
            if len(texts) >= _BATCH_DOCUMENTS or buffered_characters >= _BATCH_CHARACTERS:
                flush()
                buffered_characters = 0
        flush()
        writer.finish()
        tally.documents, tally.tokens = writer.documents, writer.tokens
    return tally


def _documents(
    task: Mapping[str, Any], data: bytes | None, settings: Mapping[str, Any], tokenizer: Tokenizer
) -> Iterator[tuple[int, str | RejectedDocument]]:
    reading = ReadOptions(**(settings["reading"] | {"limit_words": tokenizer.limits_words}))
    if data is not None:
        for found in read_chunk(data, task["first_line"], reading):
            yield task["source"], found
        return
    for source, start, end in task["spans"]:
        for found in read_span(Path(settings["paths"][source]), settings["kinds"][source], start, end, reading):
            yield source, found
