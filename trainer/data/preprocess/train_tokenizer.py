"""A byte-level BPE trained on a sample of the documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ...utils.errors import UserError
from ..tokenizers.tokenizer_json import JsonTokenizer, canonical, define
from .inputs import Source
from .partition import Unit
from .read_documents import Reading, Reject
from .streams import documents_of_stream
from .worker_process import documents_of_span

SAMPLE_BYTES = 128 << 20
"""Text that a tokenizer is trained on, at most: the same share from the beginning of each part of the inputs."""
SMALLEST_VOCABULARY = 257
"""256 bytes and the end-of-document token."""
LARGEST_VOCABULARY = 1 << 20
END_OF_DOCUMENT = "<|endoftext|>"


def train_tokenizer(
    vocab_size: int, sources: Sequence[Source], units: Sequence[Unit], reading: Reading
) -> JsonTokenizer:
    """GPT-2's kind of tokenizer (bytes, its splitting into words, no normalisation), with `<|endoftext|>` as id 0.

    Args:
        vocab_size: tokens to have at most; a small text gives fewer.
        sources: the inputs.
        units: their parts.
        reading: how documents are written.

    Raises:
        UserError: the sample holds no document.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    found = 0
    first: Reject | None = None

    def sample() -> Iterator[str]:
        nonlocal found, first
        for unit in units:
            left = SAMPLE_BYTES // len(units)
            for document in _documents(unit, sources, reading):
                if isinstance(document, Reject):
                    first = first or document
                    continue
                data = document[:left].encode()[:left]
                found += 1
                yield data.decode(errors="ignore")  # a character may be cut at the end
                left -= len(data)
                if left <= 0:
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
        told = "".join(f"; {text}" for text in (first.kind, first.note) if text) if first else ""
        raise UserError(f"--train-tokenizer: the sample of the inputs holds no document{told}")
    return define(canonical(tokenizer.to_str()), {})


def _documents(unit: Unit, sources: Sequence[Source], reading: Reading) -> Iterator[str | Reject]:
    if unit.stream >= 0:
        yield from documents_of_stream(sources[unit.stream], reading)
    for span in unit.spans:
        source = sources[span.source]
        yield from documents_of_span(Path(source.path), source.kind, span.start, span.end, reading)
