"""Text generation metrics: exact match and ROUGE-L."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NON_WORD = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class TextScores:
    """Mean scores over pairs of target and prediction.

    Attributes:
        exact_match: fraction of predictions equal to the target, up to leading and trailing white space.
        rouge_l: mean of `rouge_l`.
        texts: number of pairs.
    """

    exact_match: float
    rouge_l: float
    texts: int


def score_predictions(targets: Sequence[str], predictions: Sequence[str]) -> TextScores:
    """Score predictions (`written`) against targets.

    Raises:
        ValueError: there are none, or their numbers differ.
    """
    if len(targets) != len(predictions) or not targets:
        raise ValueError(f"`written` ({len(predictions)}) must be as many as `targets` ({len(targets)}), and not empty")
    pairs = list(zip(targets, predictions, strict=True))
    return TextScores(
        exact_match=sum(target.strip() == text.strip() for target, text in pairs) / len(pairs),
        rouge_l=sum(rouge_l(target, text) for target, text in pairs) / len(pairs),
        texts=len(pairs),
    )


def rouge_l(target: str, written: str) -> float:
    """ROUGE-L (Lin 2004, https://aclanthology.org/W04-1013, section 3.1) with beta 1, 0 to 1.

    With L the length of the longest common subsequence of words, m words in the target and n in the prediction, recall
    is R = L / m, precision P = L / n, and the score 2 R P / (R + P). Words are lower-case runs of ASCII letters and
    digits, without stemming; results equal those of the rouge-score package.
    """
    reference, prediction = words_of(target), words_of(written)
    common = _lcs_length(reference, prediction)
    # 2 R P / (R + P) = 2 L / (m + n)
    return 2 * common / (len(reference) + len(prediction)) if common else 0.0


def words_of(text: str) -> list[str]:
    """Split a text into lower-case runs of ASCII letters and digits."""
    return _NON_WORD.sub(" ", text.lower()).split()


def _lcs_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence (dynamic programming over one row)."""
    lengths = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for column, other in enumerate(second, 1):
            above = lengths[column]
            lengths[column] = diagonal + 1 if word == other else max(above, lengths[column - 1])
            diagonal = above
    return lengths[-1]
