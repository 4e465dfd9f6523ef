"""What a text begins with, by the rule of its tokenizer: a bos, or the end of an earlier document, or nothing."""

from __future__ import annotations

from .sentencepiece_tokenizer import SentencePieceTokenizer
from .tokenizer import Tokenizer
from .tokenizer_json import JsonTokenizer


def text_start(tokenizer: Tokenizer) -> list[int]:
    """The tokens before a text that a GPT continues or scores.

    A `tokenizer.json` says it itself, in its post-processor: Llama's and Gemma's put a bos there, those of GPT-2, Qwen
    and SmolLM2 put nothing. A SentencePiece model that has a bos puts it there. stoker's own schemes have none; with
    them documents follow one another, each after the eos of the one before, and so a text does.
    """
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.added_tokens()[0]
    if isinstance(tokenizer, SentencePieceTokenizer):
        return [] if tokenizer.special.bos is None else [tokenizer.special.bos]
    return [] if tokenizer.eos_id is None else [tokenizer.eos_id]
