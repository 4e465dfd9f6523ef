"""NeMo's `prompt_template`: a format string that turns a record into a prompt and its answer.

The template ends with the answer field: `Question: {question} Answer: {answer}`. Spaces before the answer belong to it,
since tokens of many vocabularies begin with a space.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from .schema.trainer_and_data import DataBlock

_NAME = re.compile(r"( *)\{([^{}]+)\}")
Record = Mapping[str, str]


class PromptTemplate:
    """Build the prompt and the answer of a record.

    Args:
        text: the template, with field names in braces.
        label_key: the field of the answer; the template must end with it.

    Raises:
        ValueError: it does not end with the answer, contains it twice, or has an unmatched brace.

    Attributes:
        fields: the fields in order, the answer last.
    """

    def __init__(self, text: str, label_key: str) -> None:
        label = f"{{{label_key}}}"
        if not text.endswith(label):
            raise ValueError(f"must end with the answer, {label}, which `model.data.label_key` names")
        self._parts: list[tuple[str, str]] = []  # literal text before a name, and the name
        last = 0
        for match in _NAME.finditer(text):
            self._parts.append((text[last : match.start()] + match[1], match[2]))
            last = match.end()
        if any(brace in literal for literal, _ in self._parts for brace in "{}"):
            raise ValueError("must have a name in every pair of braces, and no other braces")
        self.fields = tuple(name for _, name in self._parts)
        if self.fields.count(label_key) > 1:
            raise ValueError(f"must name the answer, {label}, once")
        *self._before, (end, _) = self._parts
        self._end = end.rstrip(" ")
        self._space = end[len(self._end) :]

    def prompt(self, record: Record) -> str:
        """Return the text before the answer."""
        return "".join(literal + record[name] for literal, name in self._before) + self._end

    def answer(self, record: Record) -> str:
        """Return the answer, with the spaces before it."""
        return self._space + record[self.fields[-1]]

    def segments(self, record: Record) -> Iterator[tuple[str, str | None]]:
        """Yield the prompt in segments: text and the field it came from, None for literal text."""
        for literal, name in self._before:
            fixed = literal.rstrip(" ")
            if fixed:
                yield fixed, None
            yield literal[len(fixed) :] + record[name], name
        if self._end:
            yield self._end, None


def prompt_template_from_config(data: DataBlock) -> PromptTemplate:
    """Return the prompt template of a run.

    Raises:
        ValueError: it does not end with the answer, or has an unmatched brace.
    """
    text = data.train_ds.prompt_template or f"{{{data.context_key}}} {{{data.label_key}}}"
    return PromptTemplate(text, data.label_key)
