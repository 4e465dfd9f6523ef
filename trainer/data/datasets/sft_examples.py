"""Fine-tuning examples of a GPT: token ids with a loss mask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..tokenizers.tokenizer import TokenIds


class Example(NamedTuple):
    """Token ids with a loss mask.

    Attributes:
        tokens: ids, [N].
        loss_mask: loss mask: True for tokens to predict, bool [N].
        prompt_length: number of tokens before the last answer.
        prompt_text: the prompt as text; used by simple baselines that scores are compared with.
        answer_text: the last answer as text.
    """

    tokens: TokenIds
    loss_mask: NDArray[np.bool_]
    prompt_length: int
    prompt_text: str
    answer_text: str


@dataclass(frozen=True)
class Examples:
    """The examples of a split.

    Attributes:
        examples: those with at least one token to predict.
        num_truncated: number of examples truncated to the length of a row.
        num_skipped: number of examples without a token to predict, before or after truncation.
        skipped_lengths: token counts of the left-out examples that lost their tokens to predict by truncation.
    """

    examples: list[Example]
    num_truncated: int
    num_skipped: int
    skipped_lengths: Sequence[int] = ()

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.examples)

    def lengths(self) -> NDArray[np.int64]:
        """Return the positions that each example takes in a row: one per input token, which is all but the last."""
        return np.array([len(example.tokens) - 1 for example in self.examples], np.int64)


def flatten_examples(sets: Iterable[Examples]) -> list[Example]:
    """Concatenate the examples of several sets."""
    return [example for examples in sets for example in examples.examples]


def truncate_examples(found: Iterable[Example], length: int) -> Examples:
    """Truncate examples on the right to the length of a row, and drop those without a token to predict.

    Args:
        found: examples of any length.
        length: S, tokens in a row; one more token is the last label.
    """
    examples: list[Example] = []
    skipped_lengths: list[int] = []
    num_truncated = num_skipped = 0
    for example in found:
        is_truncated = len(example.tokens) > length + 1
        num_truncated += is_truncated
        truncated = example
        if is_truncated:
            truncated = example._replace(tokens=example.tokens[: length + 1], loss_mask=example.loss_mask[: length + 1])
        if truncated.loss_mask[1:].any():
            examples.append(truncated)
        else:
            num_skipped += 1
            if example.loss_mask[1:].any():
                skipped_lengths.append(len(example.tokens))
    return Examples(examples, num_truncated, num_skipped, skipped_lengths)
