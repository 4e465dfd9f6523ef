"""Configuration errors, each with value, origin, rule and fix, and the state of every given key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...models.config.key_block import Finding
from ..utils.errors import UserError
from ..utils.redaction import redact, redact_value
from ..utils.text import pluralize
from .nemo.key_table import KeyState

_PATH = re.compile(r"(?<![\w.])[a-z]\w*(?:\.\w+)+")
MAX_LISTED = 50
"""Errors, warnings and notes that are listed on a terminal; `--json` lists all."""


@dataclass(frozen=True, slots=True)
class KeyReport:
    """One row of `stoker config`: an effective key, or a given key that does not act.

    Attributes:
        path: dotted path.
        value: the value in YAML notation; environment values unresolved.
        state: acts, not yet, refused or historical; None for an unknown key.
        origin: `conf/model/x.yaml:12`, an override as typed, or `default`.
        note: description or reason, for a key that does not act.
    """

    path: str
    value: str
    state: KeyState | None
    origin: str
    note: str = ""

    def __post_init__(self) -> None:
        """Redact a secret value."""
        object.__setattr__(self, "value", redact_value(self.path, self.value))


@dataclass(frozen=True, slots=True)
class Problem:
    """One error in a configuration.

    Attributes:
        key: dotted path, or an override as typed.
        value: the value in YAML notation; None if there is none to show.
        origin: origin of the value.
        rule: the violated rule, with the actual value.
        fix: the way out; empty if the rule implies it.
        also: other keys the rule concerns, with values and origins.
    """

    key: str
    value: str | None
    origin: str
    rule: str
    fix: str = ""
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Redact secrets."""
        if self.value is not None:
            object.__setattr__(self, "value", redact_value(self.key, self.value))
        object.__setattr__(self, "key", redact(self.key))

    def paths_in_fix(self) -> list[str]:
        """Return the keys that the fix names: they will have another value."""
        return _PATH.findall(self.fix)

    def lines(self) -> list[str]:
        """Return the lines for a terminal: origin and key, rule, other keys, fix."""
        shown = f"{self.key} = {self.value}" if self.value is not None else self.key
        text = [with_origin(shown, self.key, self.origin), f"    {self.rule}"]
        text += [f"    with {other}" for other in self.also]
        if self.fix:
            text.append(f"    fix: {self.fix}")
        return text


def with_origin(shown: str, key: str, origin: str) -> str:
    """Prefix a key with its origin, unless the origin is the override itself (`key=value`)."""
    if origin.lstrip("+").startswith(f"{key}="):
        return origin
    return f"{origin}: {shown}" if origin else shown


class ConfigError(UserError):
    """Invalid configuration.

    Attributes:
        problems: every error found.
        key_reports: the keys as far as they could be resolved.
        findings: warnings and notes.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        key_reports: Sequence[KeyReport] = (),
        findings: Sequence[Finding] = (),
    ) -> None:
        self.problems = tuple(problems)
        self.key_reports = tuple(key_reports)
        self.findings = tuple(findings)
        lines = [line for problem in problems[:MAX_LISTED] for line in problem.lines()]
        if len(problems) > MAX_LISTED:
            lines.append(f"and {len(problems) - MAX_LISTED:,} more")
        lines.append(f"{pluralize(len(self.problems), 'error')} in the configuration; nothing was started")
        super().__init__(lines)
