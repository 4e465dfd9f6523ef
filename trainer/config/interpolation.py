"""Resolve `${...}`: references to other keys, NeMo's arithmetic, environment variables, `hydra:` and `now:`.

Grammar and semantics follow OmegaConf (a test compares the two). Evaluation is implemented here because configuration
files may be untrusted: expansions are bounded in depth, size and number, cyclic references are an error, and values
from the environment are tracked, so that they are never written to disk.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...models.config.extensions import extension_names, extension_source, load_extension
from .dotted_paths import MISSING, join, parent_of
from .resolvers import RESOLVERS
from .yaml_reader import parse_scalar

MAX_DEPTH = 64
MAX_TEXT = 64 * 1024
MAX_EVALUATIONS = 20_000
_ABSENT = object()
_ARGUMENT_END = ",}"
_RESOLVER = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.]*)\s*:")
_FIXED = re.compile(r"(?<!\\)\$\{\s*(?:now|hydra)\s*:[^${}]*\}")
"""A value that is evaluated once, also in text that is saved with its references to the environment."""
ENVIRONMENT_NAME = re.compile(r"oc\.env:\s*(\w+)")
_REFERENCE = re.compile(r"(?<!\\)\$\{\s*(\.*[A-Za-z_][\w.\[\]]*)\s*\}")


class InterpolationError(ValueError):
    """Interpolation that cannot be resolved; the message does not name the key that holds it.

    Attributes:
        at: path of that key, which those that are resolved may only refer to.
    """

    at = ""


class MissingKeyError(InterpolationError):
    """Reference to a key that does not exist.

    Attributes:
        target: path of the missing key.
    """

    def __init__(self, target: str, message: str = "") -> None:
        super().__init__(message or f"refers to `{target}`, which does not exist")
        self.target = target


def has_interpolation(value: Any) -> bool:
    """Return True if a value, or any element of a list or block, contains `${`."""
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, list):
        return any(map(has_interpolation, value))
    return isinstance(value, dict) and any(map(has_interpolation, value.values()))


@dataclass(frozen=True, slots=True)
class Resolved:
    """Resolved value of a key.

    Attributes:
        value: the value.
        from_environment: True if any part of it came from the environment.
        sources: paths of all values it was made from, itself included.
    """

    value: Any
    from_environment: bool
    sources: frozenset[str] = frozenset()


class Resolver:
    """Resolve the interpolations of one tree.

    Args:
        tree: all keys that can be referenced, including defaults.
        environ: environment variables for `oc.env`.
        fallback: returns the value of a path that is not in the tree, or raises KeyError.
        is_text: returns True if the key at a path takes text only; for other keys a value from the environment is
            parsed as YAML, so that `${oc.env:WIDTH}` can be a number.
        is_variable: returns True for a path that another program's file leaves to the user; it is `???` until set.
        alias: returns the path to use for a reference, such as `model.seed` for `training.model.seed`.
        now: the time for `now`; None: it has no value.

    Attributes:
        unset: paths met so far that have no value (`???`).
    """

    def __init__(
        self,
        tree: Mapping[str, Any],
        environ: Mapping[str, str],
        fallback: Callable[[str], Any] | None = None,
        is_text: Callable[[str], bool] = lambda path: True,
        is_variable: Callable[[str], bool] = lambda path: False,
        alias: Callable[[str], str] = lambda path: path,
        now: time.struct_time | None = None,
    ) -> None:
        self._tree = tree
        self._environ = environ
        self._fallback = fallback
        self._is_text = is_text
        self._is_variable = is_variable
        self._alias = alias
        self._now = now
        self.unset: set[str] = set()
        self._resolved: dict[str, Resolved] = {}
        self._resolving: list[str] = []
        self._expanded: dict[str, Any] = {}
        self._evaluations = 0

    def resolve(self, path: str) -> Resolved:
        """Return the resolved value at `path`.

        Raises:
            InterpolationError: the value cannot be resolved.
        """
        if path in self._resolved:
            return self._resolved[path]
        if path in self._resolving:
            cycle = " -> ".join(f"`{step}`" for step in [*self._resolving[self._resolving.index(path) :], path])
            raise InterpolationError(f"refers to itself: {cycle}")
        if len(self._resolving) >= MAX_DEPTH:
            raise InterpolationError(f"refers through more than {MAX_DEPTH} other keys")
        raw = self._raw(path)
        if raw == MISSING:
            self.unset.add(path)
        self._resolving.append(path)
        try:
            found = self._evaluate(raw, path)
            self._resolved[path] = replace(found, sources=found.sources | {path})
        except InterpolationError as error:
            error.at = error.at or path
            raise
        finally:
            self._resolving.pop()
        return self._resolved[path]

    def _raw(self, path: str) -> Any:
        """Return the unresolved value at `path`; a parent may be a reference itself (`a: ${b}`, then `${a.c}`)."""
        node: Any = self._tree
        walked = ""
        for name in _path_parts(path):
            if isinstance(node, str) and "${" in node and walked not in self._resolving:
                node = self.resolve(walked).value
            if isinstance(node, dict) and name in node:
                node = node[name]
            elif isinstance(node, list) and name.isdecimal() and len(name) < 9 and int(name) < len(node):
                node = node[int(name)]
            elif self._is_variable(path):
                return MISSING
            elif self._fallback is not None:
                try:
                    return self._fallback(path)
                except KeyError:
                    raise MissingKeyError(path) from None
            else:
                raise MissingKeyError(path)
            walked = join(walked, name)
        return node

    def _evaluate(self, raw: Any, path: str) -> Resolved:
        self._evaluations += 1
        if self._evaluations > MAX_EVALUATIONS:
            raise InterpolationError("expands to more values than a configuration can have")
        if isinstance(raw, str):
            if "${" not in raw:
                return Resolved(raw, False)
            found = _Parser(raw, path, self).evaluate()
            if found.from_environment and isinstance(found.value, str) and not self._is_text(path):
                return replace(found, value=parse_scalar(found.value))
            return found
        if isinstance(raw, (list, dict)):
            names = range(len(raw)) if isinstance(raw, list) else raw
            items = {name: self.resolve(join(path, str(name))) for name in names}
            from_environment = any(item.from_environment for item in items.values())
            sources = frozenset().union(*(item.sources for item in items.values()))
            if isinstance(raw, list):
                return Resolved([item.value for item in items.values()], from_environment, sources)
            return Resolved({name: item.value for name, item in items.items()}, from_environment, sources)
        return Resolved(raw, False)

    def target(self, reference: str, path: str) -> str:
        """Return the path that `reference` at `path` refers to.

        NeMo passes `model:` on as a configuration of its own, so a reference there, such as `${data.train_ds.seed}`,
        may also start at `model`.
        """
        found = self._alias(_absolute(reference, path))
        head = found.partition(".")[0]
        if head in self._tree:
            return found
        model = self._tree.get("model")
        if path.startswith("model.") and isinstance(model, dict) and head in model:
            return join("model", found)
        return found

    def expand(self, path: str, keep: Callable[[str], bool]) -> Any:
        """Return the unresolved value at `path` with references to other keys than `keep` accepts written out.

        Raises:
            InterpolationError: it is too long.
        """
        if path not in self._expanded:
            self._expanded[path] = self._expand(self._raw(path), path, keep)
        return self._expanded[path]

    def _expand(self, raw: Any, path: str, keep: Callable[[str], bool]) -> Any:
        if isinstance(raw, list):
            return [self._expand(item, join(path, str(index)), keep) for index, item in enumerate(raw)]
        if isinstance(raw, dict):
            return {name: self._expand(item, join(path, name), keep) for name, item in raw.items()}
        if not isinstance(raw, str):
            return raw

        def written_out(match: re.Match[str]) -> str:
            target = self.target(match[1], path)
            if keep(target):  # a relative reference holds at its own place only
                return match[0] if keep(path) else f"${{{target}}}"
            return str(self.expand(target, keep))

        whole = _REFERENCE.fullmatch(raw)
        if whole and not keep(target := self.target(whole[1], path)):
            return self.expand(target, keep)
        text = _FIXED.sub(lambda match: str(_Parser(match[0], path, self).evaluate().value), raw)
        text = _REFERENCE.sub(written_out, text)
        if len(text) > MAX_TEXT:
            raise InterpolationError(f"expands to more than {MAX_TEXT // 1024} KiB of text")
        return text

    def resolve_env(self, arguments: list[Any]) -> Any:
        """Evaluate `oc.env:NAME` or `oc.env:NAME,default`."""
        if not 1 <= len(arguments) <= 2 or not isinstance(arguments[0], str):
            raise InterpolationError("`oc.env` takes the name of a variable and optionally a default")
        found = self._environ.get(arguments[0], _ABSENT)
        if found is not _ABSENT:
            return found
        if len(arguments) == 1:
            raise InterpolationError(
                f"needs the environment variable `{arguments[0]}`, which is not set; set it, or give a default: "
                f"${{oc.env:{arguments[0]},default}}"
            )
        return arguments[1] if arguments[1] is None else str(arguments[1])

    def resolve_now(self, arguments: list[Any]) -> str:
        """Evaluate `now:FORMAT`, with the format of `time.strftime`."""
        if len(arguments) != 1:
            raise InterpolationError("`now` takes one format, such as ${now:%Y-%m-%d}")
        if self._now is None:
            raise InterpolationError(
                "calls `now`, which would differ between the processes that torchrun or srun started; let stoker start "
                "them, or pass the time in a variable: ${oc.env:NAME}"
            )
        return time.strftime(str(arguments[0]), self._now)

    def resolve_hydra(self, arguments: list[Any]) -> Resolved:
        """Evaluate `hydra:KEY`: the same as a reference to `hydra.KEY`."""
        if len(arguments) != 1 or not isinstance(arguments[0], str) or not arguments[0]:
            raise InterpolationError("`hydra` takes one key, such as ${hydra:job.num}")
        return self.resolve(f"hydra.{arguments[0]}")

    def resolve_select(self, arguments: list[Any], path: str) -> Resolved:
        """Evaluate `oc.select:key` or `oc.select:key,default`: null or the default if the key does not exist."""
        if not 1 <= len(arguments) <= 2 or not isinstance(arguments[0], str):
            raise InterpolationError("`oc.select` takes a key and optionally a default")
        default = arguments[1] if len(arguments) == 2 else None
        try:
            found = self.resolve(self.target(arguments[0], path))
        except MissingKeyError:
            return Resolved(default, False)
        return Resolved(default, False) if found.value == MISSING else found


def _path_parts(path: str) -> list[str]:
    """Split a path into names; `a[0].b` and `a.0.b` are equivalent."""
    return [step for step in re.split(r"[.\[\]]+", path) if step]


def _absolute(reference: str, path: str) -> str:
    """Return the absolute path of `reference` at `path`; each leading dot goes one level up."""
    reference = reference.strip()
    dots = len(reference) - len(reference.lstrip("."))
    if dots == 0:
        return ".".join(_path_parts(reference))
    base = path
    for _ in range(dots):
        if not base:
            raise InterpolationError(f"`{reference}` goes above the root")
        base = parent_of(base)
    return join(base, ".".join(_path_parts(reference[dots:])))


def _unquoted(text: str) -> Any:
    """Parse an unquoted argument by OmegaConf's grammar; unlike in YAML, `yes` and `NO` are text."""
    value = parse_scalar(text)
    if isinstance(value, bool):
        return value if text.lower() in ("true", "false") else text
    return text if value is None and text.lower() != "null" else value


class _Parser:
    """Recursive-descent parser and evaluator of one string with interpolations."""

    def __init__(self, text: str, path: str, resolver: Resolver) -> None:
        self._text = text
        self._path = path
        self._resolver = resolver
        self._position = 0
        self._depth = 0
        self._from_environment = False
        self._sources: frozenset[str] = frozenset()

    def evaluate(self) -> Resolved:
        value = self._parse_until(until="")
        return Resolved(value, self._from_environment, self._sources)

    def _parse_until(self, until: str) -> Any:
        """Evaluate up to one of the characters `until`; a single interpolation keeps its type, a mixture is text."""
        pieces: list[Any] = []
        plain: list[str] = []
        size = 0
        while self._position < len(self._text) and self._text[self._position] not in until:
            character = self._text[self._position]
            if character == "\\":
                self._escape(plain)
            elif self._text.startswith("${", self._position):
                if plain:
                    pieces.append("".join(plain))
                    plain = []
                pieces.append(_Interpolated(self._interpolation()))
            else:
                plain.append(character)
                self._position += 1
        tail = "".join(plain)
        if until == _ARGUMENT_END:
            tail = tail.rstrip()
        if tail:
            pieces.append(tail)
        if len(pieces) == 1:
            return pieces[0].value if isinstance(pieces[0], _Interpolated) else pieces[0]
        if any(isinstance(piece, _Interpolated) and piece.value == MISSING for piece in pieces):
            return MISSING
        texts = []
        for piece in pieces:
            value = piece.value if isinstance(piece, _Interpolated) else piece
            if isinstance(value, (dict, list)):
                raise InterpolationError("inserts a list or a block into text")
            texts.append(str(value))
            size += len(texts[-1])
            if size > MAX_TEXT:
                raise InterpolationError(f"expands to more than {MAX_TEXT // 1024} KiB of text")
        return "".join(texts)

    def _escape(self, plain: list[str]) -> None:
        """Read backslashes; only before `${` each pair is one backslash, and an odd one escapes `${`."""
        start = self._position
        while self._position < len(self._text) and self._text[self._position] == "\\":
            self._position += 1
        count = self._position - start
        if not self._text.startswith("${", self._position):
            plain.append("\\" * count)
            return
        plain.append("\\" * (count // 2))
        if count % 2:
            plain.append("${")
            self._position += 2

    def _interpolation(self) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise InterpolationError(f"is nested deeper than {MAX_DEPTH} levels")
        self._position += 2
        called = _RESOLVER.match(self._text, self._position)
        if called:
            self._position = called.end()
            value = self._call(called[1], self._arguments())
        else:
            reference = self._parse_until(until="}")
            self._close()
            if not isinstance(reference, str) or not reference.strip(" ."):
                raise InterpolationError("has an empty or invalid reference between `${` and `}`")
            value = self._value_of(self._resolver.resolve(self._resolver.target(reference, self._path)))
        self._depth -= 1
        return value

    def _value_of(self, found: Resolved) -> Any:
        self._from_environment |= found.from_environment
        self._sources |= found.sources
        return found.value

    def _close(self) -> None:
        if self._position >= len(self._text):
            raise InterpolationError("has a `${` without `}`")
        self._position += 1

    def _arguments(self) -> list[Any]:
        arguments: list[Any] = []
        self._skip_blanks()
        if self._text.startswith("}", self._position):
            self._position += 1
            return arguments
        while True:
            self._skip_blanks()
            arguments.append(self._argument())
            self._skip_blanks()
            if self._position < len(self._text) and self._text[self._position] == ",":
                self._position += 1
                continue
            self._close()
            return arguments

    def _argument(self) -> Any:
        if self._position < len(self._text) and self._text[self._position] in "'\"":
            quote = self._text[self._position]
            end = self._text.find(quote, self._position + 1)
            if end < 0:
                raise InterpolationError(f"has an unterminated quote {quote}")
            value = self._text[self._position + 1 : end]
            self._position = end + 1
            return value
        start = self._position
        value = self._parse_until(until=_ARGUMENT_END)
        plain = "${" not in self._text[start : self._position]
        return _unquoted(value) if plain and isinstance(value, str) else value

    def _skip_blanks(self) -> None:
        while self._position < len(self._text) and self._text[self._position] in " \t\n":
            self._position += 1

    def _call(self, name: str, arguments: list[Any]) -> Any:
        if name == "oc.env":
            self._from_environment = True
            return self._resolver.resolve_env(arguments)
        if name == "oc.select":
            return self._value_of(self._resolver.resolve_select(arguments, self._path))
        if MISSING in arguments:
            return MISSING
        if name == "hydra":
            return self._value_of(self._resolver.resolve_hydra(arguments))
        if name == "now":
            return self._resolver.resolve_now(arguments)
        if name == "oc.decode" and len(arguments) == 1:
            return parse_scalar(arguments[0]) if isinstance(arguments[0], str) else arguments[0]
        if name == "gpu_name" and not arguments:
            return None  # as in NeMo without an A100 or H100; it only chooses files of settings without effect here
        if name in RESOLVERS:
            function: Callable[..., Any] = RESOLVERS[name]
        elif name in extension_names("resolver"):
            function = partial(_call_users_resolver, name)
        else:
            names = ("oc.env", "oc.select", "oc.decode", "hydra", "now", "gpu_name")
            known = ", ".join([*RESOLVERS, *extension_names("resolver"), *names])
            own = "or your own, registered by a module given with --import MODULE (docs/hydra.md)"
            raise InterpolationError(f"calls `{name}`, which is not supported; use one of {known}, {own}")
        try:
            return function(*arguments)
        except (ValueError, OverflowError) as error:
            raise InterpolationError(str(error)) from None


def _call_users_resolver(name: str, *arguments: Any) -> Any:
    """Call a resolver of an installed package or an imported module.

    Raises:
        ValueError: it fails, or returns another object than a value of a configuration.
    """
    function = load_extension("resolver", name)
    try:
        value = function(*arguments)
    except Exception as error:
        raise ValueError(f"calls `{name}` of {extension_source('resolver', name)}, which fails: {error}") from None
    if not _is_plain(value):
        raise ValueError(
            f"calls `{name}`, which returns {type(value).__name__}; it must return text, a number or a list"
        )
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


@dataclass(frozen=True, slots=True)
class _Interpolated:
    """Value of one interpolation, to distinguish it from plain text."""

    value: Any
