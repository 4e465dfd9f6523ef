"""Argument parser whose errors are a `UserError` of two lines, with a suggested fix, instead of the usage text."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from ..utils.errors import UserError
from ..utils.redaction import redact_arguments
from ..utils.text import truncate_lines

_REQUIRED_PREFIX = "the following arguments are required: "
_MAX_LISTED = 10
_UNKNOWN_PREFIX = "unrecognized arguments: "
_CHOICE = re.compile(r"argument (?P<option>\S+): invalid choice: '(?P<value>.*)' \(choose from ")
_SYNONYMS = (("--arch", "--device", "--gpu", "--gpus"), ("--model", "--checkpoint", "--path"))
"""Options that mean much the same, each of some verbs."""
_COMMON_OPTIONS = ("--verbose", "--quiet", "--debug")
"""Options of many programs that no verb has: no key with that name is meant."""
_HYDRA_OPTIONS = {
    "--run": "leave it out: a single run needs no option",
    "-r": "leave it out: a single run needs no option",
    "--hydra-help": "`stoker VERB --help` lists the options, `stoker config --info` how files are composed",
    "--experimental-rerun": "exp_manager.resume_if_exists=True resumes a run; config.resolved.json holds its keys",
}
"""Options of Hydra's command line that no verb has, and their replacements."""


class ArgumentParser(argparse.ArgumentParser):
    """Parser of one subcommand; invalid arguments raise `UserError` with a suggested fix.

    Args:
        arguments: the arguments after the subcommand.
    """

    def __init__(self, arguments: Sequence[str], **settings: Any) -> None:
        super().__init__(**settings)
        self._words = tuple(arguments)

    def error(self, message: str) -> NoReturn:
        """Raise a `UserError` for an error message of argparse."""
        fix = f"`{self.prog} --help` lists the options"
        if message.startswith(_REQUIRED_PREFIX):
            message = f"missing: {message.removeprefix(_REQUIRED_PREFIX)}"
            fix = f"write {self.prog} {self._required()}"
        elif message.startswith(_UNKNOWN_PREFIX):
            unknown = self._split(message.removeprefix(_UNKNOWN_PREFIX))
            message = f"unknown: {' '.join(truncate_lines(redact_arguments(unknown), _MAX_LISTED))}"
            fix = self._suggest(*unknown[:1]) or fix
        elif match := _CHOICE.match(message):
            from ..config.suggest import closest

            choices = next(
                (action.choices for action in self._actions if match["option"] == "/".join(action.option_strings)), None
            )
            names = list(map(str, choices or ()))
            longer = [name for name in names if name.startswith(match["value"])]
            near = next(iter(longer), None) or closest(match["value"], names)
            fix = f"did you mean {match['option'].rpartition('/')[2]} {near}?" if near else fix
        raise UserError([f"{self.prog}: {message}", f"    fix: {fix}"])

    def _split(self, joined: str) -> list[str]:
        """Split unknown arguments that argparse joined with spaces; an argument may contain spaces itself."""
        found = []
        for word in self._words:
            if joined == word or joined.startswith(f"{word} "):
                found.append(word)
                joined = joined[len(word) + 1 :]
        return found

    def _required(self) -> str:
        """Return all required arguments with their metavars, as to be typed."""
        found = []
        for action in self._actions:
            if action.required:
                metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
                found.append(" ".join([*action.option_strings[-1:], metavar]))
        return " ".join(found)

    def _suggest(self, word: str = "") -> str:
        """Suggest the closest option, or the override for a key written as an option; empty if nothing is close."""
        from ..config.nemo.key_states import is_known_key, suggest_keys
        from ..config.override_typos import quoted_override
        from ..config.suggest import closest

        name, _, value = word.partition("=")
        rest = self._words[self._words.index(word) + 1 :][:1] if word else ()
        next_value = rest[0] if rest and "=" not in rest[0] and not rest[0].startswith("-") else "VALUE"
        if name in _HYDRA_OPTIONS and any(action.dest == "overrides" for action in self._actions):
            return _HYDRA_OPTIONS[name]
        if name in _COMMON_OPTIONS:
            return ""
        options = [text for action in self._actions for text in action.option_strings if text.startswith("--")]
        if match := closest(name, options) if name.startswith("-") else None:
            return f"did you mean {match}?"
        for action in self._actions:
            for option in action.option_strings:
                if any(name in group and option in group for group in _SYNONYMS):
                    choices = f", one of {', '.join(map(str, action.choices))}" if action.choices else "?"
                    value = f" {action.metavar}" if action.metavar else ""
                    return f"did you mean {option}{value}{choices}"
        key = name.lstrip("-")
        if all(action.dest != "overrides" for action in self._actions) or not re.fullmatch(r"--?[a-z_][\w.-]*", name):
            return ""
        keys = [key] if is_known_key(key) else suggest_keys(key)
        return " or ".join(
            f"{'' if at else 'write '}{quoted_override(key, value or next_value)}" for at, key in enumerate(keys)
        )
