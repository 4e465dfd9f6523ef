"""A decoder-only language model: embeddings, one causal stack, a head."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.attention.dispatch import Decision
from ..kernels.attention.packed_sequences import PackedSequences, positions_in_documents
from .dispatch.attention_calls import CallKind, decision_for
from .layers.compiling import layers_as_written
from .lm_head import TokenPositions, add_positions, dtype_of_products, token_logits, token_loss
from .moe.find_moe_layers import moe_layers
from .moe.token_mask import up_to_last_label
from .peft.ptuning import Prompt
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
        label_smoothing: share of a label that the other tokens get, in training.
        embedding_scale: factor of the embeddings.
        logits_softcap: bound of the logits, cap * tanh(logit / cap); 0 for none.
        reset_position_ids: samples hold several documents, and the positions of each begin at 0.
        reset_attention_mask: samples hold several documents, and a token sees none of an earlier one.
        attention_decisions: for each kind of call, what the dispatcher chose and why.

    Attributes:
        prompt: learned vectors in front of every text; None without.
    """

    compiled: bool = False
    """The layers run through torch.compile in training and evaluation."""
    compile_reason: str = ""
    """Why, or why not, in words for the log."""

    def __init__(
        self,
        *,
        token_embedding: nn.Embedding,
        position_embedding: TokenPositions | None,
        decoder: Stack,
        head: nn.Linear | None,
        vocab_size: int,
        seq_length: int,
        max_positions: int | None,
        dropout: float,
        label_smoothing: float,
        embedding_scale: float,
        logits_softcap: float,
        reset_position_ids: bool,
        reset_attention_mask: bool,
        attention_decisions: Mapping[str, Decision],
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
        self.label_smoothing = label_smoothing
        self.embedding_scale = embedding_scale
        self.logits_softcap = logits_softcap
        self.reset_position_ids = reset_position_ids
        self.reset_attention_mask = reset_attention_mask
        self.attention_decisions = dict(attention_decisions)
        self.prompt: Prompt | None = None
        self._has_experts = bool(moe_layers(decoder))

    @property
    def output_weight(self) -> Tensor:
        """The matrix that turns hidden states into logits, (padded_vocab_size, hidden_size)."""
        return self.token_embedding.weight if self.head is None else self.head.weight

    @property
    def needs_documents(self) -> bool:
        """Whether training and evaluation ask which document each token belongs to."""
        return self.reset_position_ids or self.reset_attention_mask

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits of every next token.

        Args:
            tokens: (batch, tokens) int64.
            documents: the number of each token's document within its row, never falling, int32 (batch, tokens). A model
                that `needs_documents` takes it in training and evaluation; without it a row is one document.

        Returns:
            (batch, tokens, padded_vocab_size) in the dtype of the model; -inf behind `vocab_size`.
        """
        hidden = self.hidden_states(tokens, documents)
        return token_logits(hidden, self.output_weight, vocab_size=self.vocab_size, softcap=self.logits_softcap)

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        denominator: Tensor | float,
        documents: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Sum of the cross-entropies of all labels, divided by `denominator`.

        Args:
            tokens: (batch, tokens) int64.
            labels: (batch, tokens) int64, the token that follows each; -100 counts nothing.
            denominator: usually the number of labels in the whole global batch, so that micro batches add up.
            documents: as in `forward`.
            padding: bool (batch, tokens), False behind the end of a row's text, for experts, which leave those out;
                None where there are no such tokens, or no experts.

        Returns:
            A scalar in fp32 (fp64 for an fp64 model).
        """
        return token_loss(
            self.hidden_states(tokens, documents, self._routed(labels, padding)),
            self.output_weight,
            labels,
            vocab_size=self.vocab_size,
            label_smoothing=self.label_smoothing if self.training else 0.0,
            denominator=denominator,
            softcap=self.logits_softcap,
        )

    def batch_loss(self, batch: Mapping[str, Tensor], denominator: Tensor | float) -> Tensor:
        """The loss of a batch of named tensors, those of `loss`."""
        return self.loss(batch["tokens"], batch["labels"], denominator, batch.get("documents"), batch.get("padding"))

    def hidden_states(self, tokens: Tensor, documents: Tensor | None = None, routed: Tensor | None = None) -> Tensor:
        """The normed output of the last layer, (batch, tokens, hidden_size).

        Args:
            tokens: as in `forward`.
            documents: likewise.
            routed: bool like `tokens`, True for those that go to experts; None for all, and in generation.
        """
        length = tokens.shape[1]
        kind = self._kind_of_call(length, documents)
        decision = decision_for(self.attention_decisions, kind)
        if kind != "generation":
            positions, packed = None, None
            if documents is not None and self.reset_position_ids:
                positions = positions_in_documents(documents)
            hidden = self._embed(tokens, positions)
            if documents is not None and self.reset_attention_mask:
                packed = PackedSequences.of(
                    documents,
                    dtype=dtype_of_products(hidden),
                    causal=True,
                    mask=decision.needs_mask,
                )
            if self.prompt is not None:
                routed = self.prompt.route(routed)
            hidden = self.decoder(hidden, kind, positions=positions, packed=packed, routed=routed)
            return hidden if self.prompt is None else hidden[:, len(self.prompt) :]
        if length == 1:  # no backend has to take a single token: a causal model does not see the one behind it
            tokens = F.pad(tokens, (0, 1))
        with layers_as_written(self.compiled):
            first = 0 if self.prompt is None else len(self.prompt)
            return self.decoder(self._embed(tokens), kind)[:, first : first + length]

    def _routed(self, labels: Tensor, padding: Tensor | None) -> Tensor | None:
        """Which tokens go to experts; None for all. Evaluation comes with short windows and rows to fill up a batch."""
        return up_to_last_label(labels) if self._has_experts and not self.training else padding

    def _kind_of_call(self, length: int, documents: Tensor | None) -> CallKind:
        """Training and evaluation come in one length; everything else is as in generation, of any length.

        Where documents are kept apart, a text that comes without them is one of generation, as long as it may be.
        """
        if documents is not None and not self.needs_documents:
            raise ValueError(
                "`documents` must be None: the model was built without reset_position_ids and reset_attention_mask."
            )
        if self.training and documents is None and self.needs_documents:
            raise ValueError("`documents` must not be None in training: the model was built to keep them apart.")
        if self.training:
            if length != self.seq_length:
                raise ValueError(
                    f"`tokens` ({length} per sample) must be as long as the model was built to train on "
                    f"({self.seq_length}); pad the sample, or set encoder_seq_length={length}."
                )
            return "training"
        if length == self.seq_length and (documents is not None or not self.needs_documents):
            return "evaluation"
        if documents is not None:
            raise ValueError(
                f"`documents` must come with samples of {self.seq_length} tokens, as the model was built for, "
                f"not with {length}."
            )
        if length < 1 or (self.max_positions is not None and length > self.max_positions):
            raise ValueError(
                f"`tokens` ({length} per sample) must be from 1 to {self.max_positions} tokens long; "
                "cut the text, or build the model with a larger max_position_embeddings."
            )
        return "generation"

    def _embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        hidden = self.token_embedding(tokens)
        if self.prompt is not None:
            hidden = self.prompt(hidden)
        hidden = add_positions(hidden, self.position_embedding, positions)
        if self.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        if self.training and self.dropout:
            hidden = F.dropout(hidden, self.dropout)
        return hidden
