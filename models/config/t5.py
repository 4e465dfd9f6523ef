"""T5: encoder, decoder, their embeddings and the output head; keys, slice and rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import Field

from .dense_stack import AttentionSlice, is_own_block
from .extensions import load_extension
from .key_block import Finding, extension_field
from .model import EmbeddedStackSlice, ModelKeys, ModelSlice, embedded_stack, model_fields
from .position_rules import relative_buckets_are_valid, window_masks_nothing, xpos_needs_causal_mask
from .positions import BOUNDED_POSITION_TYPES, MAX_POSITIONS
from .stack import StackKeys, StackSlice, stack_rules


class T5StackKeys(StackKeys):
    """Keys of a stack of a T5, whose defaults of mixture of experts are NeMo's."""

    is_t5: ClassVar[bool] = True


class DecoderKeys(T5StackKeys):
    """`model.decoder.*`: the decoder stack, whose attention keys apply to its cross-attention too."""

    relative_position_bias_self_attention_only: bool = True
    """With `relative`: no bias in cross-attention; False: a separate bidirectional bias for cross-attention."""


class T5Keys(ModelKeys):
    """`model.*` for `model.family: t5`, except batching, data and optimization."""

    encoder: T5StackKeys = T5StackKeys.model_validate({})
    """The encoder stack, bidirectional."""
    decoder: DecoderKeys = DecoderKeys.model_validate({})
    """The decoder stack, causal."""
    seq_length: int = Field(512, ge=1, le=MAX_POSITIONS)
    """Sequence length of the encoder in tokens; that of the decoder is `data.seq_length_dec`."""
    max_position_embeddings: int | None = Field(None, ge=1, le=MAX_POSITIONS)
    """Rows of the learned position embedding of each stack; null: its sequence length."""
    share_token_embeddings: bool = True
    """Share the token embedding between encoder and decoder."""
    share_decoder_tokens_head_embeddings: bool = True
    """Tie the output head to the decoder's token embedding."""
    tokens_head_bias: bool = True
    """Add a bias to the logits."""
    scale_tied_logits: bool = extension_field(False)
    """Multiply the decoder's output by hidden_size ** -0.5 before the tied head (Hugging Face's T5 v1.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Slice(ModelSlice):
    """Encoder-decoder.

    Attributes:
        encoder: the bidirectional stack.
        decoder: the causal stack.
        cross_attention: cross-attention of each decoder layer to the encoder's output.
        shared_embeddings: encoder and decoder share the token embedding.
        head_bias: add a bias to the logits.
        output_scale: factor of the decoder's output before the head.
    """

    encoder: EmbeddedStackSlice
    decoder: EmbeddedStackSlice
    cross_attention: AttentionSlice
    shared_embeddings: bool
    head_bias: bool
    output_scale: float

    @property
    def stacks(self) -> tuple[StackSlice, StackSlice]:
        """All stacks: encoder and decoder."""
        return self.encoder.stack, self.decoder.stack


def t5_slice(keys: T5Keys, *, vocab_size: int, decoder_length: int) -> T5Slice:
    """Resolve the keys of a T5.

    Args:
        keys: configuration of the model.
        vocab_size: vocabulary size of the tokenizer.
        decoder_length: sequence length of the decoder.

    Raises:
        ValueError: `override_vocab_size` is smaller than the tokenizer's vocabulary.
    """
    rows = keys.max_position_embeddings or 0
    encoder = embedded_stack(keys.encoder, keys, causal=False, positions=max(keys.seq_length, rows))
    decoder = embedded_stack(keys.decoder, keys, causal=True, positions=max(decoder_length, rows))
    tied = keys.share_decoder_tokens_head_embeddings
    return T5Slice(
        **model_fields(keys, keys.encoder, vocab_size),
        encoder=encoder,
        decoder=decoder,
        cross_attention=_cross_attention(keys, decoder.stack.attention),
        shared_embeddings=keys.share_token_embeddings,
        tied=tied,
        head_bias=keys.tokens_head_bias,
        output_scale=decoder.stack.hidden_size**-0.5 if tied and keys.scale_tied_logits else 1.0,
    )


def _cross_attention(keys: T5Keys, self_attention: AttentionSlice) -> AttentionSlice:
    """Derive cross-attention from self-attention: no causal mask, no window, and only a `relative` bias, if set."""
    distance = self_attention.position_bias
    if keys.decoder.relative_position_bias_self_attention_only or (distance and distance.kind != "relative"):
        distance = None
    return replace(self_attention, causal=False, window=None, position_bias=distance)


# ---------------------------------------------------------------- rules


def t5_rules(keys: T5Keys) -> Iterator[Finding]:
    """All cross-field checks for T5."""
    for prefix, findings in (
        (
            "encoder.",
            [*stack_rules(keys.encoder, causal=False), *xpos_needs_causal_mask(keys.encoder)],
        ),
        ("decoder.", stack_rules(keys.decoder, causal=True)),
    ):
        for finding in findings:
            yield replace(finding, keys=tuple(f"{prefix}{key}" for key in finding.keys))
    yield from stacks_have_equal_width(keys)
    yield from position_tables_cover_samples(keys)
    yield from logit_scaling_needs_tied_head(keys)
    yield from encoder_window_is_shorter_than_sequences(keys)
    yield from cross_attention_bias_needs_relative_positions(keys)
    yield from decoder_block_has_cross_attention(keys)


def decoder_block_has_cross_attention(keys: T5Keys) -> Iterator[Finding]:
    """A block of a user's own in the decoder attends to the encoder."""
    kind = keys.decoder.transformer_block_type
    if is_own_block(kind) and not getattr(load_extension("block", kind), "has_cross_attention", False):
        yield Finding.error(
            ("decoder.transformer_block_type",),
            f"`decoder.transformer_block_type` ({kind}) has no cross-attention (`has_cross_attention` is not True), "
            "which the decoder of a T5 needs.",
            "use it in model.encoder, or give the class `has_cross_attention = True` and call "
            "`branches.cross_attention`",
        )


def stacks_have_equal_width(keys: T5Keys) -> Iterator[Finding]:
    """Encoder and decoder need the same width for cross-attention and shared embeddings."""
    encoder, decoder = keys.encoder.hidden_size, keys.decoder.hidden_size
    if encoder != decoder:
        yield Finding.error(
            ("decoder.hidden_size", "encoder.hidden_size"),
            f"`encoder.hidden_size` ({encoder}) and `decoder.hidden_size` ({decoder}) must be equal: the decoder "
            "attends to the encoder's output.",
            f"use model.decoder.hidden_size={encoder}, or model.encoder.hidden_size={decoder}",
        )


def position_tables_cover_samples(keys: T5Keys) -> Iterator[Finding]:
    """A learned position embedding of the encoder needs a row per token; other types have no table."""
    rows, tokens = keys.max_position_embeddings, keys.seq_length
    kinds = keys.encoder.position_embedding_type, keys.decoder.position_embedding_type
    if rows is None:
        return
    if kinds[0].startswith("learned_") and rows < tokens:
        yield Finding.error(
            ("max_position_embeddings", "seq_length"),
            f"`max_position_embeddings` ({rows}) must not be smaller than `seq_length` ({tokens}) with "
            f"`encoder.position_embedding_type` ({kinds[0]}).",
            f"use model.max_position_embeddings={tokens} or null, or model.seq_length={rows}",
        )
    elif kinds[0] in BOUNDED_POSITION_TYPES and rows < tokens:
        yield Finding.warning(
            ("max_position_embeddings", "seq_length", "encoder.position_embedding_type"),
            f"`max_position_embeddings` ({rows}) has no effect on the encoder with `encoder.position_embedding_type` "
            f"({kinds[0]}) and a longer `seq_length` ({tokens}).",
            f"use model.max_position_embeddings=null, or {tokens} or more",
        )
    elif rows != tokens and not any(kind in BOUNDED_POSITION_TYPES for kind in kinds):
        yield Finding.warning(
            ("max_position_embeddings", "encoder.position_embedding_type", "decoder.position_embedding_type"),
            f"`max_position_embeddings` ({rows}) has no effect with `position_embedding_type` "
            f"({', '.join(dict.fromkeys(kinds))}).",
            "use model.max_position_embeddings=null",
        )


def logit_scaling_needs_tied_head(keys: T5Keys) -> Iterator[Finding]:
    """`scale_tied_logits` applies to a tied output head only."""
    if keys.scale_tied_logits and not keys.share_decoder_tokens_head_embeddings:
        yield Finding.warning(
            ("scale_tied_logits", "share_decoder_tokens_head_embeddings"),
            "`scale_tied_logits` (True) has no effect with an untied output head "
            "(`share_decoder_tokens_head_embeddings` is False).",
            "use model.scale_tied_logits=false",
        )


def encoder_window_is_shorter_than_sequences(keys: T5Keys) -> Iterator[Finding]:
    """A window as long as the longest encoder sequence masks nothing; decoder lengths are a matter of the data keys."""
    if keys.encoder.position_embedding_type not in BOUNDED_POSITION_TYPES:
        return
    longest = max(keys.seq_length, keys.max_position_embeddings or 0)
    if window_masks_nothing(keys.encoder, causal=False, longest=longest):
        yield Finding.warning(
            ("encoder.window_size", "seq_length", "max_position_embeddings"),
            f"`encoder.window_size` ({keys.encoder.window_size}) has no effect: no encoder sequence is longer than "
            f"{longest} tokens (`seq_length`, `max_position_embeddings`).",
            "use model.encoder.window_size=null",
        )


def cross_attention_bias_needs_relative_positions(keys: T5Keys) -> Iterator[Finding]:
    """A position bias in cross-attention needs T5's bidirectional relative positions."""
    kind = keys.decoder.position_embedding_type
    if keys.decoder.relative_position_bias_self_attention_only:
        return
    if kind == "relative":
        for finding in relative_buckets_are_valid(keys.decoder, causal=False):
            yield replace(finding, keys=tuple(f"decoder.{key}" for key in finding.keys))
    else:
        yield Finding.warning(
            ("decoder.relative_position_bias_self_attention_only", "decoder.position_embedding_type"),
            "`relative_position_bias_self_attention_only` (False) has no effect with `position_embedding_type` "
            f"({kind}).",
            "use model.decoder.position_embedding_type=relative",
        )
