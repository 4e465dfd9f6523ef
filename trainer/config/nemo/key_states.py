"""The state of every key that is given: acts, not yet, refused, historical, or unknown with what it may have meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from ....models.config.key_block import Finding
from ....models.config.model_keys import FAMILIES, Family
from ...utils.redaction import shown_value
from .. import dotted_paths
from ..dotted_paths import MISSING, Tree
from ..override_typos import corrected
from ..problems import Problem
from ..schema.key_index import open_block_of, plain_path, schema_blocks, schema_keys, show_value
from ..schema.root import family_of
from ..suggest import keys_like
from .key_row import Row, State
from .key_table import KEY_TABLE, is_block_of_rows, row_of
from .unsupported_values import VALUES

_CODE = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})
_OF_GPT = {
    "model.encoder_seq_length": "model.seq_length",
    "model.share_embeddings_and_output_weights": "model.share_decoder_tokens_head_embeddings",
}
"""Keys of a GPT to those that are for the same thing in a T5."""
_PACKAGES = {"data": "model.data", "tokenizer": "model.tokenizer", "optim": "model.optim", "experiment": "_global_"}
"""What the files of a group name in their `# @package` line, where it is not the group itself."""


@cache
def known_keys(family: Family = "gpt") -> tuple[tuple[str, bool], ...]:
    """Every key of a family that has a name, and whether it acts."""
    keys, blocks = schema_keys(family), schema_blocks(family)
    acting = [(path, True) for path in [*keys, *blocks]]
    others = (row.pattern for row in KEY_TABLE if not row.pattern.endswith(".*"))
    return (*acting, *((path, False) for path in others if path not in keys))


@cache
def _keys_with_a_meaning(family: Family) -> tuple[tuple[str, bool], ...]:
    """Known keys without those that are historical: nobody means one of them."""
    return tuple((path, acts) for path, acts in known_keys(family) if acts or not _is_historical(path, family))


def _is_historical(path: str, family: Family) -> bool:
    row = row_of(path, family)
    return row is not None and row.state is State.HISTORICAL


def suggestions(path: str, family: Family = "gpt") -> tuple[str, ...]:
    """Known keys that an unknown one may have meant, the best first."""
    near = keys_like(path, _keys_with_a_meaning(family))
    meant = _OF_GPT.get(path) if family == "t5" else None
    return near if meant is None else (meant, *(other for other in near if other != meant))


def is_known(path: str) -> bool:
    """Whether a key or block has a state in some family."""
    return (
        any(path in schema_keys(family) or path in schema_blocks(family) for family in FAMILIES)
        or open_block_of(path) is not None
        or row_of(path) is not None
        or is_block_of_rows(path)
    )


def state_of(path: str, family: Family = "gpt") -> State | None:
    """The state of a key; None for one that is not known. A block of the schema acts."""
    if path in schema_keys(family) or path in schema_blocks(family) or open_block_of(path) is not None:
        return State.ACTS
    row = row_of(path, family)
    return row.state if row else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One given key.

    Attributes:
        path: dotted path.
        value: its value.
        state: its state; None for a key that is not known.
        note: for a key that does not act, what it is or why.
        refusal: why the run cannot have it; empty when it is accepted.
        fix: the way out of a refusal.
    """

    path: str
    value: Any
    state: State | None
    note: str = ""
    refusal: str = ""
    fix: str = ""


class KeyStates:
    """The states of all keys of a configuration.

    Args:
        tree: resolved values; a T5 is one by its `model.family`.
        origin_of: where the value of a path came from.
        is_typed: whether a path was set on the command line.
    """

    def __init__(
        self, tree: Tree, origin_of: Callable[[str], str], is_typed: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._tree = tree
        self._origin_of = origin_of
        self._is_typed = is_typed
        self._family: Family = family_of(tree.get("model"))
        self._keys = schema_keys(self._family)
        self._blocks = schema_blocks(self._family)
        self._verdicts = [self._judge(path, value) for path, value in self._given(tree)]

    def verdicts(self) -> Iterator[Verdict]:
        """The verdict on each key, in the order given."""
        yield from self._verdicts

    def problems(self) -> Iterator[Problem]:
        """What is refused: keys that share a reason are one problem."""
        grouped: dict[tuple[str, str, str], list[Verdict]] = {}
        for verdict in self._verdicts:
            if verdict.refusal:
                key = (verdict.refusal, verdict.fix, "" if verdict.state is State.NOT_YET else verdict.path)
                grouped.setdefault(key, []).append(verdict)
        for (refusal, fix, _), verdicts in grouped.items():
            first, *more = verdicts
            also = tuple(
                f"{v.path} = {shown_value(v.path, show_value(v.value))} ({self._origin_of(v.path)})" for v in more[:5]
            )
            if len(more) > 5:
                also = (*also, f"{len(more) - 5} more")
            if first.state is None and _families_with(first.path):
                also = (*also, f"model.family = {self._family} ({self._origin_of('model.family')})")
            yield Problem(first.path, show_value(first.value), self._origin_of(first.path), refusal, fix, also)

    def findings(self) -> Iterator[Finding]:
        """What was accepted though it does nothing: one note on historical keys, one on settings of what is off."""
        history = [verdict.path for verdict in self._verdicts if verdict.state is State.HISTORICAL]
        typed = [path for path in history if self._is_typed(path)]
        files = [path for path in history if path not in typed]
        if typed:  # every one: who types a key expects something of it
            yield Finding(
                "info",
                tuple(typed),
                f"{_counted(typed)} of NeMo without meaning here, given on the command line: {', '.join(typed)}",
            )
        if files:
            yield Finding(
                "info", tuple(files), f"{_counted(files)} of NeMo without meaning here, accepted: {_listed(files)}"
            )
        inert = [v for v in self._verdicts if v.state is State.NOT_YET and not v.refusal and v.note and self._is_set(v)]
        if inert:
            names = [verdict.path for verdict in inert]
            yield Finding(
                "info", tuple(names), f"{_counted(names)} without effect, since the feature is off: {_listed(names)}"
            )

    def _judge(self, path: str, value: Any) -> Verdict:
        if _CODE.intersection(path.split(".")) or _names_code(value):
            return Verdict(path, value, None, "", "a configuration never names code to run", "remove it")
        if path in self._keys or open_block_of(path) is not None or path in self._blocks:
            return self._judge_acting(path, value)
        row = row_of(path, self._family)
        if row is None:
            return self._judge_unknown(path, value)
        if row.state is State.HISTORICAL:
            return Verdict(path, value, row.state, row.note)
        if self._is_accepted(row, value):
            return Verdict(path, value, row.state, self._why_accepted(row))
        if row.state is State.NOT_YET:
            off = "leave it out" if not row.off else f"{row.pattern.removesuffix('.*')}={show_value(row.off[0])}"
            return Verdict(path, value, row.state, row.note, f"not yet: {row.note}", off)
        return Verdict(path, value, row.state, row.note, f"refused: {row.note}", self._way_out(row, path, value))

    def _way_out(self, row: Row, path: str, value: Any) -> str:
        """The overrides that mend a refused key and keep what it says, where another key says it."""
        if row.cure is not None:
            return row.cure.format(path=path)
        if row.same_as in self._keys:
            return f"~{path} {corrected(row.same_as, show_value(value))}"
        return f"~{path}" if not row.off or row.off[0] is None else f"{path}={show_value(row.off[0])}"

    def _why_accepted(self, row: Row) -> str:
        if not row.switch:
            return "accepted with this value" if row.state is State.REFUSED else "off"
        key = self._keys.get(row.switch)
        if key is not None:
            return f"no effect with {row.switch}={show_value(dotted_paths.get(self._tree, row.switch, key.default))}"
        return f"no effect while {row.switch} is off"

    def _judge_acting(self, path: str, value: Any) -> Verdict:
        try:
            found = VALUES.get(plain_path(path), {}).get(value) if not isinstance(value, bool) else None
        except TypeError:
            found = None
        if found is None:
            return Verdict(path, value, State.ACTS)
        key = self._keys[path]
        choices = ", ".join(show_value(choice) for choice in key.choices)
        fix = f"{path}={found.use}" if found.use else f"{path} takes {choices or key.kind}"
        return Verdict(path, value, found.state, found.note, f"{found.state.value}: {found.note}", fix)

    def _is_accepted(self, row: Row, value: Any) -> bool:
        """Whether a key that does not act has a value that changes nothing."""
        if value is None or value == MISSING or any(_means(value, off) for off in row.off):
            return True
        if row.same_as:
            key = self._keys.get(row.same_as)
            return key is not None and value == dotted_paths.get(self._tree, row.same_as, key.default)
        return bool(row.switch)

    def _judge_unknown(self, path: str, value: Any) -> Verdict:
        above = dotted_paths.parent_of(path)
        if above in self._keys:
            return Verdict(
                path,
                value,
                None,
                "",
                f"there is no such key: `{above}` has one value, and no keys below it",
                f"{above}=VALUE",
            )
        near = suggestions(path, self._family)
        group, _, rest = path.partition(".")
        meant = dotted_paths.join(_PACKAGES[group], rest).removeprefix("_global_.") if group in _PACKAGES else ""
        if is_known(meant):
            near = (meant,)
        fix = f"did you mean {near[0]}?" if near else "`stoker config` lists every key"
        if len(near) > 1:
            fix += f" (or {', '.join(near[1:])})"
        if group in _PACKAGES and ".yaml:" in self._origin_of(path):
            fix += f"; a file of the group {group} needs the line `# @package {_PACKAGES[group]}` at its head"
        elsewhere = _families_with(path)
        here = f" in a model of `family: {self._family}`, only with {' or '.join(elsewhere)}" if elsewhere else ""
        return Verdict(path, value, None, "", f"there is no such key{here}", fix)

    def _given(self, tree: Tree, parent: str = "") -> Iterator[tuple[str, Any]]:
        """Leaves of `tree`; a block that is the value of one key (in the table, or code) is one leaf."""
        for name, value in tree.items():
            path = dotted_paths.join(parent, name)
            if not isinstance(value, dict) or (path in self._keys and not value):
                yield path, value
            elif value or path not in self._blocks:
                below = list(self._given(value, path))
                yield from below or [(path, value)]

    def _is_set(self, verdict: Verdict) -> bool:
        row = row_of(verdict.path, self._family)
        value = verdict.value
        return value is not None and value != MISSING and bool(row and row.switch)


def _families_with(path: str) -> list[Family]:
    return [family for family in FAMILIES if path in schema_keys(family)]


def _means(value: Any, off: Any) -> bool:
    """Whether a value is one that changes nothing: 1 of something is not 1.0, all of it, nor is a number true."""
    if isinstance(off, float) and isinstance(value, int):
        return False
    return value == off and isinstance(value, bool) == isinstance(off, bool)


def _names_code(value: Any) -> bool:
    """Whether a list, at any depth, holds a block that names code."""
    if isinstance(value, dict):
        return bool(_CODE.intersection(value)) or any(map(_names_code, value.values()))
    return isinstance(value, list) and any(map(_names_code, value))


def _counted(names: list[str]) -> str:
    return f"{len(names)} {'key' if len(names) == 1 else 'keys'}"


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown}, ... (`stoker config` lists them)"
