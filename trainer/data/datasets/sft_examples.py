"""What a GPT is fine-tuned on: token rows of which only some tokens count, those of the answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..tokenizers.tokenizer import TokenIds


class Example(NamedTuple):
    """Tokens to learn from.

    Attributes:
        tokens: ids, [n].
        counted: which of them are to be predicted, bool [n].
        prompt: how many tokens come before the last answer.
        question: what was asked, as text; for scores beside which a simple rule stands.
        answer: the last answer, as text.
    """

    tokens: TokenIds
    counted: NDArray[np.bool_]
    prompt: int
    question: str
    answer: str


@dataclass(frozen=True)
class Examples:
    """The examples of a split.

    Attributes:
        examples: those with something to predict.
        cut: how many were longer than a row.
        left_out: how many had nothing to predict, or nothing left after the cut.
        too_long: tokens of those left out that had something to predict before the cut.
    """

    examples: list[Example]
    cut: int
    left_out: int
    too_long: Sequence[int] = ()

    def __len__(self) -> int:
        """How many there are."""
        return len(self.examples)

    def lengths(self) -> NDArray[np.int64]:
        """Places that each takes in a row: one for each token that is read, all but the last."""
        return np.array([len(example.tokens) - 1 for example in self.examples], np.int64)


def all_of(sets: Iterable[Examples]) -> list[Example]:
    """The examples of several sets."""
    return [example for examples in sets for example in examples.examples]


def fitted(found: Iterable[Example], length: int) -> Examples:
    """The examples as rows can hold them: cut at the right, and without those that have nothing to predict.

    Args:
        found: of any length.
        length: s, tokens of a row; one more is the last label.
    """
    examples: list[Example] = []
    too_long: list[int] = []
    cut = left_out = 0
    for example in found:
        is_long = len(example.tokens) > length + 1
        cut += is_long
        kept = example
        if is_long:
            kept = example._replace(tokens=example.tokens[: length + 1], counted=example.counted[: length + 1])
        if kept.counted[1:].any():
            examples.append(kept)
        else:
            left_out += 1
            if example.counted[1:].any():
                too_long.append(len(example.tokens))
    return Examples(examples, cut, left_out, too_long)
