"""T5: encoder-decoder of embeddings, a bidirectional encoder, a causal decoder with cross-attention, and a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.attention.dispatch import BackendSelection
from ..kernels.autocast import autocast_dtype
from .config.batch_shape import BatchSpec
from .config.t5 import T5Slice
from .dispatch.attention_calls import CallKind, decision_for
from .language_model import BaseLanguageModel, TokenEmbedding
from .layers.attention import Backends
from .layers.attention_bias import CrossRelativeBias, position_bias_parameters
from .layers.compiling import eager_layers
from .layers.context import Memory
from .layers.cost import StackInputs, Weights
from .layers.dropout import token_places
from .layers.position_embeddings import build_position_table
from .lm_head import add_position_embeddings, head_weights
from .moe.moe_layer import find_moe_layers
from .moe.token_mask import mask_documents_with_label, mask_rows_with_label
from .parallel.context import labels_of_all, local_position_ids, whole_sequences
from .parallel.context_attention import pack_cross_documents, pack_documents
from .parallel.stages import StageInput
from .peft.ptuning import PromptEncoder
from .stack import build_stack


class EncoderOutput(NamedTuple):
    """Encoder output of a batch.

    Attributes:
        hidden: output of the encoder's final norm, (batch, tokens, hidden_size).
        padding: bool (batch, tokens), True for real tokens; None: all are real. On context-parallel ranks that of whole
            sequences.
        tokens: place of each token in the micro batch, as in `StackDropout`; None outside training.
    """

    hidden: Tensor
    padding: Tensor | None
    tokens: Tensor | None = None


class T5(BaseLanguageModel):
    """Encoder-decoder language model, of which logits and loss are those of the decoder.

    Args:
        t5: slice of the model.
        batch_spec: shape of the samples of training and evaluation.
        decisions: chosen attention backend and reason by label (`PlannedAttention.label`).
        backends: attention function for each kind of call, of `encoder`, `decoder` and `cross`.

    Attributes:
        token_embedding: of the encoder or of both stacks.
        decoder_token_embedding: separate embedding of the decoder; None shares `token_embedding`.
        encoder_position_embedding: learned position embedding of the encoder, or None.
        decoder_position_embedding: learned position embedding of the decoder, or None.
        cross_positions: relative position bias of the cross-attention, or None.
        head: bias-free output projection; None ties it to the decoder's token embedding.
        output_scale: factor of the decoder's output before the head.
        max_positions: maximal sequence lengths of encoder and decoder, None for no limit.
        dropouts: dropout of the embeddings of encoder and decoder, in training.
        prompt: p-tuning prompt encoder of the encoder's input; None without.
    """

    def __init__(
        self,
        t5: T5Slice,
        batch_spec: BatchSpec,
        decisions: Mapping[str, BackendSelection],
        backends: Mapping[str, Backends],
    ) -> None:
        super().__init__(t5, batch_spec, decisions)
        vocab, hidden_size, cross = t5.padded_vocab_size, t5.encoder.stack.hidden_size, t5.cross_attention
        self.token_embedding = TokenEmbedding(vocab, hidden_size)
        self.decoder_token_embedding: nn.Embedding | None = (
            None if t5.shared_embeddings else TokenEmbedding(vocab, hidden_size)
        )
        self.encoder_position_embedding = build_position_table(t5.encoder)
        self.decoder_position_embedding = build_position_table(t5.decoder)
        self.encoder = build_stack(t5.encoder.stack, backends.get("encoder", {}))
        self.decoder = build_stack(t5.decoder.stack, backends.get("decoder", {}), cross, backends.get("cross", {}))
        bias = cross.position_bias
        self.cross_positions = (
            None
            if bias is None
            else CrossRelativeBias(cross.heads, buckets=bias.buckets, max_distance=bias.max_distance)
        )
        self.head = None if t5.tied else nn.Linear(hidden_size, vocab, bias=False)
        self.head_bias = nn.Parameter(torch.zeros(vocab)) if t5.head_bias else None
        self.output_scale = t5.output_scale
        self.max_positions = t5.encoder.max_positions, t5.decoder.max_positions
        self.dropouts = t5.encoder.embedding_dropout, t5.decoder.embedding_dropout
        self.prompt: PromptEncoder | None = None
        self._encoder_has_experts = bool(find_moe_layers(self.encoder))
        self._decoder_has_experts = bool(find_moe_layers(self.decoder))

    @property
    def output_embedding(self) -> nn.Embedding:
        """Token embedding of the decoder."""
        return self.token_embedding if self.decoder_token_embedding is None else self.decoder_token_embedding

    def forward(
        self,
        encoder_tokens: Tensor,
        decoder_tokens: Tensor,
        *,
        encoder_padding: Tensor | None = None,
        encoder_documents: Tensor | None = None,
        decoder_documents: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of every next token of the decoder.

        Args:
            encoder_tokens: (batch, tokens) int64.
            decoder_tokens: (batch, tokens) int64; the label of each is the next token.
            encoder_padding: bool, like `encoder_tokens`, True for real tokens; None: all are real.
            encoder_documents: document id of each token, non-decreasing in each row, int32, like `encoder_tokens`.
                Required in training and evaluation by a model built for packed samples; None: each row is one document.
            decoder_documents: document ids of `decoder_tokens`; a decoder document attends to the encoder document of
                the same id.

        Returns:
            (batch, tokens, padded_vocab_size) in the dtype of the model; -inf for the vocabulary padding.
        """
        hidden = self.hidden_states(
            encoder_tokens,
            decoder_tokens,
            encoder_padding=encoder_padding,
            encoder_documents=encoder_documents,
            decoder_documents=decoder_documents,
        )
        return self.compute_logits(hidden)

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
        """Return the sum of the cross-entropies of all labels divided by `denominator`.

        Args:
            labels: (batch, tokens) int64, the next token of each of `decoder_tokens`; -100 is ignored.
            denominator: usually the number of labels in the global batch, so that micro batch losses add up.

        Other arguments as in `forward`.

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
            decoder_routed=self._decoder_routed(labels),
        )
        return self._loss(hidden, labels, denominator)

    def batch_loss(self, batch: Mapping[str, Tensor], denominator: Tensor | float) -> Tensor:
        """Return the loss of a batch, a mapping of the tensor arguments of `loss`."""
        return self.loss(**batch, denominator=denominator)

    def run_stage(self, at: StageInput, batch: Mapping[str, Tensor], denominator: Tensor | float) -> tuple[Tensor, ...]:
        """Return the output of a pipeline stage, the input of the next one, or (loss,) of the last stage.

        Decoder stages pass on the encoder's output, whose gradient is the sum of those of all of them.

        Args:
            at: the stage, and what it receives.
            batch: as in `batch_loss`.
            denominator: as in `loss`.
        """
        tokens, decoder_tokens, labels = (batch[name] for name in ("encoder_tokens", "decoder_tokens", "labels"))
        padding, documents = batch.get("encoder_padding"), batch.get("encoder_documents")
        decoder_documents = batch.get("decoder_documents")
        lengths = self._whole_lengths(tokens, decoder_tokens)
        kind = self._kind_of_call(*lengths, padding, documents, decoder_documents)
        if at.stage.stack == 0:
            routed = self._encoder_routed(tokens, labels, padding, documents, decoder_documents)
            return (self._run_encoder(tokens, padding, documents, kind, routed, at).hidden,)
        self.encoder.draw_dropout(tokens.shape, tokens.device, self.dropouts[0])  # drawn before those of the decoder
        shard = self.encoder.shard
        places = token_places(tokens.shape, shard, tokens.device) if self.training else None
        received = at.received[-1]
        # of their own: gradients of the layers are summed before that of the stages behind is added, as by CUDA graphs
        encoded = EncoderOutput(received.view_as(received), whole_sequences(padding, shard), places)
        routed = self._decoder_routed(labels)
        hidden = self._run_decoder(decoder_tokens, encoded, documents, decoder_documents, kind, routed, at)
        return (self._loss(hidden, labels, denominator),) if at.stage.last else (hidden, received)

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
        """Return the input of the output projection, (batch, tokens, hidden_size).

        Args:
            encoder_routed: bool, like `encoder_tokens` of whole sequences, True for tokens that are routed to experts;
                None: those of `encoder_padding`, as in generation.
            decoder_routed: bool, like `decoder_tokens` of whole sequences; None: all tokens are routed.

        Other arguments as in `forward`.
        """
        lengths = self._whole_lengths(encoder_tokens, decoder_tokens)
        kind = self._kind_of_call(*lengths, encoder_padding, encoder_documents, decoder_documents)
        if kind == "generation":
            return self.decode(decoder_tokens, self.encode(encoder_tokens, encoder_padding))
        encoded = self._run_encoder(encoder_tokens, encoder_padding, encoder_documents, kind, encoder_routed)
        documents = encoder_documents, decoder_documents
        return self._run_decoder(decoder_tokens, encoded, *documents, kind, decoder_routed)

    def encode(self, tokens: Tensor, padding: Tensor | None = None) -> EncoderOutput:
        """Encode sequences of any length, for generation.

        Args:
            tokens: (batch, tokens) int64.
            padding: bool (batch, tokens), True for real tokens; None: all are real.
        """
        self._check_length("encoder", tokens.shape[1], self.max_positions[0])
        if tokens.shape[1] == 1:  # Backends need not support one token: add one of padding.
            real = torch.ones_like(tokens, dtype=torch.bool) if padding is None else padding
            tokens, padding = F.pad(tokens, (0, 1)), F.pad(real, (0, 1), value=False)
        with eager_layers(self.compiled):
            return self._run_encoder(tokens, padding, None, "generation")

    def decode(self, tokens: Tensor, encoded: EncoderOutput) -> Tensor:
        """Return the head's input for decoder tokens of any length, (batch, tokens, hidden_size), for generation.

        Args:
            tokens: (batch, tokens) int64.
            encoded: encoder output of the same batch.
        """
        length = tokens.shape[1]
        self._check_length("decoder", length, self.max_positions[1])
        if length == 1:  # Backends need not support one token: pad by another, which a causal model does not attend to.
            tokens = F.pad(tokens, (0, 1))
        with eager_layers(self.compiled):
            return self._run_decoder(tokens, encoded, None, None, "generation")[:, :length]

    def _whole_lengths(self, encoder_tokens: Tensor, decoder_tokens: Tensor) -> tuple[int, int]:
        """Return the lengths of whole sequences of encoder and decoder."""
        pairs = ((encoder_tokens, self.encoder.shard), (decoder_tokens, self.decoder.shard))
        first, second = (
            tokens.shape[1] if shard is None else shard.whole_length(tokens.shape[1]) for tokens, shard in pairs
        )
        return first, second

    def _decoder_routed(self, labels: Tensor) -> Tensor | None:
        """Return the mask of decoder tokens that are routed to experts; None without experts.

        Only padding has no label; any kind of sample may have some, for example with a large `seq_length_dec`.
        """
        return labels_of_all(labels, self.decoder.shard) if self._decoder_has_experts else None

    def _encoder_routed(
        self,
        tokens: Tensor,
        labels: Tensor,
        padding: Tensor | None,
        documents: Tensor | None,
        decoder_documents: Tensor | None,
    ) -> Tensor | None:
        """Return the mask of encoder tokens that are routed to experts; None: those of `padding`."""
        if not self._encoder_has_experts:
            return None
        shard, of_decoder = self.encoder.shard, self.decoder.shard
        documents, decoder_documents = (
            whole_sequences(documents, shard),
            whole_sequences(decoder_documents, of_decoder),
        )
        if documents is not None and decoder_documents is not None:
            return mask_documents_with_label(documents, labels_of_all(labels, of_decoder), decoder_documents)
        if self.training and padding is None:  # in evaluation, windows and batches may be partial
            return None
        length = tokens.shape[1] if shard is None else shard.whole_length(tokens.shape[1])
        return mask_rows_with_label(length, labels_of_all(labels, of_decoder), whole_sequences(padding, shard))

    def _run_encoder(
        self,
        tokens: Tensor,
        padding: Tensor | None,
        documents: Tensor | None,
        kind: CallKind,
        routed: Tensor | None = None,
        at: StageInput | None = None,
    ) -> EncoderOutput:
        positions, packed = None, None
        decision = decision_for(self.attention_decisions, f"encoder {kind}")
        prompt, shard = self.prompt, self.encoder.shard
        if prompt is not None:
            padding, routed = prompt.extend_padding_mask(padding), prompt.extend_routing_mask(routed)
        padding = whole_sequences(padding, shard)
        if documents is not None:
            documents = documents if shard is None else shard.gather(documents)
            positions = local_position_ids(documents, shard)

        def embed() -> Tensor:
            embedded = self.token_embedding(tokens)
            embedded = embedded if prompt is None else prompt(embedded)
            return add_position_embeddings(embedded, self.encoder_position_embedding, positions, shard)

        hidden, dropout = self.encoder.begin(embed, tokens, self.dropouts[0], at)
        if documents is not None:
            dtype, mask = self.encoder.compute_dtype(hidden), decision.needs_mask
            packed = pack_documents(documents, shard, dtype=dtype, causal=False, with_mask=mask)
        hidden = self.encoder(
            hidden,
            kind,
            positions=positions,
            packed=packed,
            padding=padding,
            routed=routed,
            dropout=dropout,
            at=at,
            shape=tokens.shape,
        )
        whole = self.training and at is None
        return EncoderOutput(hidden, padding, token_places(hidden.shape[:2], shard, tokens.device) if whole else None)

    def _run_decoder(
        self,
        tokens: Tensor,
        encoded: EncoderOutput,
        encoder_documents: Tensor | None,
        documents: Tensor | None,
        kind: CallKind,
        routed: Tensor | None = None,
        at: StageInput | None = None,
    ) -> Tensor:
        positions, packed, cross_packed = None, None, None
        decision = decision_for(self.attention_decisions, f"decoder {kind}")
        cross_decision = decision_for(self.attention_decisions, f"cross {kind}")
        shard, encoder_shard = self.decoder.shard, self.encoder.shard
        shards = None if shard is None or encoder_shard is None else (shard, encoder_shard)
        if documents is not None and encoder_documents is not None:
            if shard is not None and shards is not None:
                documents, encoder_documents = shard.gather(documents), shards[1].gather(encoder_documents)
            positions, dtype = local_position_ids(documents, shard), autocast_dtype(encoded.hidden)
            packed = pack_documents(documents, shard, dtype=dtype, causal=True, with_mask=decision.needs_mask)
            mask = cross_decision.needs_mask
            cross_packed = pack_cross_documents(documents, encoder_documents, shards, dtype=dtype, with_mask=mask)
        terms = None
        if self.cross_positions is not None:
            ranks = 1 if shard is None else shard.ranks.size
            terms = self.cross_positions(ranks * tokens.shape[1], ranks * encoded.hidden.shape[1]).distance_bias

        def embed() -> Tensor:
            embedded = self.output_embedding(tokens)
            return add_position_embeddings(embedded, self.decoder_position_embedding, positions, shard)

        hidden, dropout = self.decoder.begin(embed, tokens, self.dropouts[1], at)
        memory = Memory(encoded.hidden, encoded.padding, cross_packed, terms, encoded.tokens)
        hidden = self.decoder(
            hidden,
            kind,
            positions=positions,
            packed=packed,
            routed=routed,
            memory=memory,
            dropout=dropout,
            at=at,
            shape=tokens.shape,
        )
        if self.output_scale == 1.0 or (at is not None and not at.stage.ends):
            return hidden
        return hidden * self.output_scale

    def _check_length(self, part: str, length: int, longest: int | None) -> None:
        if length < 1 or (longest is not None and length > longest):
            raise ValueError(
                f"`{part}_tokens` ({length} per sample) must be from 1 to {longest or 'any number of'} tokens long; "
                "truncate the sequence, or build the model with a larger max_position_embeddings."
            )

    def _kind_of_call(
        self,
        length: int,
        decoder_length: int,
        padding: Tensor | None,
        encoder_documents: Tensor | None,
        decoder_documents: Tensor | None,
    ) -> CallKind:
        """Return the kind of call: training and evaluation have fixed sample shapes, anything else is generation."""
        form = self.batch_spec
        if (encoder_documents is None) != (decoder_documents is None):
            raise ValueError("`encoder_documents` and `decoder_documents` must be given together.")
        packed = encoder_documents is not None
        if packed and not form.packed:
            raise ValueError("`encoder_documents` must be None: the model was not built for packed samples.")
        if packed and padding is not None:
            raise ValueError(
                "`encoder_padding` must be None with `encoder_documents`: padding is a document of its own."
            )
        expected = (form.seq_length, form.decoder_seq_length) == (length, decoder_length) and packed == form.packed
        if expected and (padding is None or form.padded):
            return "training" if self.training else "evaluation"
        if self.training or packed:
            raise ValueError(
                f"`encoder_tokens` and `decoder_tokens` ({length} and {decoder_length} per sample"
                f"{', packed' * packed}{', padded' * (padding is not None)}) must have the shape that the model was "
                f"built for: {form.seq_length} and {form.decoder_seq_length}{', packed' * form.packed}"
                f"{', padded' * form.padded}."
            )
        return "generation"


# ---------------------------------------------------------------- cost


def t5_outer_weights(model: T5Slice) -> Weights:
    """Return the weights of embeddings and head, and of the position bias of cross-attention, as far as the part of a
    model has them.
    """
    vocab, hidden = model.padded_vocab_size, model.encoder.stack.hidden_size
    encoder, decoder = model.encoder.stack, model.decoder.stack
    tables = encoder.begins + decoder.begins - (encoder.begins and decoder.begins and model.shared_embeddings)
    # the head, if it is tied, is one of the token embeddings
    tables -= decoder.ends and model.tied and (decoder.begins or (encoder.begins and model.shared_embeddings))
    positions = (model.encoder.learned_positions or 0) * encoder.begins
    positions += (model.decoder.learned_positions or 0) * decoder.begins
    others = (vocab * tables + positions) * hidden + vocab * (model.head_bias and decoder.ends)
    others += position_bias_parameters(model.cross_attention) if decoder.num_layers else 0
    return (head_weights(vocab, hidden) if decoder.ends else Weights()) + Weights(others=others)


def encoder_output_bytes(inputs: StackInputs) -> int:
    """Return the bytes of the encoder's output, which every decoder layer reads, given either of the stacks."""
    widths, tokens = inputs.widths, inputs.tokens if inputs.cross is None else inputs.encoder_tokens
    return tokens * inputs.stack.hidden_size * (widths.residual + (widths.compute if widths.casts_weights else 0))
