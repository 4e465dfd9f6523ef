"""NeMo's `prompt_template`: how the texts of a record make a prompt, and its answer.

It ends with the answer's name: `Question: {question} Answer: {answer}`. Spaces before the answer belong to it, since
tokens of many vocabularies begin with one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from .schema.trainer_and_data import DataBlock

_NAME = re.compile(r"( *)\{([^{}]+)\}")
Record = Mapping[str, str]


class PromptTemplate:
    """How the texts of a record make a prompt and its answer.

    Args:
        text: the template; names stand in braces.
        label_key: the name of the answer, with which it ends.

    Raises:
        ValueError: it does not end with the answer, names it twice, or has a single brace.

    Attributes:
        names: what it names, in order, the answer last.
    """

    def __init__(self, text: str, label_key: str) -> None:
        label = f"{{{label_key}}}"
        if not text.endswith(label):
            raise ValueError(f"must end with the answer, {label}, which `model.data.label_key` names")
        self._parts: list[tuple[str, str]] = []  # literal text before a name, and the name
        last = 0
        for found in _NAME.finditer(text):
            self._parts.append((text[last : found.start()] + found[1], found[2]))
            last = found.end()
        if any(brace in literal for literal, _ in self._parts for brace in "{}"):
            raise ValueError("must have a name in every pair of braces, and no other braces")
        self.names = tuple(name for _, name in self._parts)
        if self.names.count(label_key) > 1:
            raise ValueError(f"must name the answer, {label}, once")
        *self._before, (end, _) = self._parts
        self._end = end.rstrip(" ")
        self._space = end[len(self._end) :]

    def prompt(self, record: Record) -> str:
        """The text before the answer."""
        return "".join(literal + record[name] for literal, name in self._before) + self._end

    def answer(self, record: Record) -> str:
        """The answer, with the spaces before it."""
        return self._space + record[self.names[-1]]

    def pieces(self, record: Record) -> Iterator[tuple[str, str | None]]:
        """The prompt in pieces: text and the name that it came from; None for what the template says."""
        for literal, name in self._before:
            fixed = literal.rstrip(" ")
            if fixed:
                yield fixed, None
            yield literal[len(fixed) :] + record[name], name
        if self._end:
            yield self._end, None


def template_of(data: DataBlock) -> PromptTemplate:
    """The prompt template of a run.

    Raises:
        ValueError: it does not end with the answer, or its braces do not fit.
    """
    text = data.train_ds.prompt_template or f"{{{data.context_key}}} {{{data.label_key}}}"
    return PromptTemplate(text, data.label_key)
