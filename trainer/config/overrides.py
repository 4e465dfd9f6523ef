"""Parse command-line overrides: group choices (`model=gpt_125m`) and values (`trainer.max_steps=100`).

`k=v`, `+k=v` and `++k=v` all set the key; `~k` resets it to its default. Values follow Hydra's grammar. Of several
overrides of one key or group the last one wins, as in Hydra; a note names those that differ from it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.errors import HydraException

from ...models.config.key_block import Finding
from ..utils.redaction import redact
from ..utils.text import one_line, truncate_lines
from . import dotted_paths
from .override_typos import detect_override_typos, quoted_override
from .problems import Problem
from .schema.key_index import find_key, format_value
from .validate import accepts_value
from .yaml_reader import MAX_DEPTH, SWEPT_DOT, parse_scalar

MAX_LENGTH = 64 * 1024
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
"""Matches the character that Python puts in place of a byte of the command line that is not UTF-8."""
_MAX_SHOWN = 200
_MAX_LISTED = 10
"""Overrides of one key that a message lists."""
_RESET = "~"
_SWEPT_BLOCK = "hydra.sweeper.params."
UNUSED_HYDRA_GROUPS = ("job_logging", "hydra_logging", "output", "help", "hydra_help", "env", "callbacks")
"""Groups of Hydra's own configuration that stoker has no use for."""
_MISSING_NAME_FIX = "write {}, with the name of a key for NAME"


@dataclass(frozen=True, slots=True)
class ValueOverride:
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
    def has_value(self) -> bool:
        """True if the override as typed contains `=`."""
        return "=" in self.typed


@dataclass(frozen=True)
class ParsedOverrides:
    """Parsed overrides by kind.

    Attributes:
        group_choices: group choices, for Hydra.
        value_overrides: value overrides, in the order given.
        problems: overrides that could not be parsed.
        notes: overrides that later ones replace.
        hydra_overrides: value overrides of keys below `hydra.`.
    """

    group_choices: tuple[Override, ...]
    value_overrides: tuple[ValueOverride, ...]
    problems: tuple[Problem, ...]
    notes: tuple[Finding, ...] = ()
    hydra_overrides: tuple[ValueOverride, ...] = ()


def parse_overrides(overrides: Sequence[str], is_group: Callable[[str], bool]) -> ParsedOverrides:
    """Parse `overrides`; `is_group` distinguishes a group (`model`) from a key (`name`)."""
    parser = OverridesParser.create()
    choices: list[Override] = []
    edits: list[ValueOverride] = []
    of_hydra: list[ValueOverride] = []
    problems: list[Problem] = []
    unused: list[Finding] = []
    for typed in detect_override_typos(overrides):
        if isinstance(typed, Problem):
            problems.append(typed)
            continue
        try:
            override = parse_override(parser, typed)
            if is_group(override.key_or_group) and not isinstance(override.value(), dict):
                choices.append(_check_choice(override))
            elif override.key_or_group.startswith("hydra/"):
                unused.append(_unused_hydra_group(override))
            elif override.key_or_group.partition(".")[0] == "hydra":
                of_hydra.extend(_hydra_edits(override, typed))
            else:
                edits.append(_edit(override, typed))
        except OverrideError as error:
            problems.append(Problem(typed, None, "command line", error.rule, error.fix))
    notes = (*_replaced_choices(choices), *_replaced_keys([*edits, *of_hydra]), *unused)
    last = {chosen_group(choice): choice for choice in choices}
    return ParsedOverrides(tuple(last.values()), tuple(edits), tuple(problems), notes, tuple(of_hydra))


class OverrideError(Exception):
    """Invalid override.

    Attributes:
        rule: the violated rule.
        fix: the way out.
    """

    def __init__(self, rule: str, fix: str = "") -> None:
        super().__init__(rule)
        self.rule = rule
        self.fix = fix


def parse_override(parser: OverridesParser, typed: str) -> Override:
    """Parse one override.

    Raises:
        OverrideError: the override is not valid.
    """
    if len(typed) > MAX_LENGTH:
        raise OverrideError(f"is longer than {MAX_LENGTH // 1024} KiB", "write it into a YAML file")
    if "=" not in typed and not typed.startswith("~"):
        raise OverrideError("is not an override", _missing_value_fix(typed))
    if _LONE_SURROGATE.search(typed):
        raise OverrideError("is not UTF-8 text", "write it in UTF-8")
    key, _, value = typed.partition("=")
    name = key.lstrip("+~")
    if name.count(".") >= MAX_DEPTH:
        raise OverrideError(f"is nested deeper than {MAX_DEPTH} levels", "`stoker config` lists every key")
    if not all(name.split(".")):
        whole = ".".join(part for part in name.split(".") if part)
        fix = (
            f"write {quoted_override(whole, value)}"
            if whole
            else _MISSING_NAME_FIX.format(quoted_override("NAME", value))
        )
        raise OverrideError("cannot be read: a name is missing before `=`", fix)
    try:
        return parser.parse_override(typed)
    except (HydraException, RecursionError, ValueError) as error:
        text = _as_text(typed)
        if text is not None:
            return text
        if "int_max_str_digits" in str(error):
            raise OverrideError("holds an integer of thousands of digits", "write a number, or quote text") from None
        reason = "its value" if redact(typed) != typed else one_line(error, 200)
        raise OverrideError(f"cannot be read: {reason}", _unreadable_fix(key, value)) from None


def _missing_value_fix(word: str) -> str:
    """Return the fix for a word without `=`: a YAML file, a key without its value, or a value without its key."""
    known = find_key(word.lstrip("+"))
    if known is not None:
        return f"write {word}=VALUE; it takes {known.kind}"
    if word.endswith((".yaml", ".yml")):
        folder, name = shlex.quote(str(PurePath(word).parent)), shlex.quote(PurePath(word).stem)
        return f"for a configuration file, write --config-dir {folder} --config-name {name}"
    if "/" in word and PurePath(word).name and Path(word).is_dir():
        return f"remove it, or write --config-dir {shlex.quote(word)} --config-name NAME for a configuration in it"
    if re.fullmatch(r"\+{0,2}[A-Za-z_][\w./]*", word):
        return f"write {word}=VALUE, with a value in its place"
    return _MISSING_NAME_FIX.format(quoted_override("NAME", word))


def _unreadable_fix(key: str, value: str) -> str:
    """Return the fix for an override that Hydra's grammar does not accept: for its key if it is none, or its value."""
    if not re.fullmatch(r"[+~]*[A-Za-z_$][\w./@:-]*", key, re.ASCII):
        name = key.strip()
        if find_key(name.lstrip("+~")) is not None:
            return f"write {quoted_override(name, value[:_MAX_SHOWN])}"
        return "a key has no spaces, quotes or letters beyond a to z; `stoker config` lists every key"
    known = find_key(key.lstrip("+~"))
    if len(value) > _MAX_SHOWN:
        value = "VALUE"
    if known is None or known.is_text:
        quoted = '"' + value.replace('"', '\\"') + '"'
        return f"if it is text, quote it: {quoted_override(key, quoted)}"
    if known.kind.startswith("a list") and (match := re.fullmatch(r"[(\[{]?(.*?)[)\]}]?", value)):
        return f"it takes {known.kind}; write {quoted_override(key, f'[{match[1]}]')}"
    example = "" if known.default is None else f", such as {quoted_override(key, format_value(known.default))}"
    return f"it takes {known.kind}{example}"


def _as_text(typed: str) -> Override | None:
    """Return an override whose value is taken literally, or None.

    Accepts what Hydra's grammar rejects: free text for text keys, and nested resolver calls.
    """
    key, _, value = typed.partition("=")
    path = key.lstrip("+")
    known = find_key(path)
    is_text = known is not None and known.is_text and "${" not in value
    is_nested_call = value.startswith("${") and re.fullmatch(r"[A-Za-z_][\w.]*", path) is not None
    if not (is_text or is_nested_call):
        return None
    return Override(OverrideType.CHANGE, path, ValueType.ELEMENT, value, input_line=typed)


def _check_choice(override: Override) -> Override:
    value = override.value()
    if override.is_sweep_override():
        raise OverrideError("names several choices", "choose one, or train with each: stoker train -m")
    if not override.is_delete() and not isinstance(value, (str, list, type(None))):
        raise OverrideError("must name a file of the group", "such as model=gpt_125m")
    return override


def _edit(override: Override, typed: str) -> ValueOverride:
    path = override.key_or_group
    if override.package is not None or "/" in path:
        group = path.partition("@")[0]
        raise OverrideError(
            f"there is no group `{group}`", "groups are model, data, tokenizer, optim, peft, trainer, experiment"
        )
    if override.is_sweep_override():
        known = find_key(path)
        raw = typed.partition("=")[2]
        if override.value_type == ValueType.SIMPLE_CHOICE_SWEEP and known is not None and known.is_text:
            return ValueOverride(path, raw, False, typed)
        if known is None or not accepts_value(known, [parse_scalar(item) for item in raw.split(",")]):
            takes = "" if known is None else f"it takes {known.kind}; "
            raise OverrideError("holds several values", f"{takes}quote text, or train with each: stoker train -m")
        listed = quoted_override(path, f"[{raw}]") if redact(typed) != typed else f"{path}=[{raw}]"
        raise OverrideError(
            "holds several values", f"write a list as {listed}, quote text, or train with each: stoker train -m"
        )
    return ValueOverride(path, override.value(), override.is_delete(), typed)


def _hydra_edits(override: Override, typed: str) -> Iterator[ValueOverride]:
    """Yield the values that an override of `hydra` sets, one key each."""
    path, raw = override.key_or_group, typed.partition("=")[2]
    if path.startswith(_SWEPT_BLOCK):  # its names hold dots, and its values are those of a sweep
        path = _SWEPT_BLOCK + path.removeprefix(_SWEPT_BLOCK).replace(".", SWEPT_DOT)
        quoted = None if override.is_sweep_override() else override.value()
        yield ValueOverride(path, quoted if isinstance(quoted, str) else raw, override.is_delete(), typed)
        return
    if override.is_sweep_override():
        raise OverrideError("holds several values", "a sweep has one configuration of Hydra; quote text")
    value = override.value()
    if f"{path}." == _SWEPT_BLOCK and isinstance(value, dict) and not override.is_delete():
        for name, item in value.items():
            yield ValueOverride(_SWEPT_BLOCK + str(name).replace(".", SWEPT_DOT), item, False, typed)
        return
    if isinstance(value, dict) and value and not override.is_delete():
        for below, leaf in dotted_paths.leaves({str(name): item for name, item in value.items()}, path):
            yield ValueOverride(below, leaf, False, typed)
        return
    yield ValueOverride(path, value, override.is_delete(), typed)


def _unused_hydra_group(override: Override) -> Finding:
    group = override.key_or_group
    if group.split("/")[1] in UNUSED_HYDRA_GROUPS:
        return Finding.info(("hydra",), f"`{override.input_line}` has no effect: stoker logs by itself")
    raise OverrideError(f"there is no group `{group}`", "hydra/launcher, hydra/sweeper, hydra/sweeper/sampler")


def _replaced_keys(edits: Iterable[ValueOverride]) -> Iterator[Finding]:
    """Yield a note for each key with different value overrides."""
    seen = _SeenOverrides()
    for edit in edits:
        for path, value in _assigned_values(edit):
            seen.add(path, value, edit.typed)
    yield from seen.notes()


def chosen_group(choice: Override) -> str:
    """Return the group of a choice, with its package if there is one."""
    return choice.key_or_group if choice.package is None else f"{choice.key_or_group}@{choice.package}"


def _replaced_choices(choices: Iterable[Override]) -> Iterator[Finding]:
    """Yield a note for each group with different choices."""
    seen = _SeenOverrides()
    for choice in choices:
        group = chosen_group(choice)
        value = _RESET if choice.is_delete() else format_value(choice.value())
        seen.add(group, value, choice.input_line or group)
    yield from seen.notes()


def duplicate_problem(key: str, words: Sequence[str]) -> Problem:
    """Return the problem for a key or group set by several overrides (`words`)."""
    *others, last = map(redact, words)
    rule = f"is given more than once: {', '.join(truncate_lines(others, _MAX_LISTED))} and {last}"
    return Problem(key, None, "command line", rule, "keep one of them")


class _SeenOverrides:
    """Values set by the overrides seen so far, in the order typed."""

    def __init__(self) -> None:
        self._at: dict[str, tuple[str, str]] = {}
        self._below: dict[str, str] = {}
        self._contradictions: dict[str, list[str]] = {}

    def add(self, path: str, value: str, typed: str) -> None:
        """Record `value` (or `~`) at `path`, and contradictions with earlier overrides."""
        known, word = self._at.get(path, (_RESET, ""))
        if known not in (_RESET, value):
            self._contradict(path, word, typed)
        if path in self._below:  # a whole block after one of its keys
            below = self._below[path]
            self._contradict(below, self._at[below][1], typed)
        for above in dotted_paths.parents_of(path):
            known, word = self._at.get(above, (_RESET, ""))
            if known != _RESET and not known.startswith("{") and value != _RESET:  # a key below a plain value
                self._contradict(above, word, typed)
            if value != _RESET:
                self._below[above] = path
        self._at[path] = (value, typed)

    def notes(self) -> Iterator[Finding]:
        """Yield one note per path with different values."""
        for path, words in self._contradictions.items():
            *others, last = map(redact, words)
            shown = ", ".join(truncate_lines(others, _MAX_LISTED))
            yield Finding.info((path,), f"`{last}` replaces {shown}, given before it on the command line")

    def _contradict(self, path: str, word: str, typed: str) -> None:
        words = self._contradictions.setdefault(path, [word])
        words.append(typed)


def _assigned_values(edit: ValueOverride) -> Iterator[tuple[str, str]]:
    """Yield each path that an override sets, with its value as text."""
    if edit.is_reset:
        yield edit.path, _RESET
        return
    value: Any = edit.value
    key = find_key(edit.path)
    if isinstance(value, dict) and value and not (key is not None and key.is_open):
        for path, leaf in dotted_paths.leaves(value, edit.path):
            yield path, format_value(leaf)
    else:
        yield edit.path, format_value(value)
