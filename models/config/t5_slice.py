"""What the parts of a T5 need to know, derived once from its keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .position_slices import BOUNDED
from .slices import AttentionSlice, StackSlice, stack_slice, vocabulary_of
from .stack import StackKeys
from .t5 import T5Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class T5StackSlice:
    """One of the two stacks with what belongs to it alone.

    Attributes:
        stack: the stack.
        learned_positions: rows of its learned position table, None without one.
        positions_by_document: whether that table may be read by the position within a document.
        max_positions: the longest sequence it can take, None for any.
        embedding_dropout: dropout of the embeddings that go into it.
    """

    stack: StackSlice
    learned_positions: int | None
    positions_by_document: bool
    max_positions: int | None
    embedding_dropout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Slice:
    """An encoder-decoder.

    Attributes:
        encoder: the stack that sees both ways.
        decoder: the causal stack.
        cross_attention: of each layer of the decoder to the encoder's output.
        vocab_size: real tokens.
        padded_vocab_size: rows of the embedding tables and of the head.
        shared_embeddings: encoder and decoder have one table of token embeddings.
        tied: the head is the decoder's table.
        head_bias: a bias on the logits.
        output_scale: factor of the decoder's output before the head.
        embedding_std: deviation of the initial token embeddings.
        label_smoothing: share of a label that the other tokens get, in training.
        seed: of the initialisation.
        compile: compile each layer; None leaves it to the device.
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
        """Encoder and decoder."""
        return self.encoder.stack, self.decoder.stack


def t5_slice(keys: T5Keys, *, vocab_size: int, decoder_length: int) -> T5Slice:
    """The T5 the keys describe.

    Args:
        keys: what the model is.
        vocab_size: tokens of the tokenizer.
        decoder_length: tokens in a sample of the decoder.

    Raises:
        ValueError: `override_vocab_size` is smaller than the tokenizer's vocabulary.
    """
    real_vocab, padded_vocab = vocabulary_of(keys, vocab_size)
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
        stack=stack_slice(stack, causal=causal, positions=positions, of_t5=True),
        learned_positions=positions if kind.startswith("learned_") else None,
        positions_by_document=kind == "learned_absolute",
        max_positions=positions if kind in BOUNDED else None,
        embedding_dropout=stack.hidden_dropout if dropout is None else dropout,
    )


def _cross_attention(keys: T5Keys, of_decoder: AttentionSlice) -> AttentionSlice:
    """The decoder's attention without what looks at distances, which tokens of two texts have where it is asked for."""
    alone = keys.decoder.relative_position_bias_self_attention_only
    distance = (
        None if alone or of_decoder.distance is None or of_decoder.distance.kind != "relative" else of_decoder.distance
    )
    return replace(of_decoder, causal=False, window=None, distance=distance)
