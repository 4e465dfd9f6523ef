"""Texts that an encoder-decoder writes, greedily: the most probable token, again and again, until the end token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...models.t5 import T5
from ..data.datasets.seq2seq import Shape
from ..data.tokenizers.tokenizer import Tokenizer
from ..device.precision import PrecisionPlan
from .text_generator import Generator, Limits


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
        self._tokenizer = tokenizer
        self._eos_id = tokenizer.eos_id
        self._shape = shape
        self._generator = Generator(model, tokenizer, precision, device, shape.encoder)

    def answers(self, inputs: Sequence[str], batch_size: int) -> list[str]:
        """The answer to each input.

        Args:
            inputs: texts.
            batch_size: how many are read at once; answers depend on it by rounding only.
        """
        ids = self._tokenizer.encode_batch(inputs)
        prompts = [[*one[: self._shape.encoder - 1].tolist(), self._eos_id] for one in ids]
        written = self._generator.write(prompts, Limits(self._shape.decoder), batch_size=batch_size)
        return [self._tokenizer.decode(one.tokens) for one in written]
