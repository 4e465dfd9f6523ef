"""A decoder-only language model: embeddings, one causal stack, a head."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.attention.dispatch import Decision
from ..kernels.cross_entropy import linear_cross_entropy
from .attention import CallKind
from .stack import Stack


class GPT(nn.Module):
    """Tokens to logits, or to the loss without ever holding all logits.

    Args:
        token_embedding: (padded_vocab_size, hidden_size).
        position_embedding: the learned table of positions, or None.
        decoder: causal stack with its final norm.
        head: bias-free output projection; None ties it to `token_embedding`.
        vocab_size: real tokens; the rows behind them are padding.
        seq_length: tokens of a training or evaluation sample.
        max_positions: the longest sequence, None for any.
        dropout: dropout of the embeddings, in training.
        attention_decisions: for each kind of call, what the dispatcher chose and why.
    """

    compiled: bool = False
    """The layers run through torch.compile in training and evaluation."""
    compile_reason: str = ""
    """Why, or why not, in words for the log."""

    def __init__(
        self,
        *,
        token_embedding: nn.Embedding,
        position_embedding: nn.Embedding | None,
        decoder: Stack,
        head: nn.Linear | None,
        vocab_size: int,
        seq_length: int,
        max_positions: int | None,
        dropout: float,
        attention_decisions: dict[CallKind, Decision],
    ) -> None:
        super().__init__()
        self.token_embedding = token_embedding
        self.position_embedding = position_embedding
        self.decoder = decoder
        self.head = head
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self.max_positions = max_positions
        self.dropout = dropout
        self.attention_decisions = attention_decisions

    @property
    def output_weight(self) -> Tensor:
        """The matrix that turns hidden states into logits, (padded_vocab_size, hidden_size)."""
        return self.token_embedding.weight if self.head is None else self.head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every next token.

        Args:
            tokens: (batch, tokens) int64.

        Returns:
            (batch, tokens, padded_vocab_size) in the dtype of the model; -inf behind `vocab_size`.
        """
        logits = F.linear(self.hidden_states(tokens), self.output_weight)
        logits[..., self.vocab_size :] = float("-inf")
        return logits

    def loss(self, tokens: Tensor, labels: Tensor, denominator: Tensor | float) -> Tensor:
        """Sum of the cross-entropies of all labels, divided by `denominator`.

        Args:
            tokens: (batch, tokens) int64.
            labels: (batch, tokens) int64, the token that follows each; -100 counts nothing.
            denominator: usually the number of labels in the whole global batch, so that micro batches add up.

        Returns:
            A scalar in fp32 (fp64 for an fp64 model).
        """
        hidden, weight = self.hidden_states(tokens), self.output_weight
        if torch.is_autocast_enabled(hidden.device.type):  # the fused operation is opaque to autocast
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        total = linear_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten(), valid_vocab=self.vocab_size)
        return total / denominator

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """The normed output of the last layer, (batch, tokens, hidden_size), for tokens (batch, tokens) int64."""
        length = tokens.shape[1]
        kind = self._kind_of_call(length)
        if kind not in self.attention_decisions:
            raise ValueError(
                f"a {kind} call ({length} tokens) must be among those the model was built for "
                f"({', '.join(self.attention_decisions) or 'none, on the meta device'}); name it in `kinds`."
            )
        if kind != "generation":
            return self.decoder(self._embed(tokens), kind)
        if length == 1:  # no backend has to take a single token: a causal model does not see the one behind it
            tokens = F.pad(tokens, (0, 1))
        # lengths come and go here: compiling each of them would take longer than running it
        eager = torch.compiler.set_stance("force_eager") if self.compiled else contextlib.nullcontext()
        with eager:
            return self.decoder(self._embed(tokens), kind)[:, :length]

    def _kind_of_call(self, length: int) -> CallKind:
        """Training and evaluation come in one length; everything else is as in generation, of any length."""
        if self.training:
            if length != self.seq_length:
                raise ValueError(
                    f"`tokens` ({length} per sample) must be as long as the model was built to train on "
                    f"({self.seq_length}); pad the sample, or set encoder_seq_length={length}."
                )
            return "training"
        if length == self.seq_length:
            return "evaluation"
        if length < 1 or (self.max_positions is not None and length > self.max_positions):
            raise ValueError(
                f"`tokens` ({length} per sample) must be from 1 to {self.max_positions} tokens long; "
                "cut the text, or build the model with a larger max_position_embeddings."
            )
        return "generation"

    def _embed(self, tokens: Tensor) -> Tensor:
        hidden = self.token_embedding(tokens)
        if self.position_embedding is not None:
            hidden = hidden + self.position_embedding.weight[: tokens.shape[1]]
        if self.training and self.dropout:
            hidden = F.dropout(hidden, self.dropout)
        return hidden
