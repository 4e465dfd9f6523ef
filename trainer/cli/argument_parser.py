"""The words of a command line: argparse, with errors of a line or two in the place of its usage."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from ..utils.errors import UserError
from ..utils.redaction import words_without_secrets

_ABSENT = "the following arguments are required: "
_UNKNOWN = "unrecognized arguments: "
_OF_HYDRA = {
    "--config-path": "write --config-dir {}",
    "-cp": "write --config-dir {}",
    "-cd": "write --config-dir {}",
    "-cn": "write --config-name {}",
    "--cfg": "`stoker config` shows the configuration, with the same overrides",
    "-c": "`stoker config` shows the configuration, with the same overrides",
    "--info": "`stoker config --all` shows every key with its state and origin",
    "-i": "`stoker config --all` shows every key with its state and origin",
}
"""Options of Hydra's own command lines, and what to write instead."""


class Parser(argparse.ArgumentParser):
    """The options of one verb. What is wrong with them is a `UserError`: what, and the way out.

    Args:
        words: of the command line, behind the verb.
        settings: of argparse.
    """

    def __init__(self, words: Sequence[str], **settings: Any) -> None:
        super().__init__(**settings)
        self._words = tuple(words)

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        fix = f"`{self.prog} --help` lists what it takes"
        if message.startswith(_ABSENT):
            message = f"must be given: {message.removeprefix(_ABSENT)}"
            fix = f"write {self.prog} {self._required()}"
        elif message.startswith(_UNKNOWN):
            unknown = self._typed(message.removeprefix(_UNKNOWN))
            message = f"not known here: {' '.join(words_without_secrets(unknown))}"
            fix = self._meant(*unknown[:1]) or fix
        raise UserError([f"{self.prog}: {message}", f"    fix: {fix}"])

    def _typed(self, joined: str) -> list[str]:
        """The words of the command line that argparse has joined, which may have spaces of their own."""
        found = []
        for word in self._words:
            if joined == word or joined.startswith(f"{word} "):
                found.append(word)
                joined = joined[len(word) + 1 :]
        return found

    def _required(self) -> str:
        """Everything that must be given, with what it takes, as it is typed."""
        found = []
        for action in self._actions:
            if action.required:
                taken = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
                found.append(" ".join([*action.option_strings[-1:], taken]))
        return " ".join(found)

    def _meant(self, word: str = "") -> str:
        """The nearest option, or the override that was written as an option; empty where nothing is near."""
        from ..config.nemo.key_states import is_known, suggestions
        from ..config.override_typos import corrected
        from ..config.suggest import closest

        name, _, value = word.partition("=")
        behind = self._words[self._words.index(word) + 1 :][:1] if word else ()
        follows = behind[0] if behind and "=" not in behind[0] and not behind[0].startswith("-") else "VALUE"
        if name in _OF_HYDRA and any(action.dest == "overrides" for action in self._actions):
            return _OF_HYDRA[name].format(value or follows)
        options = [text for action in self._actions for text in action.option_strings if text.startswith("--")]
        if near := closest(name, options) if name.startswith("-") else None:
            return f"did you mean {near}?"
        key = name.lstrip("-")
        if all(action.dest != "overrides" for action in self._actions) or not re.fullmatch(r"--?[a-z_][\w.-]*", name):
            return ""
        keys = [key] if is_known(key) else suggestions(key)
        return " or ".join(f"{'' if at else 'write '}{corrected(key, value or follows)}" for at, key in enumerate(keys))
