"""What is said about a configuration: problems with value, origin, rule and way out; the state of every key given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...models.config.key_block import Finding
from ..utils.errors import UserError
from ..utils.redaction import shown_value, without_secrets
from ..utils.text import counted
from .nemo.key_row import State


@dataclass(frozen=True, slots=True)
class KeyAccount:
    """One key of the effective configuration, or one that was given and does not act.

    Attributes:
        path: dotted path.
        value: as YAML would have it; environment values unresolved.
        state: acts, not yet, refused or historical; None for a key that is not known.
        origin: `conf/model/x.yaml:12`, an override as typed, or `default`.
        note: for a key that does not act, what it is or why.
    """

    path: str
    value: str
    state: State | None
    origin: str
    note: str = ""

    def __post_init__(self) -> None:
        """Keep no secret."""
        object.__setattr__(self, "value", shown_value(self.path, self.value))


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that keeps a configuration from being used.

    Attributes:
        key: dotted path, or an override as typed.
        value: the value as YAML would have it; None when there is none to show.
        origin: where the value came from.
        rule: what the key must be, and what it is.
        fix: the way out; empty when the rule says it.
        also: other keys the rule is about, with values and origins.
    """

    key: str
    value: str | None
    origin: str
    rule: str
    fix: str = ""
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Keep no secret."""
        if self.value is not None:
            object.__setattr__(self, "value", shown_value(self.key, self.value))
        object.__setattr__(self, "key", without_secrets(self.key))

    def lines(self) -> list[str]:
        """The problem for a terminal: where and what, then the rule, then the way out."""
        shown = f"{self.key} = {self.value}" if self.value is not None else self.key
        text = [placed(shown, self.key, self.origin), f"    {self.rule}"]
        text += [f"    with {other}" for other in self.also]
        if self.fix:
            text.append(f"    fix: {self.fix}")
        return text


def placed(shown: str, key: str, origin: str) -> str:
    """A key behind the place where it was set; an override as typed says both."""
    if origin.lstrip("+").startswith(f"{key}="):
        return origin
    return f"{origin}: {shown}" if origin else shown


class ConfigError(UserError):
    """A configuration that cannot be used. Carries every problem, and the account of every key as far as it got."""

    def __init__(
        self,
        problems: Sequence[Problem],
        account: Sequence[KeyAccount] = (),
        findings: Sequence[Finding] = (),
    ) -> None:
        self.problems = tuple(problems)
        self.account = tuple(account)
        self.findings = tuple(findings)
        lines = [line for problem in problems for line in problem.lines()]
        lines.append(f"{counted(len(self.problems), 'error')} in the configuration; nothing was started")
        super().__init__(lines)
