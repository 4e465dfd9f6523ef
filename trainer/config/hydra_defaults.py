"""Hydra's defaults lists over config sources of ours: the only file that imports from `hydra._internal`.

Hydra's public way to a defaults list, `ConfigLoader.compute_defaults_list`, comes with a process-wide `GlobalHydra`,
a scan for plugins at start-up, and sources that read YAML without size limits and line numbers. The versions of Hydra
that this file was checked with are in `tests/trainer/test_config_compose.py`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from hydra import version
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import DefaultsTreeNode, InputDefault, VirtualRoot
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource

MAX_FILES = 400
"""Files that a defaults list may name, each as often as it is named; Hydra reads each entry twice."""


class DefaultsError(ValueError):
    """Defaults lists that form a circle, or name too many files; the message gives the reason."""


class Repository(ConfigRepository):
    """Config repository of the given sources, searched in order, and no others."""

    def __init__(self, sources: Sequence[ConfigSource]) -> None:
        self.sources = list(sources)
        self._loaded: dict[str, ConfigResult | None] = {}
        self.num_reads = 0

    @property
    def loaded(self) -> list[str]:
        """Config paths of the files that have been loaded."""
        return [config_path for config_path, result in self._loaded.items() if result is not None]

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        """Do nothing: the sources are set in the constructor."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Load a file, once.

        Raises:
            DefaultsError: the defaults list has more than `MAX_FILES` entries.
        """
        self.num_reads += 1
        if self.num_reads > 2 * MAX_FILES:
            raise DefaultsError(f"names more than {MAX_FILES} files; remove repeated entries")
        if config_path not in self._loaded:
            self._loaded[config_path] = super().load_config(config_path)
        return self._loaded[config_path]


@dataclass(frozen=True)
class DefaultsList:
    """Defaults list of a primary file.

    Attributes:
        files: config path and package of each file, in merge order.
        known_choices: the choice of each group that the list names; None: none is chosen.
        tree: depth and config path of each file as the lists name them, below the primary file and that of Hydra.
    """

    files: Sequence[tuple[str, str]]
    known_choices: Mapping[str, str | None]
    tree: Sequence[tuple[int, str]] = ()


def compute_defaults_list(repository: Repository, config_name: str, choices: Sequence[Override]) -> DefaultsList:
    """Compute the defaults list of `config_name` with `choices` of groups.

    Raises:
        DefaultsError: it is a circle, or too long; all other errors are Hydra's own.
    """
    if version.getbase() is None:
        version.setbase("1.3")
    repository.num_reads = 0
    try:
        found = create_defaults_list(repository, config_name, list(choices), prepend_hydra=True, skip_missing=False)
    except (RecursionError, DefaultsError) as error:
        circle = _find_circle(error.__traceback__)
        if circle:
            raise DefaultsError(f"is a circle: {' -> '.join(circle)}; remove one of these entries") from None
        raise DefaultsError(str(error)) from None
    files = [
        (default.config_path, default.package or "")
        for default in found.defaults
        if default.config_path is not None and default.config_path != "_dummy_empty_config_"
    ]
    return DefaultsList(files, found.overrides.known_choices, tuple(_nodes(found.defaults_tree, 0)))


def _nodes(node: DefaultsTreeNode | InputDefault, depth: int) -> Iterator[tuple[int, str]]:
    """Yield the files of a tree of defaults lists, each before those that it names."""
    default = node.node if isinstance(node, DefaultsTreeNode) else node
    if not isinstance(default, VirtualRoot):
        path = "_self_" if default.is_self() else default.get_config_path()
        yield depth, f"{path} (not chosen)" if default.get_name() is None else path
        depth += 1
    for child in (node.children or []) if isinstance(node, DefaultsTreeNode) else []:
        yield from _nodes(child, depth)


def _find_circle(trace: TracebackType | None) -> list[str]:
    """Return the circle of files that Hydra was expanding when it failed, its first file also last; empty without."""
    expanded = [frame.f_locals.get("root") for frame, _ in traceback.walk_tb(trace)]
    node = next((node for node in reversed(expanded) if isinstance(node, DefaultsTreeNode)), None)
    path: list[str] = []
    while node is not None:
        path.insert(0, node.node.get_config_path())
        node = node.parent
    for end, name in enumerate(path):
        if (begin := path.index(name)) < end:
            return path[begin : end + 1]
    return []
