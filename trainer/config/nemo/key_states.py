"""State of every given key: acts, not yet, refused, historical, or unknown (with suggestions)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from ....models.config.extensions import extension_names
from ....models.config.key_block import Finding
from ....models.config.model import FAMILIES, Family
from ...utils.redaction import redact_value
from ...utils.text import pluralize
from .. import dotted_paths
from ..dotted_paths import MISSING, Tree
from ..override_typos import quoted_override
from ..problems import Problem
from ..schema.key_index import SchemaKey, enclosing_open_block, format_value, schema_blocks, schema_keys, without_stack
from ..schema.root import family_of
from ..suggest import nearest_keys
from ..validate import validate_types
from .key_table import KeyRow, KeyState, UnsupportedValue, find_row, has_rows_below, key_table, unsupported_values
from .other_frameworks import template_block

_CODE_KEYS = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})
_GPT_TO_T5 = {
    "model.encoder_seq_length": "model.seq_length",
    "model.share_embeddings_and_output_weights": "model.share_decoder_tokens_head_embeddings",
}
"""Keys of a GPT and their counterparts in a T5."""
_PACKAGE_OF = {
    "data": "model.data",
    "tokenizer": "model.tokenizer",
    "optim": "model.optim",
    "experiment": "_global_",
}
"""The `# @package` of each group's files, if it is not the group itself."""
OWN_VALUES = "values of your own that others refer to go below `run:`: run.NAME, and ${run.NAME} where it is used"
_MAX_SUGGESTIONS = 200
"""Unknown keys of one configuration that get a suggestion, at about 2 ms each."""


@cache
def known_keys(family: Family = "gpt") -> tuple[tuple[str, bool], ...]:
    """Return (path, acts) for every known key of a family, without patterns."""
    keys, blocks = schema_keys(family), schema_blocks(family)
    acting = [(path, True) for path in [*keys, *blocks]]
    others = (pattern for pattern in key_table() if not pattern.endswith(".*"))
    return (*acting, *((path, False) for path in others if path not in keys))


@cache
def _suggestable_keys(family: Family) -> tuple[tuple[str, bool], ...]:
    """Return the known keys without historical ones, which are never suggested."""
    return tuple((path, acts) for path, acts in known_keys(family) if acts or not _is_historical(path, family))


def _is_historical(path: str, family: Family) -> bool:
    row = find_row(path, family)
    return row is not None and row.state is KeyState.HISTORICAL


def suggest_keys(path: str, family: Family = "gpt") -> tuple[str, ...]:
    """Return the known keys that an unknown one may have meant, best first."""
    near = nearest_keys(path, _suggestable_keys(family))
    counterpart = _GPT_TO_T5.get(path) if family == "t5" else None
    return near if counterpart is None else (counterpart, *(other for other in near if other != counterpart))


def is_known_key(path: str) -> bool:
    """Return True if a key or block is known in any family."""
    return (
        any(path in schema_keys(family) or path in schema_blocks(family) for family in FAMILIES)
        or enclosing_open_block(path) is not None
        or find_row(path) is not None
        or has_rows_below(path)
    )


def key_state(path: str, family: Family = "gpt") -> KeyState | None:
    """Return the state of a key, or None if it is unknown. A block of the schema acts."""
    if path in schema_keys(family) or path in schema_blocks(family) or enclosing_open_block(path) is not None:
        return KeyState.ACTS
    row = find_row(path, family)
    return row.state if row else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result for one given key.

    Attributes:
        state: its state; None for an unknown key.
        note: description or reason, for a key that does not act.
        error: the error; empty if the key is accepted.
        fix: the way out of the error.
        block: the refused block it belongs to; errors of one block are one problem.
    """

    path: str
    value: Any
    state: KeyState | None
    note: str = ""
    error: str = ""
    fix: str = ""
    block: str = ""


class KeyStates:
    """States of all keys in a tree of resolved values; `is_typed` tells which were set on the command line,
    and `referenced` holds those that other values refer to.

    Attributes:
        verdicts: the verdict on each key, in the order given.
    """

    def __init__(
        self,
        tree: Tree,
        origin_of: Callable[[str], str],
        is_typed: Callable[[str], bool] = lambda _: False,
        referenced: Container[str] = (),
    ) -> None:
        self._tree = tree
        self._origin_of = origin_of
        self._is_typed = is_typed
        self._referenced = referenced
        self._family: Family = family_of(tree.get("model"))
        self._keys = schema_keys(self._family)
        self._blocks = schema_blocks(self._family)
        self._suggestions = 0
        self._moves: dict[str, Any] = {}
        self.verdicts = [self._verdict(path, value) for path, value in self._given_leaves(tree)]

    def problems(self) -> Iterator[Problem]:
        """Yield the errors; unsupported keys with the same reason are one problem."""
        grouped: dict[tuple[str, str, str], list[Verdict]] = {}
        for verdict in self.verdicts:
            if verdict.error:
                group = "" if verdict.state is KeyState.NOT_YET else verdict.block or verdict.path
                key = (verdict.error, verdict.fix, group)
                grouped.setdefault(key, []).append(verdict)
        for (refusal, fix, _), verdicts in grouped.items():
            first, *more = verdicts
            also = tuple(
                f"{v.path} = {redact_value(v.path, format_value(v.value))} ({self._origin_of(v.path)})"
                for v in more[:5]
            )
            if len(more) > 5:
                also = (*also, f"{len(more) - 5} more")
            if first.state is None and _families_with(first.path):
                also = (*also, f"model.family = {self._family} ({self._origin_of('model.family')})")
            yield Problem(first.path, format_value(first.value), self._origin_of(first.path), refusal, fix, also)

    def findings(self) -> Iterator[Finding]:
        """Yield notes on accepted keys without effect: historical keys, and settings of disabled features."""
        history = [verdict.path for verdict in self.verdicts if verdict.state is KeyState.HISTORICAL]
        typed = [path for path in history if self._is_typed(path)]
        files = [path for path in history if path not in typed]
        inert = [
            v.path for v in self.verdicts if v.state is KeyState.NOT_YET and not v.error and v.note and self._is_set(v)
        ]
        for paths, what, listed in (
            # All that were typed are listed: the user expects them to have an effect.
            (typed, "of NeMo without effect here, given on the command line", ", ".join(typed)),
            (files, "of NeMo without effect here, accepted", _listed(files)),
            (inert, "without effect because the feature is off", _listed(inert)),
        ):
            if paths:
                yield Finding.info(tuple(paths), f"{pluralize(len(paths), 'key')} {what}: {listed}")

    def _verdict(self, path: str, value: Any) -> Verdict:
        template = template_block(path)
        if template is not None:
            block, fix = template
            return Verdict(path, value, None, "", "is of lightning-hydra-template and has no meaning here", fix, block)
        if _CODE_KEYS.intersection(path.split(".")) or _names_code(value):
            return Verdict(path, value, None, "", "a configuration must not name code to run", "remove it")
        if path in self._keys or enclosing_open_block(path) is not None or path in self._blocks:
            return self._acting_verdict(path, value)
        row = find_row(path, self._family)
        if row is None:
            return self._unknown_verdict(path, value)
        if row.state is KeyState.HISTORICAL:
            return Verdict(path, value, row.state, row.note)
        if self._is_accepted(row, value) and not self._lacks_files(row, path, value):
            return Verdict(path, value, row.state, self._why_accepted(row))
        if row.state is KeyState.NOT_YET:
            key = row.pattern.removesuffix(".*")
            off = f"{key}={format_value(row.accepts[0])}" if row.accepts else "leave it out"
            return Verdict(path, value, row.state, row.note, f"not yet: {row.note}", off)
        block = row.pattern.removesuffix(".*") if row.pattern.endswith(".*") else ""
        return Verdict(path, value, row.state, row.note, f"refused: {row.note}", self._fix(row, path, value), block)

    def _fix(self, row: KeyRow, path: str, value: Any) -> str:
        """Return the overrides that fix a refused key, moving its value to the key that replaces it."""
        if row.fix is not None and self._family == "bert" and "ptuning" in row.fix:
            return f"~{path}"
        if row.fix is not None and self._family == "t5" and "prompt_template" in row.fix:
            return f"~{path} model.data.context_key=KEY model.data.label_key=KEY"
        if row.fix is not None:
            return row.fix.format(path=path, block=dotted_paths.parent_of(path))
        if row.pattern.endswith(".*"):
            return f"~{row.pattern.removesuffix('.*')}"
        if (same_as := self._same_as(row)) in self._keys:
            return self._move(path, self._keys[same_as], value)
        return f"~{path}" if not row.accepts or row.accepts[0] is None else f"{path}={format_value(row.accepts[0])}"

    def _same_as(self, row: KeyRow) -> str:
        """Return the key that replaces a refused one, in this family."""
        return _GPT_TO_T5.get(row.same_as, row.same_as) if self._family == "t5" else row.same_as

    def _move(self, path: str, key: SchemaKey, value: Any) -> str:
        """Return the overrides that move a value to the key that takes it; if it does not take this one, say what.

        Of several values for one key (lengths of training and validation data), the first is moved; none replaces one
        that was typed.
        """
        if self._is_typed(key.path) or self._moves.setdefault(key.path, value) != value:
            return f"~{path}"
        unsupported = _unsupported(key.path, value)
        if unsupported is not None and unsupported.use:
            return f"~{path} {key.path}={unsupported.use}"
        tree: Tree = {}
        dotted_paths.put(tree, "model.family", self._family)
        dotted_paths.put(tree, key.path, value)
        _, problems, _ = validate_types(tree, self._origin_of)
        if not problems:
            return f"~{path} {quoted_override(key.path, format_value(value))}"
        if problems[0].fix.startswith(f"write {key.path}="):
            return f"~{path} {problems[0].fix.removeprefix('write ')}"
        return f"~{path}, or {key.path}=VALUE in place of it, which takes {key.kind}"

    def _why_accepted(self, row: KeyRow) -> str:
        if not row.switch:
            return "accepted with this value" if row.state is KeyState.REFUSED else "off"
        key = self._keys.get(row.switch)
        if key is not None:
            return f"no effect with {row.switch}={format_value(dotted_paths.get(self._tree, row.switch, key.default))}"
        return f"no effect while {row.switch} is off"

    def _acting_verdict(self, path: str, value: Any) -> Verdict:
        unsupported = _unsupported(path, value)
        if unsupported is None:
            return Verdict(path, value, KeyState.ACTS)
        key = self._keys[path]
        if key.extends and value in extension_names(key.extends):
            return Verdict(path, value, KeyState.ACTS)
        choices = ", ".join(format_value(choice) for choice in key.choices)
        fix = f"{path}={unsupported.use}" if unsupported.use else f"{path} takes {choices or key.kind}"
        for name, needed in unsupported.needs:
            other = dotted_paths.join(dotted_paths.parent_of(path), name)
            if not dotted_paths.get(self._tree, other):
                fix += f" {other}={format_value(needed)}"
        state, note = unsupported.state, unsupported.note
        return Verdict(path, value, state, note, f"{state.value}: {note}", fix)

    def _is_accepted(self, row: KeyRow, value: Any) -> bool:
        """Return True if a key that does not act has a value that changes nothing."""
        if value is None or value == MISSING or any(_equals(value, accepted) for accepted in row.accepts):
            return True
        if row.same_as:
            key = self._keys.get(self._same_as(row))
            if key is None or value != dotted_paths.get(self._tree, key.path, key.default):
                return False
            self._moves.setdefault(key.path, value)
            return True
        # A switch that does not act is refused itself.
        return bool(row.switch) and not (row.switch in self._keys and dotted_paths.get(self._tree, row.switch) is True)

    def _lacks_files(self, row: KeyRow, path: str, value: Any) -> bool:
        """Return True if files that must be given (`???`) have another key here, which is not set."""
        files = dotted_paths.get(self._tree, dotted_paths.join(dotted_paths.parent_of(path), "file_names"))
        return value == MISSING and "file_names=" in (row.fix or "") and not files

    def _unknown_verdict(self, path: str, value: Any) -> Verdict:
        above = dotted_paths.parent_of(path)
        if above in self._keys:
            error = f"there is no such key: `{above}` is a value, not a block"
            return Verdict(path, value, None, error=error, fix=f"{above}=VALUE")
        near = suggest_keys(path, self._family) if self._suggestions < _MAX_SUGGESTIONS else ()
        self._suggestions += 1
        group, _, rest = path.partition(".")
        full_path = (
            dotted_paths.join(_PACKAGE_OF[group], rest).removeprefix("_global_.") if group in _PACKAGE_OF else ""
        )
        if is_known_key(full_path):
            near = (full_path,)
        fix = f"did you mean {near[0]}?" if near else "`stoker config` lists every key"
        if len(near) > 1:
            fix += f" (or {', '.join(near[1:])})"
        if not near and path in self._referenced:
            fix = OWN_VALUES
        if group in _PACKAGE_OF and f"/{group}/" in f"/{self._origin_of(path).rpartition('.yaml:')[0]}":
            fix += f"; a file of the group {group} needs the line `# @package {_PACKAGE_OF[group]}` at its head"
        elsewhere = _families_with(path)
        here = f" in a model of `family: {self._family}`, only with {' or '.join(elsewhere)}" if elsewhere else ""
        return Verdict(path, value, None, "", f"there is no such key{here}", fix)

    def _given_leaves(self, tree: Tree, parent: str = "") -> Iterator[tuple[str, Any]]:
        """Yield the leaves of `tree`; a block that is the value of one key (in the table, or code) is one leaf."""
        for name, value in tree.items():
            path = dotted_paths.join(parent, name)
            if not isinstance(value, dict) or (path in self._keys and not value):
                yield path, value
            elif value or not (path in self._blocks or (find_row(path) is None and has_rows_below(path))):
                below = list(self._given_leaves(value, path))
                yield from below or [(path, value)]

    def _is_set(self, verdict: Verdict) -> bool:
        row = find_row(verdict.path, self._family)
        return verdict.value not in (None, MISSING) and bool(row and row.switch)


def _unsupported(path: str, value: Any) -> UnsupportedValue | None:
    """Return why a value of a key that acts is not supported; None if nothing is known against it."""
    known = unsupported_values().get(without_stack(path), {})
    return None if isinstance(value, bool | list | dict) else known.get(value)


def _families_with(path: str) -> list[Family]:
    return [family for family in FAMILIES if path in schema_keys(family)]


def _equals(value: Any, accepted: Any) -> bool:
    """Return True if a value equals an accepted one; 1 (a count) differs from 1.0 (a fraction), and 1 from True."""
    if isinstance(accepted, float) and isinstance(value, int):
        return False
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)


def _names_code(value: Any) -> bool:
    """Return True if a list, at any depth, holds a block that names code."""
    if isinstance(value, dict):
        return bool(_CODE_KEYS.intersection(value)) or any(map(_names_code, value.values()))
    return isinstance(value, list) and any(map(_names_code, value))


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown}, ... (`stoker config` lists them)"
