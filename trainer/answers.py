"""How a T5 answers a text: the encoder reads it once, the decoder goes on token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..models.t5 import T5
from .data.sentinels import encode_spelled
from .data.tokenizers import Tokenizer
from .errors import UserError
from .precision import PrecisionPlan


def answering(
    model: T5, tokenizer: Tokenizer, prompt: str, precision: PrecisionPlan, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """The logits of an answer to a text, as `sampling.sample` takes them.

    Args:
        model: in evaluation mode, built for calls of generation.
        tokenizer: its own.
        prompt: what is answered; the end token follows it. `<extra_id_0>` in it is the sentinel.
        precision: arithmetic of the model.
        device: where the model is.

    Returns:
        Tokens of the answer so far, int64 [1, s], to logits [1, s, vocabulary].

    Raises:
        UserError: the prompt is longer than the model can read.
    """
    ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    read = torch.tensor([[*encode_spelled(tokenizer, prompt), *ends]], device=device)
    longest = model.max_positions[0]
    if longest is not None and read.shape[1] > longest:
        raise UserError(
            f"stoker generate: the prompt has {read.shape[1]:,} tokens with its end, and this T5 reads at most "
            f"{longest:,} (`model.max_position_embeddings`); shorten it"
        )
    with torch.no_grad(), precision.context(device):
        encoded = model.encode(read)

    def logits(tokens: Tensor) -> Tensor:
        with precision.context(device):
            return model.logits_of(model.decode(tokens, encoded))

    return logits
