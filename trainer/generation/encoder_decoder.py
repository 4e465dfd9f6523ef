"""Greedy generation with an encoder-decoder model, up to the end token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...models.t5 import T5
from ..data.datasets.seq2seq import Shape
from ..data.tokenizers.tokenizer import Tokenizer
from ..device.precision import PrecisionPlan
from .text_generator import Generator, StoppingCriteria


class EncoderDecoderGenerator:
    """Generate outputs of an encoder-decoder model for input texts.

    Args:
        model: model in evaluation mode, built for generation.
        tokenizer: tokenizer of the model, with an EOS token.
        shape: inputs are truncated to the encoder length, outputs to the decoder length.
        precision: dtypes of the model.
        device: device of the model.
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
        """Generate the output of each input.

        Args:
            inputs: input texts.
            batch_size: number of inputs per batch; changes outputs by rounding only.
        """
        ids = self._tokenizer.encode_batch(inputs)
        prompts = [[*row[: self._shape.encoder - 1].tolist(), self._eos_id] for row in ids]
        outputs = self._generator.write(prompts, StoppingCriteria(self._shape.decoder), batch_size=batch_size)
        return [self._tokenizer.decode(output.tokens) for output in outputs]
