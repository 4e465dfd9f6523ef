"""Samples out of examples: one in each row with padding behind it, or several packed into one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .packing import one_each, pack
from .pair_samples import RowOrder
from .samples import IGNORED_LABEL, positions_of
from .seq2seq import NamedTensors
from .sft_examples import Example, Examples


class ExampleSamples:
    """Rows of examples, by position; which examples share a row is fixed.

    A batch has `tokens` and `labels`, int64 [rows, s], and where rows are packed `documents`, int32 [rows, s]: the
    number of the example within its row, which never falls; the padding at the end has a number of its own. The last
    token of an example is a label only, so that it takes a place less than it has tokens.

    Args:
        examples: at least one; each fits into a row.
        length: s, tokens of a row.
        pad_id: fills them up.
        seed: chooses the orders of training; None: evaluation, once through, in an order that is the same for all runs.
        packs: several examples in a row.
        tells_padding: batches have `padding` too, bool [rows, s], False behind the examples of a row.
        part: keeps the sets of a blend apart.

    Attributes:
        sequence_length: s.
        samples: rows in an epoch.
    """

    def __init__(
        self,
        examples: Examples,
        length: int,
        pad_id: int,
        seed: int | None,
        *,
        packs: bool,
        tells_padding: bool = False,
        part: int = 0,
    ) -> None:
        if not len(examples):
            raise ValueError("`examples` must hold at least one")
        lengths = examples.lengths()
        # Each side of `pack` is what it is for a pair; an example has one, and both are the same.
        self.packing = pack(lengths, lengths, (length, length)) if packs else one_each(len(lengths))
        self.sequence_length = length
        self.samples = self.packing.rows
        self._examples = examples.examples
        self._pad_id = pad_id
        self._packs = packs
        self._tells_padding = tells_padding
        self._order = RowOrder(self.samples, seed, part)

    def batch(self, first: int, count: int) -> NamedTensors:
        """The samples at positions `first` to `first + count - 1`."""
        tokens = np.full((count, self.sequence_length), self._pad_id, np.int64)
        labels = np.full(tokens.shape, IGNORED_LABEL, np.int64)
        documents = np.zeros(tokens.shape, np.int32)
        there = np.zeros(tokens.shape, np.bool_)
        there[:, 0] = True  # a row without a single token would leave experts nothing to share out
        for row, position in enumerate(positions_of(first, count).tolist()):
            for begin, number, example in _placed(self._row(position)):
                read, written = example.tokens[:-1], example.tokens[1:]
                end = begin + len(read)
                tokens[row, begin:end] = read
                labels[row, begin:end] = np.where(example.counted[1:], written.astype(np.int64), IGNORED_LABEL)
                documents[row, end:] = number + 1
                there[row, :end] = True
        fields = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        if self._packs:
            fields["documents"] = torch.from_numpy(documents)
        if self._tells_padding:
            fields["padding"] = torch.from_numpy(there)
        return fields

    def _row(self, position: int) -> list[Example]:
        found = self._order.at(position)
        return [] if found is None else [self._examples[number] for number in self.packing.row(found.row).tolist()]


def _placed(examples: Sequence[Example]) -> list[tuple[int, int, Example]]:
    """Where each example of a row begins, its number and itself."""
    places: list[tuple[int, int, Example]] = []
    begin = 0
    for number, example in enumerate(examples):
        places.append((begin, number, example))
        begin += len(example.tokens) - 1
    return places
