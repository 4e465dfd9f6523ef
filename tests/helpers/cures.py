"""Obey the fixes that configuration errors and warnings print: apply their overrides and load again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from stoker.trainer.config.load import load_run_config
from stoker.trainer.config.nemo.key_table import key_table
from stoker.trainer.config.problems import ConfigError, Problem
from stoker.trainer.config.schema.key_index import format_value, schema_keys

_VALUE = r"(?:'[^']*'|\[[^\]]*\]|\{[^}]*\}|[^\s'`\[{][^\s;?`]*?(?=[,;?.]?(?:\s|$)))"
_QUOTED = r"""'[A-Za-z_][\w.]*=(?:[^']|'"'"')*'"""
_WORD = re.compile(rf"(?<![\w.`(\[{{'])({_QUOTED}|~?[A-Za-z_][\w.]*={_VALUE}|~[A-Za-z_][\w.]*)")
_PLACEHOLDER = re.compile(r"=\[?[A-Z][A-Z_]{2,}\]?$|NAME|FILE|PATH|VALUE")
_TRANSLATION = re.compile(r"must be|holds several values|refused: ")
_TYPE_OR_STATE = re.compile(
    r"must be (an? |text|true|one of)|refused|not yet|there is no|is not an override|cannot be read"
)
_LEAVE_OUT = re.compile(r"^(leave it out|remove it)\b")


@dataclass(frozen=True)
class Cure:
    """One way out that a message names.

    Attributes:
        key: the key of the message.
        template: the message without its numbers, so that a repetition is recognized.
        overrides: what to add to the command line; `-KEY` leaves out the override of a key.
    """

    key: str
    template: str
    overrides: tuple[str, ...]

    @property
    def paths(self) -> frozenset[str]:
        """The keys it sets or resets."""
        return frozenset(_path(word) for word in self.overrides)


@dataclass(frozen=True)
class Loaded:
    """Messages of a configuration: problems (none if it loads), and all cures of problems and warnings."""

    problems: tuple[Problem, ...]
    messages: frozenset[tuple[str, str]]
    cures: tuple[Cure, ...]


def load_messages(overrides: Sequence[str]) -> Loaded:
    """Load a configuration and collect its messages."""
    return _load_messages(tuple(overrides))


@lru_cache(maxsize=1024)
def _load_messages(overrides: tuple[str, ...]) -> Loaded:
    try:
        config = load_run_config(None, None, list(overrides), {})
        problems, findings = (), config.findings
    except ConfigError as error:
        problems, findings = error.problems, error.findings
    found = [(problem.key, problem.rule, problem.fix) for problem in problems]
    found += [(item.keys[0], item.message, item.fix) for item in findings if item.keys and item.level == "warning"]
    return Loaded(
        problems,
        frozenset((key, _template(rule)) for key, rule, _ in found),
        tuple(Cure(key, _template(rule), words) for key, rule, fix in found for words in cures_in(key, fix)),
    )


def cures_in(key: str, fix: str) -> Iterator[tuple[str, ...]]:
    """Yield the overrides of each alternative in a fix, without those that leave a value to the user."""
    for part in re.split(r",? or (?=write |use |leave |[~'\w.]+[=\s]|[~][\w.]+$)|; ", fix):
        if part.startswith("such as "):
            continue
        if _LEAVE_OUT.match(part):
            yield (f"-{key}",)
        words = [shlex.split(word)[0] for word in _WORD.findall(part)]
        if words and not any(_PLACEHOLDER.search(word) for word in words):
            yield tuple(words)


def obey(overrides: Sequence[str], cure: Cure) -> list[str]:
    """Return the command line after a user has obeyed a cure: one override of each key, the cure's last."""
    kept = [word for word in overrides if not any(_is_at_or_below(_path(word), path) for path in cure.paths)]
    return [*kept, *(word for word in cure.overrides if not word.startswith("-"))]


def complaint(overrides: Sequence[str], before: Loaded, cure: Cure) -> str:
    """Return why a cure does not work: its overrides are refused, or the same message comes again; empty if it does."""
    after = load_messages(obey(overrides, cure))
    if (cure.key, cure.template) in after.messages:
        return "the same message comes again"
    known = {(problem.key, _template(problem.rule)) for problem in before.problems}
    for problem in after.problems:
        if problem.key in cure.paths and (problem.key, _template(problem.rule)) not in known:
            # A fix that only writes or moves the user's value is no worse than that value; other rules may refuse it.
            if _TRANSLATION.match(cure.template) and problem.fix and not _TYPE_OR_STATE.match(problem.rule):
                continue
            return f"the cure is refused: {problem.key}: {problem.rule} | fix: {problem.fix}"
    return ""


def follow(overrides: Sequence[str], limit: int) -> list[list[str]]:
    """Obey the first cure of the first problem that has one, again and again; return the command lines in turn."""
    lines = [list(overrides)]
    while len(lines) <= limit:
        loaded = load_messages(lines[-1])
        keys = {problem.key for problem in loaded.problems}
        cure = next((cure for cure in loaded.cures if cure.key in keys), None)
        if cure is None:
            return lines
        lines.append(obey(lines[-1], cure))
    return lines


_PRESETS = (("gpt", ()), ("t5", ("model=t5_small",)), ("bert", ("model=bert_base",)))
_VALUES = (
    "null", "true", "false", "0", "1", "2", "3", "-1", "0.5", "2.5", "1.0", "7", "64", "512", "54300.0", "16",
    "x", "[]", "[1,2]", "'2'", "1k", "none", "8,1,1", "''",
)  # fmt: skip
"""Values that most keys do not take: other types, other spellings, out of range."""


def random_overrides(chance: Random, count: int) -> Iterator[list[str]]:
    """Yield command lines for every family, with few keys, any known one, and any value, half of them the key's own."""
    for _ in range(count):
        family, line = chance.choice(_PRESETS)
        keys = schema_keys(family)
        known = [*keys, *(path for path in key_table() if not path.endswith("*"))]
        words = list(line)
        for path in chance.sample(known, chance.randint(1, 3)):
            own = [format_value(choice) for choice in keys[path].choices] if path in keys else []
            words.append(f"{path}={chance.choice(own if own and chance.random() < 0.5 else _VALUES)}")
        yield words


def _template(text: str) -> str:
    return re.sub(r"[\d.,]+", "#", text)


def _path(word: str) -> str:
    return word.lstrip("~+-").partition("=")[0]


def _is_at_or_below(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above}.")
