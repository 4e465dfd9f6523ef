"""Samples of fine-tuning examples: one per row with padding, or several packed into one."""

from __future__ import annotations

import numpy as np
import torch

from .packing import one_pair_per_row, pack_pairs
from .pair_samples import RowShuffle
from .samples import IGNORE_INDEX, TensorBatch, position_range
from .sft_examples import Examples


class ExampleSamples:
    """Rows of one or several examples, by position; the assignment of examples to rows is fixed.

    A batch has `tokens` and `labels`, int64 [B, S]. Packed rows also have `documents`, int32 [B, S]: the index of the
    example within its row, non-decreasing; trailing padding gets its own index. The last token of an example is only a
    label, so an example takes one position less than it has tokens.

    Args:
        examples: at least one; each fits into a row.
        length: S, tokens in a row.
        seed: of the training order; None for evaluation: a single pass in the same order for all runs.
        with_padding_mask: add `padding` to batches, bool [B, S]: True for tokens, False for padding.
        rng_stream: random stream of the dataset in a blend.

    Attributes:
        sequence_length: S.
        samples: rows in an epoch.
    """

    def __init__(
        self,
        examples: Examples,
        length: int,
        pad_id: int,
        seed: int | None,
        *,
        pack_rows: bool,
        with_padding_mask: bool = False,
        rng_stream: int = 0,
    ) -> None:
        if not len(examples):
            raise ValueError("`examples` must hold at least one")
        lengths = examples.lengths()
        # `pack_pairs` expects encoder and decoder lengths; an example has one length, used for both.
        self.packing = pack_pairs(lengths, lengths, (length, length)) if pack_rows else one_pair_per_row(len(lengths))
        self.sequence_length = length
        self.samples = self.packing.rows
        self._examples = examples.examples
        self._pad_id = pad_id
        self._packs = pack_rows
        self._tells_padding = with_padding_mask
        self._order = RowShuffle(self.packing, seed, rng_stream)

    def batch(self, first: int, count: int) -> TensorBatch:
        """Return the samples at positions `first` to `first + count - 1`."""
        tokens = np.full((count, self.sequence_length), self._pad_id, np.int64)
        labels = np.full(tokens.shape, IGNORE_INDEX, np.int64)
        documents = np.zeros(tokens.shape, np.int32)
        present = np.zeros(tokens.shape, np.bool_)
        present[:, 0] = True  # an all-padding row would leave the MoE router no token to balance
        for row, position in enumerate(position_range(first, count).tolist()):
            begin = 0
            for number, member in enumerate(self._order.row_at(position).members):
                example = self._examples[member]
                inputs, targets = example.tokens[:-1], example.tokens[1:]
                end = begin + len(inputs)
                tokens[row, begin:end] = inputs
                labels[row, begin:end] = np.where(example.loss_mask[1:], targets.astype(np.int64), IGNORE_INDEX)
                documents[row, end:] = number + 1
                present[row, :end] = True
                begin = end
        fields = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        if self._packs:
            fields["documents"] = torch.from_numpy(documents)
        if self._tells_padding:
            fields["padding"] = torch.from_numpy(present)
        return fields
