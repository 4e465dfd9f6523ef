"""Cross-field rules for each model family; paths are relative to `model`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .bert import BertKeys
from .families import FamilyKeys
from .key_block import Finding
from .model_rules import gpt_rules, stack_rules
from .position_rules import (
    position_table_covers_sample,
    relative_buckets_are_valid,
    window_is_shorter_than_sequences,
    window_masks_nothing,
)
from .position_slices import BOUNDED_POSITION_TYPES
from .stack import StackKeys
from .t5 import T5Keys


def model_rules(keys: FamilyKeys) -> Iterator[Finding]:
    """All cross-field checks for a model of any family."""
    match keys:
        case T5Keys():
            yield from t5_rules(keys)
        case BertKeys():
            yield from bert_rules(keys)
        case _:
            yield from gpt_rules(keys)


def keys_by_stack(keys: FamilyKeys) -> dict[str, StackKeys]:
    """Return the keys of each stack by path prefix: `encoder.` and `decoder.` for T5, else the empty prefix."""
    return {"encoder.": keys.encoder, "decoder.": keys.decoder} if isinstance(keys, T5Keys) else {"": keys}


# ---------------------------------------------------------------- BERT


def bert_rules(keys: BertKeys) -> Iterator[Finding]:
    """All cross-field checks for BERT."""
    yield from stack_rules(keys, causal=False)
    yield from xpos_needs_causal_mask(keys)
    yield from position_table_covers_sample(keys)
    yield from window_is_shorter_than_sequences(keys)


def xpos_needs_causal_mask(keys: StackKeys) -> Iterator[Finding]:
    """Under xPos scores of later keys grow with their distance, so it needs a causal mask."""
    if keys.position_embedding_type == "xpos":
        yield Finding(
            "error",
            ("position_embedding_type",),
            "`position_embedding_type` (xpos) is not supported in a bidirectional stack: scores of later tokens would "
            "grow with their distance.",
            "use position_embedding_type=rope",
        )


# ---------------------------------------------------------------- T5


def t5_rules(keys: T5Keys) -> Iterator[Finding]:
    """All cross-field checks for T5."""
    for prefix, findings in (
        (
            "encoder.",
            [*stack_rules(keys.encoder, causal=False, is_t5=True), *xpos_needs_causal_mask(keys.encoder)],
        ),
        ("decoder.", stack_rules(keys.decoder, causal=True, is_t5=True)),
    ):
        for finding in findings:
            yield replace(finding, keys=tuple(f"{prefix}{key}" for key in finding.keys))
    yield from stacks_have_equal_width(keys)
    yield from position_tables_cover_samples(keys)
    yield from logit_scaling_needs_tied_head(keys)
    yield from encoder_window_is_shorter_than_sequences(keys)
    yield from cross_attention_bias_needs_relative_positions(keys)


def stacks_have_equal_width(keys: T5Keys) -> Iterator[Finding]:
    """Encoder and decoder need the same width for cross-attention and shared embeddings."""
    encoder, decoder = keys.encoder.hidden_size, keys.decoder.hidden_size
    if encoder != decoder:
        yield Finding(
            "error",
            ("decoder.hidden_size", "encoder.hidden_size"),
            f"`encoder.hidden_size` ({encoder}) and `decoder.hidden_size` ({decoder}) must be equal: the decoder "
            "attends to the encoder's output.",
            f"use model.decoder.hidden_size={encoder}, or model.encoder.hidden_size={decoder}",
        )


def position_tables_cover_samples(keys: T5Keys) -> Iterator[Finding]:
    """A learned position embedding of the encoder needs a row per token; other types have no table."""
    rows, tokens = keys.max_position_embeddings, keys.seq_length
    kinds = {part: stack.position_embedding_type for part, stack in keys_by_stack(keys).items()}
    if rows is None:
        return
    if kinds["encoder."].startswith("learned_") and rows < tokens:
        yield Finding(
            "error",
            ("max_position_embeddings", "seq_length"),
            f"`max_position_embeddings` ({rows}) must not be smaller than `seq_length` ({tokens}) with "
            f"`encoder.position_embedding_type` ({kinds['encoder.']}).",
            f"use model.max_position_embeddings={tokens} or null, or model.seq_length={rows}",
        )
    elif kinds["encoder."] in BOUNDED_POSITION_TYPES and rows < tokens:
        yield Finding(
            "warning",
            ("max_position_embeddings", "seq_length", "encoder.position_embedding_type"),
            f"`max_position_embeddings` ({rows}) has no effect on the encoder with `encoder.position_embedding_type` "
            f"({kinds['encoder.']}) and a longer `seq_length` ({tokens}).",
            f"use model.max_position_embeddings=null, or {tokens} or more",
        )
    elif rows != tokens and not any(kind in BOUNDED_POSITION_TYPES for kind in kinds.values()):
        yield Finding(
            "warning",
            ("max_position_embeddings", "encoder.position_embedding_type", "decoder.position_embedding_type"),
            f"`max_position_embeddings` ({rows}) has no effect with `position_embedding_type` "
            f"({', '.join(dict.fromkeys(kinds.values()))}).",
            "use model.max_position_embeddings=null",
        )


def logit_scaling_needs_tied_head(keys: T5Keys) -> Iterator[Finding]:
    """`scale_tied_logits` applies to a tied output head only."""
    if keys.scale_tied_logits and not keys.share_decoder_tokens_head_embeddings:
        yield Finding(
            "warning",
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
        yield Finding(
            "warning",
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
        yield Finding(
            "warning",
            ("decoder.relative_position_bias_self_attention_only", "decoder.position_embedding_type"),
            "`relative_position_bias_self_attention_only` (False) has no effect with `position_embedding_type` "
            f"({kind}).",
            "use model.decoder.position_embedding_type=relative",
        )
