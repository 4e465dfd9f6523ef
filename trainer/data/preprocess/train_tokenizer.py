"""Train a byte-level BPE tokenizer on a sample of the documents."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...utils.errors import UserError
from ..tokenizers.tokenizer import has_long_word
from ..tokenizers.tokenizer_json import JsonTokenizer, build_json_tokenizer, canonical_json
from .input_sources import InputSource
from .partition import WorkUnit
from .read_documents import ReadOptions, RejectedDocument, read_span
from .streams import read_stream

SAMPLE_BYTES = 128 << 20
"""Maximum text that a tokenizer is trained on: an equal share from the beginning of each work unit."""
MIN_VOCAB_SIZE = 257
"""256 bytes and the end-of-document token."""
MAX_VOCAB_SIZE = 1 << 20
END_OF_DOCUMENT = "<|endoftext|>"
_MAX_WORD_LENGTH = 4096


def train_tokenizer(
    vocab_size: int, sources: Sequence[InputSource], units: Sequence[WorkUnit], reading: ReadOptions
) -> JsonTokenizer:
    """Train a byte-level BPE as in GPT-2 (its pre-tokenizer, no normalization), with `<|endoftext|>` as id 0.

    Args:
        vocab_size: maximum vocabulary size; a small text gives a smaller one.

    Raises:
        UserError: the sample contains no document.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    found = 0
    first: RejectedDocument | None = None

    def sample() -> Iterator[str]:
        nonlocal found, first
        for unit in units:
            remaining = SAMPLE_BYTES // len(units)
            for document in _documents(unit, sources, reading):
                if isinstance(document, RejectedDocument):
                    first = first or document
                    continue
                data = document[:remaining].encode()[:remaining]
                found += 1
                yield _cut_words(data.decode(errors="ignore"))  # a character may be cut at the end
                remaining -= len(data)
                if remaining <= 0:
                    break

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(), trainer)
    if not found:
        reason = "".join(f"; {text}" for text in (first.kind, first.note) if text) if first else ""
        raise UserError(f"--train-tokenizer: the sample of the inputs holds no document{reason}")
    return build_json_tokenizer(canonical_json(tokenizer.to_str()), {})


def _cut_words(text: str) -> str:
    """Cut words that are too long: the trainer's time grows with the square of their length."""
    if not has_long_word(text, _MAX_WORD_LENGTH):
        return text
    return re.sub(rf"(\S{{{_MAX_WORD_LENGTH}}})|\S+", lambda match: match[0] + " " * (match[1] is not None), text)


def _documents(
    unit: WorkUnit, sources: Sequence[InputSource], reading: ReadOptions
) -> Iterator[str | RejectedDocument]:
    if unit.stream >= 0:
        yield from read_stream(sources[unit.stream], reading)
    for span in unit.spans:
        source = sources[span.source]
        yield from read_span(Path(source.path), source.kind, span.start, span.end, reading)
