"""Exact match, ROUGE-L and the baseline that copies the name of a function."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import full_only, looped

from stoker.trainer.evaluation.baselines import docstring_from_name
from stoker.trainer.evaluation.text_scores import rouge_l, score_predictions, split_words

REFERENCE = [
    # target, written, fmeasure of rouge_score 0.1.2 (rougeL, no stemming)
    ("Return the name of the file.", "Return the name of a file", 0.8333333333333334),
    ("Return True if x is a directory.", "Test whether a path is a regular file", 0.26666666666666666),
    ("Close the socket.", "Send data to the socket", 0.5),
    ("a b c d e f", "f e d c b a", 0.16666666666666666),
    ("Naïve café über", "naive cafe uber", 0.0),
    ("", "anything", 0.0),
    ("***", "***", 0.0),
]


@looped(("target", "written", "expected"), REFERENCE)
def test_rouge_l_of_the_reference(target: str, written: str, expected: float) -> None:
    assert rouge_l(target, written) == pytest.approx(expected, abs=1e-15)


texts = st.lists(st.sampled_from(["a", "b", "c", "The", "the", "x9", "é", ".", "-", ""]), max_size=14).map(" ".join)


@full_only  # the library imports nltk, which takes seconds
@given(texts, texts)
def test_rouge_l_is_that_of_the_library(target: str, written: str) -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    assert rouge_l(target, written) == pytest.approx(scorer.score(target, written)["rougeL"].fmeasure, abs=1e-15)


@given(texts, texts)
def test_rouge_l_is_what_its_definition_says(target: str, written: str) -> None:
    """The longest common subsequence by recursion, and harmonic mean of precision and recall."""

    def longest(first: tuple[str, ...], second: tuple[str, ...], known: dict[tuple[int, int], int]) -> int:
        key = len(first), len(second)
        if not all(key):
            return 0
        if key not in known:
            known[key] = (
                1 + longest(first[1:], second[1:], known)
                if first[0] == second[0]
                else max(longest(first[1:], second, known), longest(first, second[1:], known))
            )
        return known[key]

    wanted, found = tuple(split_words(target)), tuple(split_words(written))
    common = longest(wanted, found, {})
    expected = 0.0
    if common:
        recall, precision = common / len(wanted), common / len(found)
        expected = 2 * recall * precision / (recall + precision)
    assert rouge_l(target, written) == pytest.approx(expected, abs=1e-12)
    assert rouge_l(target, written) == rouge_l(written, target)


def test_scores_are_means() -> None:
    scores = score_predictions(["Open a file.", "Close."], [" Open a file.\n", "Open."])
    assert (scores.exact_match, scores.rouge_l, scores.texts) == (0.5, 0.5, 2)
    with pytest.raises(ValueError, match=r"`written` \(1\)"):
        score_predictions(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="not empty"):
        score_predictions([], [])


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def get_data(self):\n    return 1\n", "Get data."),
        ("async def __aenter__(self): ...", "Aenter."),
        ("def assertRaisesRegex(self, x):\n    def inner(): ...", "Assert raises regex."),
        ("def parseHTTPHeader(): ...", "Parse http header."),
        ("def _(): ...", ""),
        ("x = 1", ""),
    ],
)
def test_the_words_of_a_name(source: str, name: str) -> None:
    assert docstring_from_name(source) == name
