"""Samples of any map-style dataset: one item a row, shuffled every epoch, padded, with next-token labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...utils.errors import UserError
from ..tokenizers.tokenizer import Tokenizer
from .samples import IGNORE_INDEX, Batch, philox_generator, position_range

_FORMS = "a list, array or tensor of token ids, a dict with `input_ids`, or text"


class MapStyleDataset(Protocol):
    """Interface of a map-style dataset, as of `torch.utils.data.Dataset` and of `datasets.Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class MapStyleSamples:
    """Rows of a map-style dataset, by position; an item depends on its index alone.

    An item is a flat sequence of up to S + 1 token ids; a dict with `input_ids`, perhaps `attention_mask` (tokens where
    it is 0 are left out) and perhaps `labels`; or a text, which is tokenized and ended with EOS. As in Hugging Face's
    datasets, `labels[i]` belongs to `input_ids[i]` itself, and -100 is ignored: here they are shifted by one token.

    Args:
        dataset: the dataset, not empty; it is pickled into dataloader workers.
        sequence_length: S, tokens in a row.
        tokenizer: tokenizes texts; its padding fills short rows.
        vocab_size: ids must be below.
        seed: of the order, new in every epoch; None for evaluation: a single pass in the same order for all runs.
        full_rows: items must have S or S + 1 tokens and no labels, for tasks that make their own labels.
        with_padding: set `Batch.padding`.
        name: of dataset and split, for messages.
    """

    def __init__(
        self,
        dataset: MapStyleDataset,
        sequence_length: int,
        tokenizer: Tokenizer,
        vocab_size: int,
        seed: int | None,
        *,
        full_rows: bool,
        with_padding: bool,
        name: str,
    ) -> None:
        self.samples = len(dataset)
        self.sequence_length = sequence_length
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._seed = seed
        self._full_rows = full_rows
        self._with_padding = with_padding
        self._name = name
        self._epoch: tuple[int, NDArray[np.int64]] | None = None

    def batch(self, first: int, count: int) -> Batch:
        """Return the rows at positions `first` to `first + count - 1`; in evaluation those past the end are padding.

        Raises:
            UserError: an item is too long or too short, or none of these forms; its index is in the message.
        """
        shape = count, self.sequence_length
        tokens, labels = np.full(shape, self._tokenizer.pad_id, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        present = np.zeros(shape, np.bool_)
        present[:, 0] = True  # a row of padding would leave the MoE router no token to balance
        for row, position in enumerate(position_range(first, count).tolist()):
            if self._seed is None and position >= self.samples:
                continue
            ids, targets = self._item(int(self._order(position // self.samples)[position % self.samples]))
            length = min(len(ids), self.sequence_length)
            tokens[row, :length] = ids[:length]
            labels[row, : len(targets) - 1] = targets[1:]
            present[row, :length] = True
        padding = torch.from_numpy(present) if self._with_padding else None
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), padding=padding)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """Return the items of an epoch in order, int64 [samples]."""
        if self._epoch is None or self._epoch[0] != epoch:
            words = philox_generator(self._seed or 0, epoch if self._seed is not None else 0).random_raw(self.samples)
            self._epoch = epoch, np.argsort(words, kind="stable")
        return self._epoch[1]

    def _item(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the token ids of an item, and a label of each."""
        item, at, length = self._dataset[index], f"{self._name}, item {index}", self.sequence_length
        labels: Any = None
        mask: Any = None
        if isinstance(item, str):
            end = [] if self._tokenizer.eos_id is None else [self._tokenizer.eos_id]
            item = [*self._tokenizer.encode(item).tolist(), *end]
        elif isinstance(item, Mapping):
            if "input_ids" not in item:
                raise UserError(f"{at}: the dict has no `input_ids`, only {', '.join(map(str, item))}")
            labels, mask, item = item.get("labels"), item.get("attention_mask"), item["input_ids"]
        ids = _flat(item, at, "input_ids")
        targets = ids if labels is None else _flat(labels, at, "labels")
        if len(targets) != len(ids):
            raise UserError(f"{at}: `labels` ({len(targets)}) must be as many as `input_ids` ({len(ids)})")
        if mask is not None:
            kept = _flat(mask, at, "attention_mask") != 0
            if len(kept) != len(ids):
                raise UserError(f"{at}: `attention_mask` ({len(kept)}) must be as long as `input_ids` ({len(ids)})")
            ids, targets = ids[kept], targets[kept]
        if len(ids) > length + 1:
            raise UserError(f"{at} has {len(ids):,} tokens, but a sample takes {length + 1:,}: truncate or split it")
        if self._full_rows and (labels is not None or len(ids) < length):
            raise UserError(f"{at}: this task takes items of exactly {length:,} tokens, without `labels`")
        if len(ids) < 2:
            raise UserError(f"{at} has {len(ids)} tokens; one predicts the next, so it needs 2")
        self._check_range(ids, f"{at}: the token id")
        self._check_range(targets[targets != IGNORE_INDEX], f"{at}: the label")
        return ids, targets

    def _check_range(self, ids: NDArray[np.int64], what: str) -> None:
        outside = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(outside):
            raise UserError(f"{what} {outside[0]} is not in the vocabulary, 0 to {self._vocab_size - 1}")


def _flat(ids: Any, at: str, name: str) -> NDArray[np.int64]:
    """Return token ids as an array, int64 [N].

    Raises:
        UserError: they are not a flat sequence of integers.
    """
    try:
        array = ids.cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
    except ValueError:  # lists of several lengths
        array = np.zeros((0, 0))
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or not array.size):
        kind = type(ids).__name__
        found = (
            f"{kind} of {array.dtype} {list(array.shape)}" if isinstance(ids, Tensor | np.ndarray | Sequence) else kind
        )
        raise UserError(f"{at}: `{name}` must be a flat sequence of integers, not a {found}; an item is {_FORMS}")
    return array.astype(np.int64)
