"""How near written texts are to those that were wanted: exact match and ROUGE-L."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NO_WORD = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class TextScores:
    """Means over pairs of texts.

    Attributes:
        exact_match: share of texts that are equal, white space at both ends aside.
        rouge_l: mean of `rouge_l`.
        texts: how many there were.
    """

    exact_match: float
    rouge_l: float
    texts: int


def score_texts(targets: Sequence[str], written: Sequence[str]) -> TextScores:
    """Score what was written against what was wanted, text by text.

    Raises:
        ValueError: no texts, or not as many of the one as of the other.
    """
    if len(targets) != len(written) or not targets:
        raise ValueError(f"`written` ({len(written)}) must be as many as `targets` ({len(targets)}), and not empty")
    pairs = list(zip(targets, written, strict=True))
    return TextScores(
        exact_match=sum(target.strip() == text.strip() for target, text in pairs) / len(pairs),
        rouge_l=sum(rouge_l(target, text) for target, text in pairs) / len(pairs),
        texts=len(pairs),
    )


def rouge_l(target: str, written: str) -> float:
    """ROUGE-L (Lin 2004, https://aclanthology.org/W04-1013, section 3.1) with beta 1, 0 to 1.

    With L the length of the longest common subsequence of words, m words wanted and n written, recall is R = L / m,
    precision P = L / n, and the score 2 R P / (R + P). Words are runs of ASCII letters and digits in lower case,
    without stemming, as in the rouge-score package, whose numbers these are.
    """
    wanted, found = words_of(target), words_of(written)
    common = _longest_common_subsequence(wanted, found)
    # 2 R P / (R + P) = 2 L / (m + n)
    return 2 * common / (len(wanted) + len(found)) if common else 0.0


def words_of(text: str) -> list[str]:
    """Runs of ASCII letters and digits in lower case."""
    return _NO_WORD.sub(" ", text.lower()).split()


def _longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    lengths = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for place, other in enumerate(second, 1):
            above = lengths[place]
            lengths[place] = diagonal + 1 if word == other else max(above, lengths[place - 1])
            diagonal = above
    return lengths[-1]
