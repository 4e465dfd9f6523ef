"""BERT: embeddings, a stack that sees both ways, and a head that fills in masked tokens (arXiv 1810.04805)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.attention.dispatch import Decision
from ..kernels.attention.packed_sequences import PackedSequences, positions_in_documents
from .config.batch_shape import SampleForm
from .dispatch.attention_calls import CallKind, decision_for
from .layers.compiling import layers_as_written
from .layers.norm import LayerNorm, RMSNorm
from .lm_head import TokenPositions, add_positions, dtype_of_products, token_logits, token_loss
from .moe.find_moe_layers import moe_layers
from .moe.token_mask import in_rows_with_label
from .stack import Stack


class BERT(nn.Module):
    """Tokens, some of them masked, to the logits of every token, or to the loss of those with a label.

    Args:
        token_embedding: (padded_vocab_size, hidden_size).
        position_embedding: the learned table of positions, or None.
        token_type_embedding: (token types, hidden_size), or None.
        embedding_norm: norm of the sum of the embeddings, or None.
        encoder: stack that sees both ways.
        transform: linear layer before the head, followed by GELU and `transform_norm`; or None.
        transform_norm: its norm.
        head: bias-free output projection; None ties it to `token_embedding`.
        head_bias: a bias on the logits.
        vocab_size: real tokens; the rows behind them are padding.
        form: the samples of training and evaluation.
        max_positions: the longest sequence, None for any.
        dropout: dropout of the embeddings, in training.
        label_smoothing: share of a label that the other tokens get, in training.
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
        position_embedding: TokenPositions | None,
        token_type_embedding: nn.Embedding | None,
        embedding_norm: LayerNorm | RMSNorm | None,
        encoder: Stack,
        transform: nn.Linear | None,
        transform_norm: LayerNorm | RMSNorm | None,
        head: nn.Linear | None,
        head_bias: bool,
        vocab_size: int,
        form: SampleForm,
        max_positions: int | None,
        dropout: float,
        label_smoothing: float,
        attention_decisions: Mapping[str, Decision],
    ) -> None:
        super().__init__()
        self.token_embedding = token_embedding
        self.position_embedding = position_embedding
        self.token_type_embedding = token_type_embedding
        self.embedding_norm = embedding_norm
        self.encoder = encoder
        self.transform = transform
        self.transform_norm = transform_norm
        self.head = head
        self.head_bias = nn.Parameter(torch.zeros(token_embedding.num_embeddings)) if head_bias else None
        self.vocab_size = vocab_size
        self.form = form
        self.max_positions = max_positions
        self.dropout = dropout
        self.label_smoothing = label_smoothing
        self.attention_decisions = dict(attention_decisions)
        self._has_experts = bool(moe_layers(encoder))

    @property
    def output_weight(self) -> Tensor:
        """The matrix that turns hidden states into logits, (padded_vocab_size, hidden_size)."""
        return self.token_embedding.weight if self.head is None else self.head.weight

    def forward(
        self,
        tokens: Tensor,
        *,
        token_types: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Logits of every token.

        Args:
            tokens: (batch, tokens) int64.
            token_types: int64, like `tokens`; None is 0 everywhere.
            padding: bool, like `tokens`, True for real tokens; None where all are.
            documents: the number of each token's document within its row, never falling, int32, like `tokens`. A model
                built for packed samples, or for positions that restart, takes it in training and evaluation; without it
                a row is one document.

        Returns:
            (batch, tokens, padded_vocab_size) in the dtype of the model; -inf behind `vocab_size`.
        """
        hidden = self.hidden_states(tokens, token_types=token_types, padding=padding, documents=documents)
        return token_logits(hidden, self.output_weight, self.head_bias, vocab_size=self.vocab_size)

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        denominator: Tensor | float,
        *,
        token_types: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Sum of the cross-entropies of all labels, divided by `denominator`.

        Args:
            tokens: and the others as in `forward`.
            labels: (batch, tokens) int64, the token that stood at each masked place; -100 counts nothing.
            denominator: usually the number of labels in the whole global batch, so that micro batches add up.
            token_types: as in `forward`.
            padding: as in `forward`.
            documents: as in `forward`.

        Returns:
            A scalar in fp32 (fp64 for an fp64 model).
        """
        routed = None
        if self._has_experts and not self.training:  # with short windows, and rows to fill up a batch
            routed = in_rows_with_label(tokens, labels, padding)
        return token_loss(
            self.hidden_states(tokens, token_types=token_types, padding=padding, documents=documents, routed=routed),
            self.output_weight,
            labels,
            vocab_size=self.vocab_size,
            bias=self.head_bias,
            label_smoothing=self.label_smoothing if self.training else 0.0,
            denominator=denominator,
        )

    def batch_loss(self, batch: Mapping[str, Tensor], denominator: Tensor | float) -> Tensor:
        """The loss of a batch of named tensors, those of `loss`."""
        return self.loss(**batch, denominator=denominator)

    def hidden_states(
        self,
        tokens: Tensor,
        *,
        token_types: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        routed: Tensor | None = None,
    ) -> Tensor:
        """What the head reads, (batch, tokens, hidden_size).

        Args:
            tokens: as in `forward`.
            token_types: likewise.
            padding: likewise.
            documents: likewise.
            routed: bool like `tokens`, True for those that go to experts; None for those of `padding`.
        """
        length = tokens.shape[1]
        kind = self._kind_of_call(length, padding, documents)
        decision = decision_for(self.attention_decisions, kind)
        if kind == "generation" and length == 1:  # no backend has to take a single token: nobody sees the second
            real = torch.ones_like(tokens, dtype=torch.bool) if padding is None else padding
            tokens, padding, routed = F.pad(tokens, (0, 1)), F.pad(real, (0, 1), value=False), None
            token_types = None if token_types is None else F.pad(token_types, (0, 1))
        positions, packed = None, None
        embedded = self.token_embedding(tokens)
        if documents is not None and self.form.restart:
            positions = positions_in_documents(documents)
        if documents is not None and self.form.packed:
            packed = PackedSequences.of(
                documents,
                dtype=dtype_of_products(embedded),
                causal=False,
                mask=decision.needs_mask,
            )
        hidden = self._embed(embedded, token_types, positions)
        with layers_as_written(self.compiled and kind == "generation"):
            hidden = self.encoder(hidden, kind, positions=positions, packed=packed, padding=padding, routed=routed)
        hidden = hidden[:, :length]
        if self.transform is not None and self.transform_norm is not None:
            hidden = self.transform_norm(F.gelu(self.transform(hidden)))
        return hidden

    def _embed(self, hidden: Tensor, token_types: Tensor | None, positions: Tensor | None) -> Tensor:
        hidden = add_positions(hidden, self.position_embedding, positions)
        if self.token_type_embedding is not None:
            types = self.token_type_embedding
            hidden = hidden + (types.weight[0] if token_types is None else types(token_types))
        if self.embedding_norm is not None:
            hidden = self.embedding_norm(hidden)
        return F.dropout(hidden, self.dropout) if self.training and self.dropout else hidden

    def _kind_of_call(self, length: int, padding: Tensor | None, documents: Tensor | None) -> CallKind:
        """Training and evaluation come in one form; everything else is as in generation, of any length."""
        form, numbered = self.form, documents is not None
        wanted = form.packed or form.restart
        if numbered and not wanted:
            raise ValueError("`documents` must be None: the model was not built for packed samples.")
        if numbered and padding is not None:
            raise ValueError("`padding` must be None with `documents`: padding is a document of its own.")
        if length == form.length and numbered == wanted and (padding is None or form.padded):
            return "training" if self.training else "evaluation"
        if self.training or numbered:
            raise ValueError(
                f"`tokens` ({length} per sample{', packed' * numbered}{', padded' * (padding is not None)}) must be as "
                f"the model was built to train on: {form.length}{', packed' * wanted}{', padded' * form.padded}."
            )
        if length < 1 or (self.max_positions is not None and length > self.max_positions):
            raise ValueError(
                f"`tokens` ({length} per sample) must be from 1 to {self.max_positions} tokens long; cut the text, or "
                "build the model with a larger max_position_embeddings."
            )
        return "generation"
