"""Samples from memory-mapped token ids: shuffled documents, cut into windows across their boundaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import UserError
from ..sources.index_cache import Arrays, IndexCache
from ..sources.indexed_tokens import IndexedReader
from .samples import Batch, pad_windows, philox_generator, position_range, shift_labels
from .shuffle import sequential_indices, shuffled_indices

_EPOCHS_KEPT = 2
"""A sample at the end of an epoch continues in the next."""


class DocumentRange:
    """Documents `first` to `last - 1` of an indexed dataset; their tokens are contiguous.

    Args:
        first, last: documents.
        vocab_size: ids must be below it; checked whenever they are read, so that a wrong tokenizer is never trained on.

    Attributes:
        begin, tokens: offset of the documents in `reader.ids`, and their number of tokens.
    """

    def __init__(self, reader: IndexedReader, first: int, last: int, vocab_size: int) -> None:
        self.reader = reader
        self.first = first
        self.documents = last - first
        self.vocab_size = vocab_size
        if self.documents:
            self.begin = int(reader.document_starts(first, first)[0])
            self.tokens = int(reader.document_starts(last, last)[0]) - self.begin
        else:
            self.begin = self.tokens = 0

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """Return ids `begin` to `end - 1`, counted from the start of the dataset.

        Raises:
            UserError: an id is not in the vocabulary.
        """
        ids = self.reader.ids[begin:end]
        check_ids(ids, self.vocab_size, self.reader, begin)
        return ids


def check_ids(ids: NDArray[Any], vocab_size: int, reader: IndexedReader, begin: int) -> None:
    """Check that ids are in the vocabulary; `begin` is the position of the first one in the dataset.

    Raises:
        UserError: one is not; the message gives the dataset, the id and its position.
    """
    unsigned = ids.dtype.kind == "u"
    if len(ids) and not (ids.max() < vocab_size and (unsigned or ids.min() >= 0)):
        wrong = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        raise UserError(
            f"{reader.prefix}.bin holds token id {int(ids[wrong])} at position {begin + wrong:,}, but the tokenizer "
            f"has {vocab_size:,} tokens; `model.tokenizer` must be the one that made the data"
        )


@dataclass(eq=False)
class MappedTraining:
    """Endless samples of a range of documents, by position.

    The epochs are concatenated into one endless token stream, each with its documents in a new permutation. The stream
    is cut into windows of S tokens whose labels are the next tokens, so each token is a label exactly once per epoch
    (except the very first). A window belongs to the epoch in which it begins; the windows of an epoch are in random
    order. Position p belongs to epoch p * S // tokens.

    Attributes:
        source: the documents; at least one token.
        sequence_length: S, tokens in a sample.
        seed: of the permutations.
        rng_stream: random stream of the dataset in a blend.
        shuffle_documents: False keeps the order of the file; the windows are still in random order.
        cache: stores the index arrays.
        cache_key: identifies the tokens, such as their hash.
    """

    source: DocumentRange
    sequence_length: int
    seed: int
    _: KW_ONLY
    rng_stream: int = 0
    shuffle_documents: bool = True
    cache: IndexCache | None = None
    cache_key: str = ""

    def __post_init__(self) -> None:
        if self.source.tokens < 1:
            raise ValueError("`source` (0 tokens) must hold at least one token")
        self.samples = -(-self.source.tokens // self.sequence_length)
        self._epochs: dict[int, Arrays] = {}
        self._cache = self.cache or IndexCache(None)

    def batch(self, first: int, count: int) -> Batch:
        """Return the training samples at positions `first` to `first + count - 1`, counted from 0."""
        windows = np.empty((count, self.sequence_length + 1), np.int64)
        for row, position in enumerate(position_range(first, count)):
            self._fill(windows[row], int(position))
        return shift_labels(windows)

    def _fill(self, window: NDArray[np.int64], position: int) -> None:
        epoch = position * self.sequence_length // self.source.tokens
        index = self._epoch(epoch)
        rank, offset = map(int, index["starts"][index["visit"][position - self._first_window(epoch)]])
        filled = 0
        while filled < len(window):
            if rank == self.source.documents:
                epoch, rank = epoch + 1, 0
                index = self._epoch(epoch)
            document = self.source.first + int(index["order"][rank])
            begin, end = self.source.reader.document_span(document)
            ids = self.source.read(begin + offset, min(end, begin + offset + len(window) - filled))
            window[filled : filled + len(ids)] = ids
            filled += len(ids)
            rank, offset = rank + 1, 0

    def _first_window(self, epoch: int) -> int:
        return -(-epoch * self.source.tokens // self.sequence_length)

    def _epoch(self, epoch: int) -> Arrays:
        """Return the index arrays of an epoch.

        `order`: the documents in order, [documents]. `starts`: rank of the document in which each window begins, and
        the offset in it, int64 [windows, 2]. `visit`: the windows in sampling order, [windows].
        """
        if epoch not in self._epochs:
            windows = self._first_window(epoch + 1) - self._first_window(epoch)
            key = {
                "format": 2,
                "data": self.cache_key,
                "documents": [self.source.first, self.source.documents],
                "sequence_length": self.sequence_length,
                "seed": self.seed,
                "part": self.rng_stream,
                "shuffle_documents": self.shuffle_documents,
                "epoch": epoch,
            }
            layout = {
                "order": (_index_dtype(self.source.documents), (self.source.documents,)),
                "starts": (np.dtype(np.int64), (windows, 2)),
                "visit": (_index_dtype(windows), (windows,)),
            }
            arrays = self._cache.arrays(key, layout, lambda: self._make_epoch(epoch, windows))
            while len(self._epochs) >= _EPOCHS_KEPT:
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = arrays
        return self._epochs[epoch]

    def _make_epoch(self, epoch: int, windows: int) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield the rows of the index arrays of an epoch, in chunks."""
        documents = self.source.documents
        if self.shuffle_documents:
            orders = shuffled_indices(lambda: philox_generator(self.seed, epoch, 2 * self.rng_stream), documents)
        else:
            orders = sequential_indices(documents)
        rank, begin, window = 0, epoch * self.source.tokens, self._first_window(epoch)
        for order in orders:
            yield "order", order
            lengths = self.source.reader.document_lengths(order + self.source.first)
            ends = begin + np.cumsum(lengths)
            end = int(ends[-1]) if len(ends) else begin
            last = -(-end // self.sequence_length)
            offsets = np.arange(window, last) * self.sequence_length
            ranks = np.searchsorted(ends, offsets, side="right")
            yield "starts", np.stack([rank + ranks, offsets - (ends - lengths)[ranks]], axis=1)
            rank, begin, window = rank + len(order), end, last
        for visit in shuffled_indices(lambda: philox_generator(self.seed, epoch, 2 * self.rng_stream + 1), windows):
            yield "visit", visit

    def __getstate__(self) -> dict[str, Any]:
        # A worker rebuilds the index arrays, or maps them from the cache: they may be larger than all other state.
        return {**self.__dict__, "_epochs": {}}


class MappedEvaluation:
    """Ranges of tokens cut into consecutive windows: each token but the first of a range is a label exactly once.

    As in `EvaluationWindows` all windows are in a fixed random order, independent of the seed of the run, so that the
    first k are a fair sample of the whole.

    Args:
        sources: the ranges; those of fewer than two tokens are ignored.
        sequence_length: S, tokens in a sample.
        pad_id: pads the last window of each range; its labels are ignored.

    Raises:
        ValueError: no range has two tokens.
    """

    def __init__(self, sources: Sequence[DocumentRange], sequence_length: int, pad_id: int = 0) -> None:
        self.sources = [source for source in sources if source.tokens > 1]
        if not self.sources:
            raise ValueError("`sources` must have a range of at least 2 tokens")
        self.sequence_length = sequence_length
        counts = [-(-(source.tokens - 1) // sequence_length) for source in self.sources]
        self._ends = np.cumsum(counts)
        self.samples = int(self._ends[-1])
        self._pad_id = pad_id
        self._order: NDArray[np.int64] | None = None

    def batch(self, first: int, count: int) -> Batch:
        """Return the windows `first` to `first + count - 1`; positions past the end are padding with ignored labels."""
        if self._order is None:
            self._order = np.argsort(philox_generator(0, 0).random_raw(self.samples), kind="stable")
        positions = position_range(first, count)
        numbers = self._order[positions[positions < self.samples]].tolist()
        return pad_windows(list(map(self._window, numbers)), count, self.sequence_length, self._pad_id)

    def _window(self, number: int) -> NDArray[Any]:
        which, within = _locate(self._ends, number)
        source = self.sources[which]
        begin = source.begin + within * self.sequence_length
        return source.read(begin, min(begin + self.sequence_length + 1, source.begin + source.tokens))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None}


class MappedDocuments:
    """The documents of some ranges, concatenated, without their EOS tokens; implements `document_chunks.Documents`."""

    def __init__(self, sources: Sequence[DocumentRange], eos_id: int | None) -> None:
        self._sources = [source for source in sources if source.documents]
        self._eos_id = eos_id
        self._ends = np.cumsum([source.documents for source in self._sources])

    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each document, without EOS."""
        lengths: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        for source in self._sources:
            reader = source.reader
            starts = reader.document_starts(source.first, source.first + source.documents)
            source_lengths = np.diff(starts)
            nonempty = np.flatnonzero(source_lengths)
            source_lengths[nonempty] -= reader.ids[starts[1:][nonempty] - 1] == self._eos_id
            lengths.append(source_lengths)
        return np.concatenate(lengths)

    def read(self, document: int, begin: int, end: int) -> NDArray[Any]:
        """Return tokens `begin` to `end - 1` of a document."""
        which, within = _locate(self._ends, document)
        source = self._sources[which]
        start = source.reader.document_span(source.first + within)[0]
        return source.read(start + begin, start + end)


def _locate(ends: NDArray[np.int64], number: int) -> tuple[int, int]:
    """Return the range that holds item `number`, and its index there; `ends` are the cumulative sizes of the ranges."""
    which = int(np.searchsorted(ends, number, side="right"))
    return which, number - (int(ends[which - 1]) if which else 0)


def _index_dtype(count: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if count < 1 << 31 else np.int64)
