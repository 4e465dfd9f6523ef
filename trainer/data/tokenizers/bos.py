"""The tokens before a document, as defined by the tokenizer: BOS, the EOS of the previous document, or none."""

from __future__ import annotations

from .sentencepiece_tokenizer import SentencePieceTokenizer
from .tokenizer import Tokenizer
from .tokenizer_json import JsonTokenizer


def text_start(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens before a text that a GPT continues or scores.

    The post-processor of a `tokenizer.json` defines them: BOS for Llama and Gemma, none for GPT-2, Qwen and SmolLM2. A
    SentencePiece model with a BOS token adds it. stoker's own tokenizers have no BOS: documents follow one another,
    each after the EOS of the previous one, so a text does too.
    """
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.post_processor_tokens()[0]
    if isinstance(tokenizer, SentencePieceTokenizer):
        return [] if tokenizer.special.bos is None else [tokenizer.special.bos]
    return [] if tokenizer.eos_id is None else [tokenizer.eos_id]
