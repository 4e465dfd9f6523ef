"""Prompts with an answer: objects with texts, by a template, as token rows; NeMo's truncation and end tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...config.prompt_template import PromptTemplate, Record
from ...utils.errors import UserError
from ..datasets.sft_examples import Example
from ..sources.jsonl import CONTEXT_KEY, LABEL_KEY, text_of
from ..sources.text_pairs import encoded
from ..tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from ..tokenizers.tokenizer import TokenIds, Tokenizer
from ..tokenizers.tokenizer_json import JsonTokenizer


def read_record(found: Mapping[str, Any], where: str, names: Sequence[str], named_by: str = "") -> dict[str, str]:
    """The texts of an object that a template names, the answer last.

    Args:
        found: the object.
        where: its place, for messages.
        names: of the texts.
        named_by: the key that gave the template; empty for `context_key` and `label_key`.

    Raises:
        UserError: one is missing, or the object is a conversation.
    """
    for key in ("messages", "conversations"):
        if isinstance(found.get(key), list) and not any(name in found for name in names):
            raise UserError(f"{where} is a conversation (`{key}`), not a prompt with an answer: data=chat reads it")
    keys = dict.fromkeys(names[:-1], named_by or CONTEXT_KEY) | {names[-1]: named_by or LABEL_KEY}
    return {name: text_of(found, name, where, keys[name]).strip(" ") for name in names}


@dataclass(frozen=True)
class PromptTokens:
    """From records to token rows.

    Attributes:
        template: makes prompt and answer.
        tokenizer: of the model.
        start: tokens before a prompt.
        end: tokens behind an answer: that which ends it, or none.
        answer_only: only the answer and its end are predicted.
        length: s, tokens of a row.
        shortened: names of the texts that are cut where a row cannot hold all; then answers, at their end.
        side: where those texts are cut.
    """

    template: PromptTemplate
    tokenizer: Tokenizer
    start: Sequence[int]
    end: Sequence[int]
    answer_only: bool
    length: int
    shortened: Sequence[str] = ()
    side: Literal["left", "right"] = "right"

    def examples(self, records: Sequence[Record]) -> Iterator[Example]:
        """The records as tokens; those that a row cannot hold are shortened as far as the template's texts allow.

        Raises:
            UserError: a text cannot be tokenized; with the number of its record.
        """
        prompts = [self.template.prompt(record) for record in records]
        answers = [self.template.answer(record) for record in records]
        drops = _puts_space_first(self.tokenizer)
        read = encoded(prompts, self.tokenizer, "prompt")
        written = encoded(
            [answer.removeprefix(" ") if drops else answer for answer in answers], self.tokenizer, "answer"
        )
        for record, prompt, asked, answer in zip(records, read, prompts, written, strict=True):
            excess = len(self.start) + len(prompt) + len(answer) + len(self.end) - (self.length + 1)
            if excess > 0 and self.shortened:
                prompt = self._shorter(record, excess, drops)
            tokens = np.concatenate([self.start, prompt, answer, self.end]).astype(answer.dtype)
            before = len(self.start) + len(prompt)
            counted: NDArray[np.bool_] = np.arange(len(tokens)) >= (before if self.answer_only else 1)
            yield Example(tokens, counted, before, asked, self.template.answer(record).strip(" "))

    def _shorter(self, record: Record, excess: int, drops: bool) -> TokenIds:
        """A prompt without `excess` tokens, which are taken from the texts in equal parts, as in NeMo."""
        pieces = list(self.template.pieces(record))
        texts = [text.removeprefix(" ") if drops and number else text for number, (text, _) in enumerate(pieces)]
        ids = self.tokenizer.encode_batch(texts)
        fields = [number for number, (_, name) in enumerate(pieces) if name in self.shortened]
        for turn, number in enumerate(fields):
            taken = min(excess // len(fields) + (turn < excess % len(fields)), len(ids[number]))
            kept = len(ids[number]) - taken
            ids[number] = ids[number][:kept] if self.side == "right" else ids[number][taken:]
        return np.concatenate(ids)


def _puts_space_first(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer begins every text with a space, so that one that is there already would be a second."""
    of_a_file = isinstance(tokenizer, JsonTokenizer | SentencePieceTokenizer)
    return of_a_file and tokenizer.decode_bytes(tokenizer.encode("a")).startswith(b" ")
