"""The data of stoker's own tasks for the harness: docstrings of the standard library, which every Python has.

They are those of the test split of `data=docstring`, by module: a model fine-tuned on that data has seen none. Scores
can be compared under one version of Python; `tasks/` holds the tasks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import datasets  # pyright: ignore[reportMissingImports]

from ...data.sources.docstrings import read_docstrings
from ...data.sources.text_pairs import TextPair
from ...data.sources.text_sources import parse_proportions

_SPLITS = "900,50,50"
"""The default of `model.data.splits_string`."""
_CHOICES = 4
_LONGEST = 1500
"""Characters of a function; longer ones do not fit beside a question into short contexts."""


def documents(**_: Any) -> dict[str, Any]:
    """The functions of the test split and what their docstrings say, as the harness takes them.

    Returns:
        `test`, with the columns `source`, `target`, `choices` (the target and those of three other functions, in a
        fixed random order) and `answer`, the place of the target among them.
    """
    return {"test": datasets.Dataset.from_list(questions(_pairs()))}


@cache  # several tasks of a run have the same
def _pairs() -> tuple[TextPair, ...]:
    pairs = read_docstrings(parse_proportions(_SPLITS)).pairs["test"]
    return tuple(pair for pair in pairs if len(pair.input) <= _LONGEST)


def questions(pairs: Sequence[TextPair]) -> list[dict[str, Any]]:
    """A question for each pair, the same in every run.

    Args:
        pairs: inputs and targets, of which at least four differ.
    """
    chance = random.Random(0)
    targets = sorted({pair.target for pair in pairs})
    found = []
    for pair in pairs:
        choices = [pair.target]
        while len(choices) < _CHOICES:
            other = chance.choice(targets)
            if other not in choices:
                choices.append(other)
        chance.shuffle(choices)
        answer = choices.index(pair.target)
        found.append({"source": pair.input, "target": pair.target, "choices": choices, "answer": answer})
    return found
