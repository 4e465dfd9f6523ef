"""Texts that an encoder-decoder writes, greedily: the most probable token, again and again, until the end token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..models.t5 import T5
from .data.seq2seq import Shape
from .data.tokenizers import Tokenizer
from .precision import PrecisionPlan


class Writer:
    """Reads inputs and writes what a model answers to them.

    Args:
        model: in evaluation mode, built for calls of generation.
        tokenizer: its own, with an end token.
        shape: inputs are cut to the encoder's side, answers end with the decoder's.
        precision: arithmetic of the model.
        device: where the model is.
    """

    def __init__(
        self, model: T5, tokenizer: Tokenizer, shape: Shape, precision: PrecisionPlan, device: torch.device
    ) -> None:
        if tokenizer.eos_id is None:
            raise ValueError("`tokenizer` must have an end token")
        self._model = model
        self._tokenizer = tokenizer
        self._eos_id = tokenizer.eos_id
        self._shape = shape
        self._precision = precision
        self._device = device

    def answers(self, inputs: Sequence[str], batch_size: int) -> list[str]:
        """The answer to each input.

        Args:
            inputs: texts.
            batch_size: how many are read at once; answers depend on it by rounding only.
        """
        # Inputs of like length together: the shorter ones are padded to the longest.
        ids = self._tokenizer.encode_batch(inputs)
        order = np.argsort([len(one) for one in ids], kind="stable").tolist()
        found = [""] * len(ids)
        for first in range(0, len(order), batch_size):
            numbers = order[first : first + batch_size]
            written = self._write([ids[number] for number in numbers])
            for number, tokens in zip(numbers, written, strict=True):
                found[number] = self._tokenizer.decode(tokens)
        return found

    @torch.no_grad()
    def _write(self, inputs: Sequence[np.ndarray]) -> list[list[int]]:
        """The tokens of each answer, without the end token."""
        read = [[*one[: self._shape.encoder - 1].tolist(), self._eos_id] for one in inputs]
        longest = max(map(len, read))
        tokens = torch.full((len(read), longest), self._shape.pad_id)
        present = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, one in enumerate(read):
            tokens[row, : len(one)] = torch.tensor(one)
            present[row, : len(one)] = True
        with self._precision.context(self._device):
            encoded = self._model.encode(tokens.to(self._device), present.to(self._device))
            written = torch.full((len(read), 1), self._shape.pad_id, device=self._device)
            ended = torch.zeros(len(read), dtype=torch.bool, device=self._device)
            for _ in range(self._shape.decoder):
                hidden = self._model.decode(written, encoded)[:, -1:]
                following = self._model.logits_of(hidden).argmax(dim=-1).masked_fill(ended[:, None], self._eos_id)
                written = torch.cat([written, following], dim=1)
                ended |= following[:, 0] == self._eos_id
                if ended.all():
                    break
        return [_until(one, self._eos_id) for one in written[:, 1:].tolist()]


def _until(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens
