"""Data of stoker's own lm-evaluation-harness tasks: docstrings of Python's standard library.

They are the test split, by module, of `data=docstring`, so models fine-tuned on that data have not seen them. Scores
are comparable under the same version of Python. The tasks are in `tasks/`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import datasets

from ...data.sources.docstrings import read_docstrings
from ...data.sources.text_pairs import TextPair
from ...data.sources.text_sources import parse_proportions

_SPLITS = "900,50,50"
"""The default of `model.data.splits_string`."""
_CHOICES = 4
_MAX_CHARACTERS = 1500
"""Maximum number of characters of a function, so that questions fit into short contexts."""


def documents(**_: Any) -> dict[str, Any]:
    """Return the functions of the test split and their docstrings as a dataset for the harness.

    Returns:
        `test`, with the columns `source`, `target`, `choices` (the targets of this and three other functions, in a
        fixed random order) and `answer`, the index of the target among them.
    """
    return {"test": datasets.Dataset.from_list(questions(_pairs()))}


@cache  # shared by the tasks of a run
def _pairs() -> tuple[TextPair, ...]:
    pairs = read_docstrings(parse_proportions(_SPLITS)).pairs["test"]
    return tuple(pair for pair in pairs if len(pair.input) <= _MAX_CHARACTERS)


def questions(pairs: Sequence[TextPair]) -> list[dict[str, Any]]:
    """Return a multiple-choice question for each pair, the same in every run.

    Args:
        pairs: inputs and targets, with at least four different targets.
    """
    rng = random.Random(0)
    targets = sorted({pair.target for pair in pairs})
    found = []
    for pair in pairs:
        choices = [pair.target]
        while len(choices) < _CHOICES:
            other = rng.choice(targets)
            if other not in choices:
                choices.append(other)
        rng.shuffle(choices)
        answer = choices.index(pair.target)
        found.append({"source": pair.input, "target": pair.target, "choices": choices, "answer": answer})
    return found
