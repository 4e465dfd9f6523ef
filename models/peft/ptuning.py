"""P-tuning: virtual tokens in front of the input, embedded by a small MLP (arXiv 2103.10385)."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.peft import PromptSlice
from .added_parameters import PeftModule


class PromptEncoder(PeftModule):
    """Prompt encoder: embeddings of virtual tokens, second(gelu(first(embedding))), prepended to every sequence.

    Args:
        hidden_size: width of the embeddings.
        prompt: number of virtual tokens, sizes of the MLP and initialization.
    """

    peft_parameters: ClassVar[tuple[str, ...]] = ("embedding", "first", "first_bias", "second", "second_bias")

    def __init__(self, hidden_size: int, prompt: PromptSlice) -> None:
        super().__init__()
        self.prompt = prompt
        self.embedding = nn.Parameter(torch.empty(prompt.virtual_tokens, prompt.embedding))
        self.first = nn.Parameter(torch.empty(prompt.bottleneck, prompt.embedding))
        self.first_bias = nn.Parameter(torch.empty(prompt.bottleneck))
        self.second = nn.Parameter(torch.empty(hidden_size, prompt.bottleneck))
        self.second_bias = nn.Parameter(torch.empty(hidden_size))

    def __len__(self) -> int:
        """Return the number of virtual tokens."""
        return len(self.embedding)

    def forward(self, embedded: Tensor) -> Tensor:
        """Prepend the virtual tokens to embeddings (batch, tokens, hidden_size)."""
        vectors = virtual_token_embeddings(self.embedding, self.first, self.first_bias, self.second, self.second_bias)
        return torch.cat([vectors.to(embedded.dtype).expand(len(embedded), -1, -1), embedded], dim=1)

    def extend_padding_mask(self, padding: Tensor | None) -> Tensor | None:
        """Extend the mask of real tokens, bool (batch, tokens), by the virtual tokens; None stays None."""
        return None if padding is None else F.pad(padding, (len(self), 0), value=True)

    def extend_routing_mask(self, routed: Tensor | None) -> Tensor | None:
        """Extend the mask of tokens routed to experts: virtual tokens are routed if the first real token is."""
        return None if routed is None else torch.cat([routed[:, :1].expand(-1, len(self)), routed], dim=1)

    def initial_parameter(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Initialize embeddings and matrices from a normal distribution, biases to 0."""
        if name.endswith("bias"):
            return torch.zeros(shape)
        std = 1.0 if name == "embedding" else self.prompt.init_std
        return torch.empty(shape).normal_(0.0, std, generator=generator)


def virtual_token_embeddings(
    embedding: Tensor, first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor
) -> Tensor:
    """Return the virtual token embeddings, (virtual tokens, hidden_size), from the parameters of a `PromptEncoder`."""
    return F.linear(F.gelu(F.linear(embedding, first, first_bias)), second, second_bias)
