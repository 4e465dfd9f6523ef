"""Resolve `${...}`: references to other keys, NeMo's arithmetic, and environment variables where they are allowed.

OmegaConf's grammar and meaning for what configurations hold (a test compares the two), evaluated here because the
values may come from a file nobody has read: every expansion is bounded in depth, size and number, references in a
circle are an error, and which values came from the environment is known, so that they are never written to disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .dotted_paths import MISSING, join, leaves, parent_of
from .resolvers import RESOLVERS
from .yaml_reader import scalar

MAX_DEPTH = 64
MAX_TEXT = 64 * 1024
MAX_STEPS = 20_000
_ABSENT = object()
_ARGUMENT_END = ",}"
_RESOLVER = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.]*)\s*:")


class InterpolationError(ValueError):
    """An interpolation that has no value; the message says why, without naming the key that holds it."""


class AbsentError(InterpolationError):
    """It refers to a key that does not exist.

    Attributes:
        target: the path it refers to.
    """

    def __init__(self, target: str) -> None:
        super().__init__(f"refers to `{target}`, which does not exist")
        self.target = target


def holds_interpolation(value: Any) -> bool:
    """Whether a value, or any element of a list or block, is written with `${`."""
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, list):
        return any(map(holds_interpolation, value))
    return isinstance(value, dict) and any(map(holds_interpolation, value.values()))


@dataclass(frozen=True, slots=True)
class Resolved:
    """The value of a key, and whether any part of it came from the environment."""

    value: Any
    from_environment: bool


class Resolver:
    """Values of the keys of one tree, interpolations resolved.

    Args:
        tree: every key that can be referred to, defaults included.
        environ: what `oc.env` reads.
        fallback: the value of a path that is not in the tree; called with the path, raises KeyError for none.
        is_text: whether the key at a path takes nothing but text; elsewhere a value that comes from the environment as
            a whole is read as YAML, so that `${oc.env:WIDTH}` can be a number.
    """

    def __init__(
        self,
        tree: Mapping[str, Any],
        environ: Mapping[str, str],
        fallback: Callable[[str], Any] | None = None,
        is_text: Callable[[str], bool] = lambda path: True,
    ) -> None:
        self._tree = tree
        self._environ = environ
        self._fallback = fallback
        self._is_text = is_text
        self._done: dict[str, Resolved] = {}
        self._open: list[str] = []
        self._steps = 0

    def value(self, path: str) -> Resolved:
        """The value at `path`.

        Raises:
            InterpolationError: it cannot be resolved.
        """
        if path in self._done:
            return self._done[path]
        if path in self._open:
            circle = " -> ".join(f"`{step}`" for step in [*self._open[self._open.index(path) :], path])
            raise InterpolationError(f"refers to itself: {circle}")
        if len(self._open) >= MAX_DEPTH:
            raise InterpolationError(f"refers through more than {MAX_DEPTH} other keys")
        raw = self._raw(path)
        self._open.append(path)
        try:
            self._done[path] = self._evaluate(raw, path)
        finally:
            self._open.pop()
        return self._done[path]

    def _raw(self, path: str) -> Any:
        """The value as written; a reference may stand on the way (`a: ${b}`, then `${a.c}`)."""
        node: Any = self._tree
        walked = ""
        for name in _steps_of(path):
            if isinstance(node, str) and "${" in node and walked not in self._open:
                node = self.value(walked).value
            if isinstance(node, dict) and name in node:
                node = node[name]
            elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            elif self._fallback is not None:
                try:
                    return self._fallback(path)
                except KeyError:
                    raise AbsentError(path) from None
            else:
                raise AbsentError(path)
            walked = join(walked, name)
        return node

    def _evaluate(self, raw: Any, path: str) -> Resolved:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise InterpolationError("expands to more values than a configuration can have")
        if isinstance(raw, str):
            if "${" not in raw:
                return Resolved(raw, False)
            found = _Text(raw, path, self).evaluate()
            if found.from_environment and isinstance(found.value, str) and not self._is_text(path):
                return Resolved(scalar(found.value), True)
            return found
        if isinstance(raw, (list, dict)):
            names = range(len(raw)) if isinstance(raw, list) else raw
            items = {name: self.value(join(path, str(name))) for name in names}
            tainted = any(item.from_environment for item in items.values())
            if isinstance(raw, list):
                return Resolved([item.value for item in items.values()], tainted)
            return Resolved({name: item.value for name, item in items.items()}, tainted)
        return Resolved(raw, False)

    def environment(self, arguments: list[Any]) -> Any:
        """`oc.env:NAME` or `oc.env:NAME,default`."""
        if not 1 <= len(arguments) <= 2 or not isinstance(arguments[0], str):
            raise InterpolationError("`oc.env` takes the name of a variable and, if you like, a default")
        found = self._environ.get(arguments[0], _ABSENT)
        if found is not _ABSENT:
            return found
        if len(arguments) == 1:
            raise InterpolationError(
                f"needs the environment variable `{arguments[0]}`, which is not set; set it, or write a default: "
                f"${{oc.env:{arguments[0]},default}}"
            )
        return arguments[1] if arguments[1] is None else str(arguments[1])

    def select(self, arguments: list[Any], path: str) -> Resolved:
        """`oc.select:key` or `oc.select:key,default`: null or the default where the key does not exist."""
        if not 1 <= len(arguments) <= 2 or not isinstance(arguments[0], str):
            raise InterpolationError("`oc.select` takes a key and, if you like, a default")
        default = arguments[1] if len(arguments) == 2 else None
        try:
            found = self.value(_absolute(arguments[0], path))
        except AbsentError:
            return Resolved(default, False)
        return Resolved(default, False) if found.value == MISSING else found


def _steps_of(path: str) -> list[str]:
    """Names along a path, `a[0].b` and `a.0.b` alike."""
    return [step for step in re.split(r"[.\[\]]+", path) if step]


def _absolute(reference: str, path: str) -> str:
    """The path that `reference`, written at `path`, means: each leading dot is one level up."""
    reference = reference.strip()
    dots = len(reference) - len(reference.lstrip("."))
    if dots == 0:
        return ".".join(_steps_of(reference))
    base = path
    for _ in range(dots):
        if not base:
            raise InterpolationError(f"`{reference}` climbs above the root")
        base = parent_of(base)
    return join(base, ".".join(_steps_of(reference[dots:])))


def _primitive(text: str) -> Any:
    """An unquoted argument, by OmegaConf's grammar: unlike in YAML, `yes` and `NO` are text."""
    value = scalar(text)
    if isinstance(value, bool):
        return value if text.lower() in ("true", "false") else text
    return text if value is None and text.lower() != "null" else value


class _Text:
    """One string with interpolations, read from left to right."""

    def __init__(self, text: str, path: str, resolver: Resolver) -> None:
        self._text = text
        self._path = path
        self._resolver = resolver
        self._at = 0
        self._depth = 0
        self._tainted = False

    def evaluate(self) -> Resolved:
        return Resolved(self._pieces(until=""), self._tainted)

    def _pieces(self, until: str) -> Any:
        """Text and interpolations up to one of the characters `until`; a lone interpolation keeps its type."""
        pieces: list[Any] = []
        plain: list[str] = []
        size = 0
        while self._at < len(self._text) and self._text[self._at] not in until:
            character = self._text[self._at]
            if character == "\\":
                self._escape(plain)
            elif self._text.startswith("${", self._at):
                if plain:
                    pieces.append("".join(plain))
                    plain = []
                pieces.append(_Value(self._interpolation()))
            else:
                plain.append(character)
                self._at += 1
        tail = "".join(plain)
        if until == _ARGUMENT_END:
            tail = tail.rstrip()
        if tail:
            pieces.append(tail)
        if len(pieces) == 1:
            return pieces[0].value if isinstance(pieces[0], _Value) else pieces[0]
        if any(isinstance(piece, _Value) and piece.value == MISSING for piece in pieces):
            return MISSING
        texts = []
        for piece in pieces:
            value = piece.value if isinstance(piece, _Value) else piece
            if isinstance(value, (dict, list)):
                raise InterpolationError("puts a list or a block into the middle of a text")
            texts.append(str(value))
            size += len(texts[-1])
            if size > MAX_TEXT:
                raise InterpolationError(f"expands to more than {MAX_TEXT // 1024} KiB of text")
        return "".join(texts)

    def _escape(self, plain: list[str]) -> None:
        """Backslashes matter only before `${`: each pair is one backslash, an odd one makes `${` plain text."""
        start = self._at
        while self._at < len(self._text) and self._text[self._at] == "\\":
            self._at += 1
        count = self._at - start
        if not self._text.startswith("${", self._at):
            plain.append("\\" * count)
            return
        plain.append("\\" * (count // 2))
        if count % 2:
            plain.append("${")
            self._at += 2

    def _interpolation(self) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise InterpolationError(f"is nested deeper than {MAX_DEPTH} levels")
        self._at += 2
        called = _RESOLVER.match(self._text, self._at)
        if called:
            self._at = called.end()
            value = self._call(called[1], self._arguments())
        else:
            reference = self._pieces(until="}")
            self._close()
            if not isinstance(reference, str) or not reference.strip(" ."):
                raise InterpolationError("has an empty or wrong reference between `${` and `}`")
            found = self._resolver.value(_absolute(reference, self._path))
            self._tainted |= found.from_environment
            value = found.value
        self._depth -= 1
        return value

    def _close(self) -> None:
        if self._at >= len(self._text):
            raise InterpolationError("has a `${` without its `}`")
        self._at += 1

    def _arguments(self) -> list[Any]:
        arguments: list[Any] = []
        while True:
            self._skip_blanks()
            arguments.append(self._argument())
            self._skip_blanks()
            if self._at < len(self._text) and self._text[self._at] == ",":
                self._at += 1
                continue
            self._close()
            return arguments

    def _argument(self) -> Any:
        if self._at < len(self._text) and self._text[self._at] in "'\"":
            quote = self._text[self._at]
            end = self._text.find(quote, self._at + 1)
            if end < 0:
                raise InterpolationError(f"has a quote {quote} without its end")
            value = self._text[self._at + 1 : end]
            self._at = end + 1
            return value
        start = self._at
        value = self._pieces(until=_ARGUMENT_END)
        plain = "${" not in self._text[start : self._at]
        return _primitive(value) if plain and isinstance(value, str) else value

    def _skip_blanks(self) -> None:
        while self._at < len(self._text) and self._text[self._at] in " \t\n":
            self._at += 1

    def _call(self, name: str, arguments: list[Any]) -> Any:
        if name == "oc.env":
            self._tainted = True
            return self._resolver.environment(arguments)
        if name == "oc.select":
            found = self._resolver.select(arguments, self._path)
            self._tainted |= found.from_environment
            return found.value
        if MISSING in arguments:
            return MISSING
        if name == "oc.decode" and len(arguments) == 1:
            return scalar(arguments[0]) if isinstance(arguments[0], str) else arguments[0]
        function = RESOLVERS.get(name)
        if function is None:
            known = ", ".join([*RESOLVERS, "oc.env", "oc.select", "oc.decode"])
            raise InterpolationError(f"calls `{name}`; there are only {known}")
        try:
            return function(*arguments)
        except (ValueError, OverflowError) as error:
            raise InterpolationError(str(error)) from None


@dataclass(frozen=True, slots=True)
class _Value:
    """The value of one interpolation among the pieces of a text."""

    value: Any


def resolve_leaves(tree: Mapping[str, Any], resolver: Resolver) -> tuple[dict[str, Resolved], dict[str, Exception]]:
    """The values of all leaves of `tree`, and what could not be resolved."""
    values: dict[str, Resolved] = {}
    errors: dict[str, Exception] = {}
    for path, _ in leaves(tree):
        try:
            values[path] = resolver.value(path)
        except InterpolationError as error:
            errors[path] = error
    return values, errors
