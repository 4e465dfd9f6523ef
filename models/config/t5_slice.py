"""Resolved configuration of a T5, derived once from its keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .position_slices import BOUNDED_POSITION_TYPES
from .slices import AttentionSlice, StackSlice, resolve_vocab_sizes, stack_slice
from .stack import StackKeys
from .t5 import T5Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class T5StackSlice:
    """Encoder or decoder with its embeddings.

    Attributes:
        stack: the stack.
        learned_positions: rows of its learned position embedding, None without one.
        positions_by_document: positions may restart at each document of a packed sequence.
        max_positions: longest supported sequence, None if unlimited.
        embedding_dropout: dropout probability of its embeddings.
    """

    stack: StackSlice
    learned_positions: int | None
    positions_by_document: bool
    max_positions: int | None
    embedding_dropout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Slice:
    """Encoder-decoder.

    Attributes:
        encoder: the bidirectional stack.
        decoder: the causal stack.
        cross_attention: cross-attention of each decoder layer to the encoder's output.
        vocab_size: vocabulary size without padding.
        padded_vocab_size: rows of token embeddings and output head.
        shared_embeddings: encoder and decoder share the token embedding.
        tied: the output head shares the decoder's token embedding.
        head_bias: add a bias to the logits.
        output_scale: factor of the decoder's output before the head.
        embedding_std: standard deviation of the initial token embeddings.
        label_smoothing: share of the target spread over the other tokens in training.
        seed: seed of the initialization.
        compile: compile each layer; None decides by device.
    """

    encoder: T5StackSlice
    decoder: T5StackSlice
    cross_attention: AttentionSlice
    vocab_size: int
    padded_vocab_size: int
    shared_embeddings: bool
    tied: bool
    head_bias: bool
    output_scale: float
    embedding_std: float
    label_smoothing: float
    seed: int
    compile: bool | None

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
    real_vocab, padded_vocab = resolve_vocab_sizes(keys, vocab_size)
    decoder = _stack(keys, keys.decoder, causal=True, length=decoder_length)
    tied = keys.share_decoder_tokens_head_embeddings
    return T5Slice(
        encoder=_stack(keys, keys.encoder, causal=False, length=keys.seq_length),
        decoder=decoder,
        cross_attention=_cross_attention(keys, decoder.stack.attention),
        vocab_size=real_vocab,
        padded_vocab_size=padded_vocab,
        shared_embeddings=keys.share_token_embeddings,
        tied=tied,
        head_bias=keys.tokens_head_bias,
        output_scale=decoder.stack.hidden_size**-0.5 if tied and keys.scale_tied_logits else 1.0,
        embedding_std=keys.embedding_init_method_std or keys.encoder.init_method_std,
        label_smoothing=keys.label_smoothing,
        seed=keys.seed,
        compile=keys.compile,
    )


def _stack(keys: T5Keys, stack: StackKeys, *, causal: bool, length: int) -> T5StackSlice:
    kind = stack.position_embedding_type
    positions = max(length, keys.max_position_embeddings or 0)
    dropout = keys.embedding_dropout
    return T5StackSlice(
        stack=stack_slice(stack, causal=causal, positions=positions, is_t5=True),
        learned_positions=positions if kind.startswith("learned_") else None,
        positions_by_document=kind == "learned_absolute",
        max_positions=positions if kind in BOUNDED_POSITION_TYPES else None,
        embedding_dropout=stack.hidden_dropout if dropout is None else dropout,
    )


def _cross_attention(keys: T5Keys, self_attention: AttentionSlice) -> AttentionSlice:
    """Derive cross-attention from self-attention: no causal mask, no window, and only a `relative` bias, if set."""
    distance = self_attention.position_bias
    if keys.decoder.relative_position_bias_self_attention_only or (distance and distance.kind != "relative"):
        distance = None
    return replace(self_attention, causal=False, window=None, position_bias=distance)
