"""Learned vectors in front of a text, made by a small MLP (p-tuning, arXiv 2103.10385)."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.peft_slice import PromptSlice
from .added_parameters import Added


class Prompt(Added):
    """Vectors that stand in front of the embeddings of every text: second(gelu(first(embedding))).

    Args:
        hidden_size: width of the embeddings.
        prompt: how many there are, and what makes them.
    """

    added: ClassVar[tuple[str, ...]] = ("embedding", "first", "first_bias", "second", "second_bias")

    def __init__(self, hidden_size: int, prompt: PromptSlice) -> None:
        super().__init__()
        self.prompt = prompt
        self.embedding = nn.Parameter(torch.empty(prompt.virtual_tokens, prompt.embedding))
        self.first = nn.Parameter(torch.empty(prompt.bottleneck, prompt.embedding))
        self.first_bias = nn.Parameter(torch.empty(prompt.bottleneck))
        self.second = nn.Parameter(torch.empty(hidden_size, prompt.bottleneck))
        self.second_bias = nn.Parameter(torch.empty(hidden_size))

    def __len__(self) -> int:
        """How many vectors."""
        return len(self.embedding)

    def forward(self, embedded: Tensor) -> Tensor:
        """Embeddings (batch, tokens, hidden_size) with the vectors in front."""
        vectors = prompt_vectors(self.embedding, self.first, self.first_bias, self.second, self.second_bias)
        return torch.cat([vectors.to(embedded.dtype).expand(len(embedded), -1, -1), embedded], dim=1)

    def pad(self, padding: Tensor | None) -> Tensor | None:
        """Which tokens are real, bool (batch, tokens), with the vectors in front; None where all are."""
        return None if padding is None else F.pad(padding, (len(self), 0), value=True)

    def route(self, routed: Tensor | None) -> Tensor | None:
        """Which tokens go to experts, likewise: the vectors go where the text behind them begins."""
        return None if routed is None else torch.cat([routed[:, :1].expand(-1, len(self)), routed], dim=1)

    def initial(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Normal embeddings and matrices, biases of 0."""
        if name.endswith("bias"):
            return torch.zeros(shape)
        std = 1.0 if name == "embedding" else self.prompt.init_std
        return torch.empty(shape).normal_(0.0, std, generator=generator)


def prompt_vectors(embedding: Tensor, first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor) -> Tensor:
    """The vectors, (virtual tokens, hidden_size), of the parameters of a `Prompt`."""
    return F.linear(F.gelu(F.linear(embedding, first, first_bias)), second, second_bias)
