"""Read one YAML file with size limits into plain containers, with the line of every key.

The limits are checked on the event stream, before anything is built, with aliases counted as what they expand to: a
file cannot cause more memory or time than its size warrants. Values follow YAML 1.1 as OmegaConf reads it (`1e-3` is a
number), except that base-60 numbers and dates are strings, so that an unquoted `max_time: 6:11:00:00` works.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..utils.text import one_line
from .dotted_paths import Tree, join

MAX_BYTES = 1 << 20
MAX_NODES = 50_000
MAX_ALIASES = 100
MAX_DEPTH = 64
MAX_DIGITS = 1000
"""Digits of an integer: Python converts no more than 4,300 to text, and no key needs more than 20."""

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+|0o?[0-7_]+)$")
_OCTAL = re.compile(r"^([-+]?0)(?=[0-7])")
"""The zero that an octal number begins with in YAML 1.1; in Python `0o`."""
_FLOAT = re.compile(
    r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_BOOL = re.compile(r"(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$")
_BARE_REFERENCE = re.compile(r"[{\[,:]\s*(\$\{|\?\?\?)")
"""An interpolation or `???` without quotes, which YAML reads as text before a block, and as the mark of a key."""
SWEPT_DOT = "\x1f"
"""Stands for the dots in the names of `hydra.sweeper.params`, each of which is one key: `model.optim.lr: 1,2`."""
_SWEPT_BLOCKS = ("params", "sweeper.params", "hydra.sweeper.params")
_NULL = re.compile(r"(?:~|null|Null|NULL|)$")


class _Loader(_Base):
    """Safe loader with the implicit types described in the module docstring."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", _BOOL, list("yYnNtTfFoO")),
    ("float", _FLOAT, list("-+0123456789.")),
    ("int", _INT, list("-+0123456789")),
    ("null", _NULL, ["~", "n", "N", ""]),
    ("merge", re.compile(r"<<$"), ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)


class YamlError(ValueError):
    """Invalid YAML file.

    Attributes:
        message: the error, without the path.
        line: the line, if known.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


@dataclass
class YamlFile:
    """Content of one YAML file.

    Attributes:
        path: the file.
        tree: its keys, without the defaults list.
        lines: line number by dotted path.
        defaults: Hydra's defaults list, if there is one.
        package: package of the `# @package` header, if there is one.
    """

    path: Path
    tree: Tree
    lines: dict[str, int] = field(default_factory=dict)
    defaults: list[Any] | None = None
    package: str | None = None


def read_yaml(path: Path) -> YamlFile:
    """Read `path`.

    Raises:
        YamlError: the file cannot be read, is not YAML, or exceeds a limit.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise YamlError(f"is larger than {MAX_BYTES // 1024} KiB; a configuration is a few KiB of text")
        text = path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise YamlError(f"is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise YamlError(f"cannot be read: {error.strerror}") from None
    return parse_yaml(text, path)


def parse_yaml(text: str, path: Path) -> YamlFile:
    """Parse the YAML `text` of the file `path`.

    Raises:
        YamlError: the text is not YAML, or exceeds a limit.
    """
    file = YamlFile(path, {}, package=_package(text))
    try:
        _check_bounds(text)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
        cure = '; inside { } and [ ], write "${name}" and "???" in quotes' if _BARE_REFERENCE.search(line) else ""
        if mark and mark.column < len(line) and line[mark.column] == "\t":
            raise YamlError(
                f"is not YAML: there is a tab in column {mark.column + 1}; indent with spaces", mark.line + 1
            ) from None
        raise YamlError(f"is not YAML: {error.problem}{cure}", mark.line + 1 if mark else None) from None
    except yaml.YAMLError as error:
        raise YamlError(f"is not YAML: {one_line(error)}") from None
    except UnicodeEncodeError:  # of a lone surrogate, which JSON can hold
        raise YamlError("is not YAML: it holds a lone surrogate") from None
    if node is None:
        return file
    if not isinstance(node, yaml.MappingNode):
        raise YamlError("must hold keys (`key: value`), not a single value or list", node.start_mark.line + 1)
    file.tree = _build(node, "", file.lines)
    defaults = file.tree.pop("defaults", None)
    if defaults is not None and not isinstance(defaults, list):
        raise YamlError("`defaults` must be a list", file.lines["defaults"])
    if wrong := [f"{entry!r:.60}" for entry in defaults or [] if not _is_default(entry)]:
        rule = "each entry must be `FILE`, `GROUP: FILE` or `_self_`, with names that are text"
        raise YamlError(f"the defaults list holds {', '.join(wrong[:5])}; {rule}", file.lines["defaults"])
    if defaults is not None and defaults.count("_self_") > 1:
        raise YamlError("the defaults list holds `_self_` more than once; keep one", file.lines["defaults"])
    file.lines.pop("defaults", None)
    file.defaults = defaults
    return file


def _is_default(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return isinstance(entry, str) and entry != ""
    (chosen,) = entry.values() if len(entry) == 1 else (0,)
    names = chosen if isinstance(chosen, list) else [chosen]
    return chosen is None or all(isinstance(name, str) and name for name in names)


def read_table(path: Path) -> Any:
    """Return the content of a YAML file of this package: without limits, and with keys that may hold dots."""
    return _build(yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader), "", {}, dots=True)


def parse_scalar(text: str) -> Any:
    """Return the value of `text` as a plain YAML scalar; `text` itself if it is not one, or has too many digits."""
    try:
        node = yaml.compose(text, Loader=_Loader)
        return _build(node, "", {}) if isinstance(node, yaml.ScalarNode) else text
    except (yaml.YAMLError, YamlError, UnicodeEncodeError):
        return text


def _package(text: str) -> str | None:
    """Return the package of a `# @package` comment in the head of the file, as Hydra reads it."""
    for line in text[:512].splitlines():
        found = re.match(r"\s*#\s*@package\s+(\S+)\s*$", line)
        if found:
            return found[1]
        if line.strip() and not line.lstrip().startswith("#"):
            return None
    return None


def _check_bounds(text: str) -> None:
    """Check the numbers of nodes (aliases expanded) and aliases, and the depth, on the event stream."""
    total, aliases, documents = 0, 0, 0
    weights: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1 if event.start_mark else None
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise YamlError("holds more than one document (a line `---`)", line)
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
            if aliases > MAX_ALIASES:
                raise YamlError(f"has more than {MAX_ALIASES} aliases (`*name`)", line)
            if event.anchor not in weights:
                is_open = any(anchor == event.anchor for anchor, _ in open_nodes)
                what = "is inside its own anchor" if is_open else f"has no anchor `&{event.anchor}` before it"
                raise YamlError(f"alias `*{event.anchor}` {what}", line)
            total += weights[event.anchor]
        elif isinstance(event, yaml.NodeEvent):
            tag = getattr(event, "tag", None)
            if tag is not None and tag not in _PLAIN_TAGS and tag != "!":
                raise YamlError(f"has the tag `{tag}`; only plain values are supported, not objects", line)
            total += 1
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, total - 1))
                if len(open_nodes) > MAX_DEPTH:
                    raise YamlError(f"is nested deeper than {MAX_DEPTH} levels", line)
            elif event.anchor is not None:
                weights[event.anchor] = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor is not None:
                weights[anchor] = total - before
        if total > MAX_NODES:
            raise YamlError(f"has more than {MAX_NODES} values, aliases expanded", line)


def _build(node: yaml.Node, path: str, lines: dict[str, int], dots: bool = False) -> Any:
    """Return plain containers built from the nodes below `path`; `lines` receives the line of each key."""
    if isinstance(node, yaml.MappingNode):
        return _build_mapping(node, path, lines, dots)
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, f"{path}[{index}]", {}, dots) for index, item in enumerate(node.value)]
    try:
        return _scalar(node)
    except ValueError as error:
        if isinstance(error, YamlError):
            raise
        kind = "an integer" if node.tag.endswith(":int") else "a number"
        raise YamlError(f"has a value written as {kind} that is none; quote it", node.start_mark.line + 1) from None


def _scalar(node: yaml.Node) -> Any:
    text: str = node.value
    match node.tag.rpartition(":")[2]:
        case "null":
            return None
        case "bool":
            return text.lower() in ("yes", "true", "on")
        case "int":
            if len(text) > MAX_DIGITS:
                line = node.start_mark.line + 1
                raise YamlError(f"has an integer of more than {MAX_DIGITS} digits; quote it if it is text", line)
            return int(_OCTAL.sub(r"\1o", text.replace("_", "")), 0)
        case "float":
            return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
        case _:
            return text


def _build_mapping(node: yaml.MappingNode, path: str, lines: dict[str, int], dots: bool) -> Tree:
    inherited: Tree = {}
    lines_of: dict[str, list[str]] = {}  # of each inherited name
    own: Tree = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag.endswith(":merge"):
            sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for source in sources:
                if not isinstance(source, yaml.MappingNode):
                    raise YamlError("`<<` must name a block, or a list of blocks", line)
                found: dict[str, int] = {}
                for name, value in _build(source, path, found, dots).items():
                    inherited.setdefault(name, value)
                for below, at in found.items():
                    lines.setdefault(below, at)
                    lines_of.setdefault(below.removeprefix(f"{path}.").partition(".")[0], []).append(below)
            continue
        if not isinstance(key_node, yaml.ScalarNode):
            raise YamlError("a key must be a name, not a list or a block", line)
        name = key_node.value.replace(".", SWEPT_DOT) if path in _SWEPT_BLOCKS else key_node.value
        if name in own:
            raise YamlError(f"`{join(path, name)}` is given twice", line)
        if not dots and (not name or ("." in name and "defaults[" not in path)):
            raise YamlError(f"the key `{name}` must be one name; write blocks as indented lines, without dots", line)
        for stale in lines_of.pop(name, ()):
            lines.pop(stale, None)
        lines[join(path, name)] = line
        own[name] = _build(value_node, join(path, name), lines, dots)
    return {**inherited, **own}
