"""The overrides of the command line: which choose a group, and which set, add or reset a value.

`k=v`, `+k=v` and `++k=v` all set the key; `~k` goes back to the default. Hydra's own grammar reads the values. What is
given more than once must say the same (`given_twice`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.errors import HydraException

from ..utils.redaction import is_secret
from .duplicate_overrides import choices_given_twice, keys_given_twice
from .override_typos import corrected, told_apart
from .problems import Problem
from .schema.key_index import key_of_any_family, show_value

MAX_LENGTH = 64 * 1024
_LONG = 200
_WITH_A_NAME = "write {}, with the name of a key for NAME"


@dataclass(frozen=True, slots=True)
class Edit:
    """One value override.

    Attributes:
        path: dotted path of the key.
        value: the new value as written; interpolations are not resolved.
        is_reset: `~key`: back to the default; with `~key=VALUE` only from that value.
        typed: the override as typed.
    """

    path: str
    value: Any
    is_reset: bool
    typed: str

    @property
    def names_value(self) -> bool:
        """Whether there is a `=` in what was typed."""
        return "=" in self.typed


@dataclass(frozen=True)
class ParsedOverrides:
    """The overrides by kind.

    Attributes:
        choices: group choices, for Hydra.
        edits: value overrides, in the order given.
        problems: what could not be read.
    """

    choices: tuple[Override, ...]
    edits: tuple[Edit, ...]
    problems: tuple[Problem, ...]


def parse(overrides: Sequence[str], is_group: Callable[[str], bool]) -> ParsedOverrides:
    """Read `overrides`; `is_group` tells a group (`model`) from a key (`name`)."""
    parser = OverridesParser.create()
    choices: list[Override] = []
    edits: list[Edit] = []
    problems: list[Problem] = []
    for typed in told_apart(overrides):
        if isinstance(typed, Problem):
            problems.append(typed)
            continue
        try:
            override = parse_one(parser, typed)
            if is_group(override.key_or_group) and not isinstance(override.value(), dict):
                choices.append(_checked_choice(override))
            else:
                edits.append(_edit(override, typed))
        except UnreadableError as error:
            problems.append(Problem(typed, None, "command line", error.rule, error.fix))
    problems += [*choices_given_twice(choices), *keys_given_twice(edits)]
    return ParsedOverrides(tuple(choices), tuple(edits), tuple(problems))


class UnreadableError(Exception):
    """An override that is not used: the rule it breaks, and the way out."""

    def __init__(self, rule: str, fix: str = "") -> None:
        super().__init__(rule)
        self.rule = rule
        self.fix = fix


def parse_one(parser: OverridesParser, typed: str) -> Override:
    """Read one override.

    Raises:
        UnreadableError: it cannot be read.
    """
    if len(typed) > MAX_LENGTH:
        raise UnreadableError(f"is longer than {MAX_LENGTH // 1024} KiB", "write it into a YAML file")
    if "=" not in typed and not typed.startswith("~"):
        raise UnreadableError("is not an override", _with_a_value(typed))
    key, _, value = typed.partition("=")
    name = key.lstrip("+~")
    if not all(name.split(".")):
        whole = ".".join(part for part in name.split(".") if part)
        fix = f"write {corrected(whole, value)}" if whole else _WITH_A_NAME.format(corrected("NAME", value))
        raise UnreadableError("cannot be read: a name is missing before `=`", fix)
    try:
        return parser.parse_override(typed)
    except (HydraException, RecursionError, ValueError) as error:
        text = _as_typed(typed)
        if text is not None:
            return text
        said = "its value" if is_secret(key) else " ".join(str(error).split())[:200]
        raise UnreadableError(f"cannot be read: {said}", _readable(key, value)) from None


def _with_a_value(word: str) -> str:
    """The way out for a word without `=`: a key without its value, or a value without its key."""
    known = key_of_any_family(word.lstrip("+"))
    if known is not None:
        return f"write {word}=VALUE; it takes {known.kind}"
    if re.fullmatch(r"\+{0,2}[A-Za-z_][\w./]*", word):
        return f"write {word}=VALUE, with a value in its place"
    return _WITH_A_NAME.format(corrected("NAME", word))


def _readable(key: str, value: str) -> str:
    """The way out for a value that Hydra's grammar does not read."""
    known = key_of_any_family(key.lstrip("+~"))
    if len(value) > _LONG:
        value = "VALUE"
    if known is None or known.is_text:
        quoted = '"' + value.replace('"', '\\"') + '"'
        return f"if it is text, quote it: {corrected(key, quoted)}"
    if known.kind.startswith("a list") and (match := re.fullmatch(r"[(\[{]?(.*?)[)\]}]?", value)):
        return f"it takes {known.kind}; write {corrected(key, f'[{match[1]}]')}"
    example = "" if known.default is None else f", such as {corrected(key, show_value(known.default))}"
    return f"it takes {known.kind}{example}"


def _as_typed(typed: str) -> Override | None:
    """A value Hydra's grammar does not read: text for a key that takes nothing else, and calls within calls."""
    key, _, value = typed.partition("=")
    path = key.lstrip("+")
    known = key_of_any_family(path)
    is_text = known is not None and known.is_text and "${" not in value
    is_nested_call = value.startswith("${") and re.fullmatch(r"[A-Za-z_][\w.]*", path) is not None
    if not (is_text or is_nested_call):
        return None
    return Override(OverrideType.CHANGE, path, ValueType.ELEMENT, value, input_line=typed)


def _checked_choice(override: Override) -> Override:
    value = override.value()
    if override.is_sweep_override():
        raise UnreadableError("names several choices", "choose one, or train with each: stoker train -m")
    if not override.is_delete() and not isinstance(value, (str, list, type(None))):
        raise UnreadableError("must name a file of the group", "such as model=gpt_125m")
    return override


def _edit(override: Override, typed: str) -> Edit:
    path = override.key_or_group
    if override.package is not None or "/" in path:
        group = path.partition("@")[0]
        raise UnreadableError(
            f"there is no group `{group}`", "groups are model, data, tokenizer, optim, peft, trainer, experiment"
        )
    if path == "hydra" or path.startswith("hydra."):
        raise UnreadableError(
            "stoker uses Hydra for composition only",
            "the run directory is exp_manager.exp_dir; folders of files are given with --config-dir",
        )
    if override.is_sweep_override():
        known = key_of_any_family(path)
        raw = typed.partition("=")[2]
        if override.value_type == ValueType.SIMPLE_CHOICE_SWEEP and known is not None and known.is_text:
            return Edit(path, raw, False, typed)
        raise UnreadableError(
            "holds several values", f"write a list as {path}=[{raw}], quote text, or train with each: stoker train -m"
        )
    return Edit(path, override.value(), override.is_delete(), typed)
