"""Dispatch over the model families (GPT, T5, BERT), without torch."""

from __future__ import annotations

from .batch_shape import BatchSpec
from .bert import BertKeys
from .bert_slice import BertSlice, bert_slice
from .gpt import GPTKeys
from .slices import GPTSlice, gpt_slice
from .t5 import T5Keys
from .t5_slice import T5Slice, t5_slice

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
