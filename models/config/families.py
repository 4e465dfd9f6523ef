"""Dispatch over the model families (GPT, T5, BERT), without torch."""

from __future__ import annotations

from collections.abc import Iterator

from .batch_shape import BatchSpec
from .bert import BertKeys, BertSlice, bert_slice
from .gpt import GPTKeys, GPTSlice, gpt_slice
from .key_block import Finding
from .model import single_stack_rules
from .stack import StackKeys
from .t5 import T5Keys, T5Slice, t5_rules, t5_slice

FamilyKeys = GPTKeys | T5Keys | BertKeys
FamilySlice = GPTSlice | T5Slice | BertSlice


def family_slice(keys: FamilyKeys, *, vocab_size: int, batch_spec: BatchSpec) -> FamilySlice:
    """Resolve the keys of a model of any family.

    Args:
        keys: configuration of the model.
        vocab_size: vocabulary size of the tokenizer.
        batch_spec: shape of the samples of training and evaluation.

    Raises:
        ValueError: `override_vocab_size` is smaller than the tokenizer's vocabulary.
    """
    match keys:
        case T5Keys():
            return t5_slice(keys, vocab_size=vocab_size, decoder_length=batch_spec.decoder_seq_length)
        case BertKeys():
            return bert_slice(keys, vocab_size=vocab_size)
        case _:
            return gpt_slice(keys, vocab_size=vocab_size)


def sequence_length_of(keys: FamilyKeys) -> int:
    """Return the sequence length, for T5 that of the encoder."""
    return keys.seq_length if isinstance(keys, T5Keys) else keys.encoder_seq_length


def model_rules(keys: FamilyKeys) -> Iterator[Finding]:
    """All cross-field checks for a model of any family."""
    match keys:
        case T5Keys():
            yield from t5_rules(keys)
        case _:
            yield from single_stack_rules(keys, causal=not isinstance(keys, BertKeys))


def keys_by_stack(keys: FamilyKeys) -> dict[str, StackKeys]:
    """Return the keys of each stack by path prefix: `encoder.` and `decoder.` for T5, else the empty prefix."""
    return {"encoder.": keys.encoder, "decoder.": keys.decoder} if isinstance(keys, T5Keys) else {"": keys}


def without_transformer_engine(keys: FamilyKeys) -> str:
    """Return the overrides with which a model that asks for TransformerEngine runs without it."""
    stacks = (at for at, stack in keys_by_stack(keys).items() if stack.transformer_engine)
    found = [f"model.{at}transformer_engine=null" for at in stacks]
    if keys.fp8 and keys.fp8_recipe == "delayed":
        found.append("model.fp8_recipe=tensorwise")
    if keys.fp8 and keys.fp8_dot_product_attention:
        found.append("model.fp8_dot_product_attention=false")
    return " ".join(found)


def name_stacks(message: str, keys: FamilyKeys) -> str:
    """Return an error message whose cure is `transformer_engine=null` with the overrides for it in every stack."""
    return message.replace("use transformer_engine=null", f"use {without_transformer_engine(keys)}")
