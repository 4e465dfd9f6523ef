"""Parse command-line overrides: group choices (`model=gpt_125m`) and values (`trainer.max_steps=100`).

`k=v`, `+k=v` and `++k=v` all set the key; `~k` resets it to its default. Values follow Hydra's grammar. Duplicate
overrides must agree (`given_twice.py`).
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
_MAX_SHOWN = 200
_MISSING_NAME_FIX = "write {}, with the name of a key for NAME"


@dataclass(frozen=True, slots=True)
class Edit:
    """One value override.

    Attributes:
        path: dotted path of the key.
        value: the new value; interpolations unresolved.
        is_reset: True for `~key`, which resets the key to its default; `~key=VALUE` only if it has that value.
        typed: the override as typed.
    """

    path: str
    value: Any
    is_reset: bool
    typed: str

    @property
    def names_value(self) -> bool:
        """True if the override as typed contains `=`."""
        return "=" in self.typed


@dataclass(frozen=True)
class ParsedOverrides:
    """Parsed overrides by kind.

    Attributes:
        choices: group choices, for Hydra.
        edits: value overrides, in the order given.
        problems: overrides that could not be parsed or contradict each other.
    """

    choices: tuple[Override, ...]
    edits: tuple[Edit, ...]
    problems: tuple[Problem, ...]


def parse(overrides: Sequence[str], is_group: Callable[[str], bool]) -> ParsedOverrides:
    """Parse `overrides`; `is_group` distinguishes a group (`model`) from a key (`name`)."""
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
                choices.append(_check_choice(override))
            else:
                edits.append(_edit(override, typed))
        except UnreadableError as error:
            problems.append(Problem(typed, None, "command line", error.rule, error.fix))
    problems += [*choices_given_twice(choices), *keys_given_twice(edits)]
    return ParsedOverrides(tuple(choices), tuple(edits), tuple(problems))


class UnreadableError(Exception):
    """Invalid override.

    Attributes:
        rule: the violated rule.
        fix: the way out.
    """

    def __init__(self, rule: str, fix: str = "") -> None:
        super().__init__(rule)
        self.rule = rule
        self.fix = fix


def parse_one(parser: OverridesParser, typed: str) -> Override:
    """Parse one override.

    Raises:
        UnreadableError: the override is not valid.
    """
    if len(typed) > MAX_LENGTH:
        raise UnreadableError(f"is longer than {MAX_LENGTH // 1024} KiB", "write it into a YAML file")
    if "=" not in typed and not typed.startswith("~"):
        raise UnreadableError("is not an override", _missing_value_fix(typed))
    key, _, value = typed.partition("=")
    name = key.lstrip("+~")
    if not all(name.split(".")):
        whole = ".".join(part for part in name.split(".") if part)
        fix = f"write {corrected(whole, value)}" if whole else _MISSING_NAME_FIX.format(corrected("NAME", value))
        raise UnreadableError("cannot be read: a name is missing before `=`", fix)
    try:
        return parser.parse_override(typed)
    except (HydraException, RecursionError, ValueError) as error:
        text = _as_text(typed)
        if text is not None:
            return text
        reason = "its value" if is_secret(key) else " ".join(str(error).split())[:200]
        raise UnreadableError(f"cannot be read: {reason}", _unreadable_fix(key, value)) from None


def _missing_value_fix(word: str) -> str:
    """Return the fix for a word without `=`: a key without its value, or a value without its key."""
    known = key_of_any_family(word.lstrip("+"))
    if known is not None:
        return f"write {word}=VALUE; it takes {known.kind}"
    if re.fullmatch(r"\+{0,2}[A-Za-z_][\w./]*", word):
        return f"write {word}=VALUE, with a value in its place"
    return _MISSING_NAME_FIX.format(corrected("NAME", word))


def _unreadable_fix(key: str, value: str) -> str:
    """Return the fix for a value that Hydra's grammar does not accept."""
    known = key_of_any_family(key.lstrip("+~"))
    if len(value) > _MAX_SHOWN:
        value = "VALUE"
    if known is None or known.is_text:
        quoted = '"' + value.replace('"', '\\"') + '"'
        return f"if it is text, quote it: {corrected(key, quoted)}"
    if known.kind.startswith("a list") and (match := re.fullmatch(r"[(\[{]?(.*?)[)\]}]?", value)):
        return f"it takes {known.kind}; write {corrected(key, f'[{match[1]}]')}"
    example = "" if known.default is None else f", such as {corrected(key, show_value(known.default))}"
    return f"it takes {known.kind}{example}"


def _as_text(typed: str) -> Override | None:
    """Return an override whose value is taken literally, or None.

    Accepts what Hydra's grammar rejects: free text for text keys, and nested resolver calls.
    """
    key, _, value = typed.partition("=")
    path = key.lstrip("+")
    known = key_of_any_family(path)
    is_text = known is not None and known.is_text and "${" not in value
    is_nested_call = value.startswith("${") and re.fullmatch(r"[A-Za-z_][\w.]*", path) is not None
    if not (is_text or is_nested_call):
        return None
    return Override(OverrideType.CHANGE, path, ValueType.ELEMENT, value, input_line=typed)


def _check_choice(override: Override) -> Override:
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
            "set the run directory with exp_manager.exp_dir, configuration folders with --config-dir",
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
