"""An encoder-decoder: embeddings, a stack that sees both ways, a causal stack that also reads its output, a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.attention.dispatch import Decision
from ..kernels.attention.packed_sequences import PackedSequences, positions_in_documents
from .config.batch_shape import SampleForm
from .dispatch.attention_calls import CallKind, decision_for
from .layers.attention_bias import CrossRelativeBias
from .layers.compiling import layers_as_written
from .layers.cross_attention import Memory
from .lm_head import TokenPositions, add_positions, dtype_of_products, token_logits, token_loss
from .moe.find_moe_layers import moe_layers
from .moe.token_mask import in_documents_with_label, in_rows_with_label
from .peft.ptuning import Prompt
from .stack import Stack


class Encoded(NamedTuple):
    """What the encoder makes of a batch of texts.

    Attributes:
        hidden: (batch, tokens, hidden_size), normed.
        padding: bool (batch, tokens), True for real tokens; None where all are.
    """

    hidden: Tensor
    padding: Tensor | None


class T5(nn.Module):
    """Tokens of two texts to the logits of the second, or to the loss without ever holding all logits.

    Args:
        token_embedding: (padded_vocab_size, hidden_size), of the encoder or of both.
        decoder_token_embedding: the decoder's own; None shares `token_embedding`.
        encoder_position_embedding: the encoder's learned table of positions, or None.
        decoder_position_embedding: the decoder's.
        encoder: stack that sees both ways, with its final norm.
        decoder: causal stack with cross-attention and its final norm.
        cross_positions: what the decoder's cross-attention adds to its scores by distance, or None.
        head: bias-free output projection; None ties it to the decoder's token embedding.
        head_bias: a bias on the logits.
        output_scale: factor of the decoder's output before the head.
        vocab_size: real tokens; the rows behind them are padding.
        form: the samples of training and evaluation.
        max_positions: the longest sequences of encoder and decoder, None for any.
        dropouts: of the embeddings of encoder and decoder, in training.
        label_smoothing: share of a label that the other tokens get, in training.
        attention_decisions: for each attention and kind of call (`encoder training`, `cross generation`), what the
            dispatcher chose and why.

    Attributes:
        prompt: learned vectors in front of what the encoder reads; None without.
    """

    compiled: bool = False
    """The layers run through torch.compile in training and evaluation."""
    compile_reason: str = ""
    """Why, or why not, in words for the log."""

    def __init__(
        self,
        *,
        token_embedding: nn.Embedding,
        decoder_token_embedding: nn.Embedding | None,
        encoder_position_embedding: TokenPositions | None,
        decoder_position_embedding: TokenPositions | None,
        encoder: Stack,
        decoder: Stack,
        cross_positions: CrossRelativeBias | None,
        head: nn.Linear | None,
        head_bias: bool,
        output_scale: float,
        vocab_size: int,
        form: SampleForm,
        max_positions: tuple[int | None, int | None],
        dropouts: tuple[float, float],
        label_smoothing: float,
        attention_decisions: Mapping[str, Decision],
    ) -> None:
        super().__init__()
        self.token_embedding = token_embedding
        self.decoder_token_embedding = decoder_token_embedding
        self.encoder_position_embedding = encoder_position_embedding
        self.decoder_position_embedding = decoder_position_embedding
        self.encoder = encoder
        self.decoder = decoder
        self.cross_positions = cross_positions
        self.head = head
        self.head_bias = nn.Parameter(torch.zeros(token_embedding.num_embeddings)) if head_bias else None
        self.output_scale = output_scale
        self.vocab_size = vocab_size
        self.form = form
        self.max_positions = max_positions
        self.dropouts = dropouts
        self.label_smoothing = label_smoothing
        self.attention_decisions = dict(attention_decisions)
        self.prompt: Prompt | None = None
        self._encoder_has_experts = bool(moe_layers(encoder))
        self._decoder_has_experts = bool(moe_layers(decoder))

    @property
    def decoder_embedding(self) -> nn.Embedding:
        """The table of the decoder's token embeddings."""
        return self.token_embedding if self.decoder_token_embedding is None else self.decoder_token_embedding

    @property
    def output_weight(self) -> Tensor:
        """The matrix that turns hidden states into logits, (padded_vocab_size, hidden_size)."""
        return self.decoder_embedding.weight if self.head is None else self.head.weight

    def forward(
        self,
        encoder_tokens: Tensor,
        decoder_tokens: Tensor,
        *,
        encoder_padding: Tensor | None = None,
        encoder_documents: Tensor | None = None,
        decoder_documents: Tensor | None = None,
    ) -> Tensor:
        """Logits of every next token of the decoder.

        Args:
            encoder_tokens: (batch, tokens) int64.
            decoder_tokens: (batch, tokens) int64; the label of each is the next.
            encoder_padding: bool, like `encoder_tokens`, True for real tokens; None where all are.
            encoder_documents: the number of each token's document within its row, never falling, int32, like
                `encoder_tokens`. A model built for packed samples takes it in training and evaluation; without it a
                row is one document.
            decoder_documents: likewise of `decoder_tokens`; what has the same number belongs together.

        Returns:
            (batch, tokens, padded_vocab_size) in the dtype of the model; -inf behind `vocab_size`.
        """
        hidden = self.hidden_states(
            encoder_tokens,
            decoder_tokens,
            encoder_padding=encoder_padding,
            encoder_documents=encoder_documents,
            decoder_documents=decoder_documents,
        )
        return self.logits_of(hidden)

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Logits of what `hidden_states` or `decode` gave, (..., padded_vocab_size); -inf behind `vocab_size`."""
        return token_logits(hidden, self.output_weight, self.head_bias, vocab_size=self.vocab_size)

    def loss(
        self,
        encoder_tokens: Tensor,
        decoder_tokens: Tensor,
        labels: Tensor,
        denominator: Tensor | float,
        *,
        encoder_padding: Tensor | None = None,
        encoder_documents: Tensor | None = None,
        decoder_documents: Tensor | None = None,
    ) -> Tensor:
        """Sum of the cross-entropies of all labels, divided by `denominator`.

        Args:
            encoder_tokens: and the others as in `forward`.
            decoder_tokens: likewise.
            labels: (batch, tokens) int64, the token that follows each of `decoder_tokens`; -100 counts nothing.
            denominator: usually the number of labels in the whole global batch, so that micro batches add up.
            encoder_padding: as in `forward`.
            encoder_documents: as in `forward`.
            decoder_documents: as in `forward`.

        Returns:
            A scalar in fp32 (fp64 for an fp64 model).
        """
        hidden = self.hidden_states(
            encoder_tokens,
            decoder_tokens,
            encoder_padding=encoder_padding,
            encoder_documents=encoder_documents,
            decoder_documents=decoder_documents,
            encoder_routed=self._encoder_routed(
                encoder_tokens, labels, encoder_padding, encoder_documents, decoder_documents
            ),
            # Only padding has no label. Samples of every form may have some, as where `seq_length_dec` is long.
            decoder_routed=labels >= 0 if self._decoder_has_experts else None,
        )
        return token_loss(
            hidden,
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
        encoder_tokens: Tensor,
        decoder_tokens: Tensor,
        *,
        encoder_padding: Tensor | None = None,
        encoder_documents: Tensor | None = None,
        decoder_documents: Tensor | None = None,
        encoder_routed: Tensor | None = None,
        decoder_routed: Tensor | None = None,
    ) -> Tensor:
        """What the head reads, (batch, tokens, hidden_size).

        Args:
            encoder_tokens: and the others as in `forward`.
            decoder_tokens: likewise.
            encoder_padding: likewise.
            encoder_documents: likewise.
            decoder_documents: likewise.
            encoder_routed: bool, like `encoder_tokens`, True for those that go to experts; None for those of
                `encoder_padding`, and in generation.
            decoder_routed: likewise of `decoder_tokens`; None for all.
        """
        kind = self._kind_of_call(
            encoder_tokens.shape[1], decoder_tokens.shape[1], encoder_padding, encoder_documents, decoder_documents
        )
        if kind == "generation":
            return self.decode(decoder_tokens, self.encode(encoder_tokens, encoder_padding))
        encoded = self._run_encoder(encoder_tokens, encoder_padding, encoder_documents, kind, encoder_routed)
        documents = encoder_documents, decoder_documents
        return self._run_decoder(decoder_tokens, encoded, *documents, kind, decoder_routed)

    def encode(self, tokens: Tensor, padding: Tensor | None = None) -> Encoded:
        """Read texts of any length, as in generation.

        Args:
            tokens: (batch, tokens) int64.
            padding: bool (batch, tokens), True for real tokens; None where all are.
        """
        self._check_length("encoder", tokens.shape[1], self.max_positions[0])
        if tokens.shape[1] == 1:  # no backend has to take a single token: one that nobody sees comes behind it
            real = torch.ones_like(tokens, dtype=torch.bool) if padding is None else padding
            tokens, padding = F.pad(tokens, (0, 1)), F.pad(real, (0, 1), value=False)
        with layers_as_written(self.compiled):
            return self._run_encoder(tokens, padding, None, "generation")

    def decode(self, tokens: Tensor, encoded: Encoded) -> Tensor:
        """What the head reads of decoder tokens of any length, (batch, tokens, hidden_size), as in generation.

        Args:
            tokens: (batch, tokens) int64.
            encoded: of the same batch.
        """
        length = tokens.shape[1]
        self._check_length("decoder", length, self.max_positions[1])
        if length == 1:  # a causal model does not see the token behind it
            tokens = F.pad(tokens, (0, 1))
        with layers_as_written(self.compiled):
            return self._run_decoder(tokens, encoded, None, None, "generation")[:, :length]

    def _encoder_routed(
        self,
        tokens: Tensor,
        labels: Tensor,
        padding: Tensor | None,
        documents: Tensor | None,
        decoder_documents: Tensor | None,
    ) -> Tensor | None:
        """Which of the encoder's tokens go to experts; None for those of `padding`."""
        if not self._encoder_has_experts:
            return None
        if documents is not None and decoder_documents is not None:
            return in_documents_with_label(documents, labels, decoder_documents)
        if self.training and padding is None:  # evaluation comes with short windows, and rows to fill up a batch
            return None
        return in_rows_with_label(tokens, labels, padding)

    def _run_encoder(
        self,
        tokens: Tensor,
        padding: Tensor | None,
        documents: Tensor | None,
        kind: CallKind,
        routed: Tensor | None = None,
    ) -> Encoded:
        positions, packed = None, None
        decision = decision_for(self.attention_decisions, f"encoder {kind}")
        hidden = self.token_embedding(tokens)
        if self.prompt is not None:
            hidden, padding, routed = self.prompt(hidden), self.prompt.pad(padding), self.prompt.route(routed)
        if documents is not None:
            positions = positions_in_documents(documents)
            dtype, mask = dtype_of_products(hidden), decision.needs_mask
            packed = PackedSequences.of(documents, dtype=dtype, causal=False, mask=mask)
        hidden = self._dropped(add_positions(hidden, self.encoder_position_embedding, positions), self.dropouts[0])
        hidden = self.encoder(hidden, kind, positions=positions, packed=packed, padding=padding, routed=routed)
        return Encoded(hidden, padding)

    def _run_decoder(
        self,
        tokens: Tensor,
        encoded: Encoded,
        encoder_documents: Tensor | None,
        documents: Tensor | None,
        kind: CallKind,
        routed: Tensor | None = None,
    ) -> Tensor:
        positions, packed, across = None, None, None
        own, cross = (decision_for(self.attention_decisions, f"{part} {kind}") for part in ("decoder", "cross"))
        hidden = self.decoder_embedding(tokens)
        if documents is not None and encoder_documents is not None:
            positions, dtype = positions_in_documents(documents), dtype_of_products(hidden)
            packed = PackedSequences.of(documents, dtype=dtype, causal=True, mask=own.needs_mask)
            across = PackedSequences.across(documents, encoder_documents, dtype=dtype, mask=cross.needs_mask)
        terms = None
        if self.cross_positions is not None:
            terms = self.cross_positions(tokens.shape[1], encoded.hidden.shape[1]).distance_bias
        hidden = self._dropped(add_positions(hidden, self.decoder_position_embedding, positions), self.dropouts[1])
        memory = Memory(encoded.hidden, encoded.padding, across, terms)
        hidden = self.decoder(hidden, kind, positions=positions, packed=packed, routed=routed, memory=memory)
        return hidden if self.output_scale == 1.0 else hidden * self.output_scale

    def _dropped(self, embedded: Tensor, dropout: float) -> Tensor:
        return F.dropout(embedded, dropout) if self.training and dropout else embedded

    def _check_length(self, part: str, length: int, longest: int | None) -> None:
        if length < 1 or (longest is not None and length > longest):
            raise ValueError(
                f"`{part}_tokens` ({length} per sample) must be from 1 to {longest or 'any number of'} tokens long; "
                "cut the text, or build the model with a larger max_position_embeddings."
            )

    def _kind_of_call(
        self,
        length: int,
        decoder_length: int,
        padding: Tensor | None,
        encoder_documents: Tensor | None,
        decoder_documents: Tensor | None,
    ) -> CallKind:
        """Training and evaluation come in one form; everything else is as in generation, of any length."""
        form = self.form
        if (encoder_documents is None) != (decoder_documents is None):
            raise ValueError("`encoder_documents` and `decoder_documents` must be given together.")
        packed = encoder_documents is not None
        if packed and not form.packed:
            raise ValueError("`encoder_documents` must be None: the model was not built for packed samples.")
        if packed and padding is not None:
            raise ValueError(
                "`encoder_padding` must be None with `encoder_documents`: padding is a document of its own."
            )
        expected = (form.length, form.decoder_length) == (length, decoder_length) and packed == form.packed
        if expected and (padding is None or form.padded):
            return "training" if self.training else "evaluation"
        if self.training or packed:
            raise ValueError(
                f"`encoder_tokens` and `decoder_tokens` ({length} and {decoder_length} per sample"
                f"{', packed' * packed}{', padded' * (padding is not None)}) must be as the model was built to train "
                f"on: {form.length} and {form.decoder_length}{', packed' * form.packed}{', padded' * form.padded}."
            )
        return "generation"
