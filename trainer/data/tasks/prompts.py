"""Tokenize prompts with an answer, formatted by a template, with NeMo's truncation and special tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...config.prompt_template import PromptTemplate, Record
from ...utils.errors import UserError
from ..datasets.sft_examples import Example
from ..sources.jsonl import CONTEXT_KEY, LABEL_KEY, text_field
from ..sources.text_pairs import encode_texts
from ..tokenizers.tokenizer import PieceTokenizer, TokenIds, Tokenizer


def read_record(record: Mapping[str, Any], location: str, names: Sequence[str], named_by: str = "") -> dict[str, str]:
    """Return the fields of an object that a template uses, the answer last.

    Args:
        named_by: the key of the template; empty for `context_key` and `label_key`.

    Raises:
        UserError: a field is missing, or the object is a conversation.
    """
    for key in ("messages", "conversations"):
        if isinstance(record.get(key), list) and not any(name in record for name in names):
            raise UserError(f"{location} is a conversation (`{key}`), not a prompt with an answer; use data=chat")
    keys = dict.fromkeys(names[:-1], named_by or CONTEXT_KEY) | {names[-1]: named_by or LABEL_KEY}
    return {name: text_field(record, name, location, keys[name]).strip(" ") for name in names}


@dataclass(frozen=True)
class PromptEncoder:
    """Convert records to token ids with a loss mask.

    Attributes:
        template: formats prompt and answer.
        prefix_ids: token ids before a prompt.
        suffix_ids: token ids after an answer: EOS, or none.
        answer_only: only the answer and its EOS are predicted.
        length: S, tokens in a row.
        truncation_fields: fields that are truncated if a record is longer than a row; after that, answers at their end.
        truncation_side: side on which those fields are truncated.
    """

    template: PromptTemplate
    tokenizer: Tokenizer
    prefix_ids: Sequence[int]
    suffix_ids: Sequence[int]
    answer_only: bool
    length: int
    truncation_fields: Sequence[str] = ()
    truncation_side: Literal["left", "right"] = "right"

    def examples(self, records: Sequence[Record]) -> Iterator[Example]:
        """Yield the records as tokens, with fields truncated to fit a row as far as possible.

        Raises:
            UserError: a text cannot be tokenized; the message gives the number of its record.
        """
        prompts = [self.template.prompt(record) for record in records]
        answers = [self.template.answer(record) for record in records]
        drop_space = _adds_prefix_space(self.tokenizer)
        prompt_ids = encode_texts(prompts, self.tokenizer, "prompt")
        answer_ids = encode_texts(
            [answer.removeprefix(" ") if drop_space else answer for answer in answers], self.tokenizer, "answer"
        )
        for record, prompt, text, answer in zip(records, prompt_ids, prompts, answer_ids, strict=True):
            excess = len(self.prefix_ids) + len(prompt) + len(answer) + len(self.suffix_ids) - (self.length + 1)
            if excess > 0 and self.truncation_fields:
                prompt = self._truncated(record, excess, drop_space)
            tokens = np.concatenate([self.prefix_ids, prompt, answer, self.suffix_ids]).astype(answer.dtype)
            prompt_length = len(self.prefix_ids) + len(prompt)
            counted: NDArray[np.bool_] = np.arange(len(tokens)) >= (prompt_length if self.answer_only else 1)
            yield Example(tokens, counted, prompt_length, text, self.template.answer(record).strip(" "))

    def _truncated(self, record: Record, excess: int, drop_space: bool) -> TokenIds:
        """Return a prompt without `excess` tokens, which are removed from the fields in equal parts, as in NeMo."""
        segments = list(self.template.segments(record))
        texts = [text.removeprefix(" ") if drop_space and number else text for number, (text, _) in enumerate(segments)]
        ids = self.tokenizer.encode_batch(texts)
        fields = [number for number, (_, name) in enumerate(segments) if name in self.truncation_fields]
        for rank, number in enumerate(fields):
            removed = min(excess // len(fields) + (rank < excess % len(fields)), len(ids[number]))
            kept = len(ids[number]) - removed
            ids[number] = ids[number][:kept] if self.truncation_side == "right" else ids[number][removed:]
        return np.concatenate(ids)


def _adds_prefix_space(tokenizer: Tokenizer) -> bool:
    """Return True if a tokenizer adds a space before every text, which would double one that is already there."""
    return isinstance(tokenizer, PieceTokenizer) and tokenizer.decode_bytes(tokenizer.encode("a")).startswith(b" ")
