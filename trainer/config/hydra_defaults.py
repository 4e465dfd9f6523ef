"""Hydra's defaults lists over config sources of ours: the only file that imports from `hydra._internal`.

Hydra's public way to a defaults list, `ConfigLoader.compute_defaults_list`, comes with a process-wide `GlobalHydra`,
a scan for plugins at start-up, and sources that read YAML without size limits and line numbers. The versions of Hydra
that this file was checked with are in `tests/trainer/test_config_compose.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra import version
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource


class Repository(ConfigRepository):
    """Config repository of the given sources, searched in order, and no others."""

    def __init__(self, sources: Sequence[ConfigSource]) -> None:
        self.sources = list(sources)
        self._loaded: dict[str, ConfigResult | None] = {}

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        """Do nothing: the sources are set in the constructor."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Load a file, once."""
        if config_path not in self._loaded:
            self._loaded[config_path] = super().load_config(config_path)
        return self._loaded[config_path]


@dataclass(frozen=True)
class DefaultsList:
    """Defaults list of a primary file.

    Attributes:
        files: config path and package of each file, in merge order.
        known_choices: the choice of each group that the list names; None: none is chosen.
    """

    files: Sequence[tuple[str, str]]
    known_choices: Mapping[str, str | None]


def compute_defaults_list(repository: Repository, config_name: str, choices: Sequence[Override]) -> DefaultsList:
    """Compute the defaults list of `config_name` with `choices` of groups; raises Hydra's own errors."""
    if version.getbase() is None:
        version.setbase("1.3")
    found = create_defaults_list(repository, config_name, list(choices), prepend_hydra=False, skip_missing=False)
    files = [
        (default.config_path, default.package or "")
        for default in found.defaults
        if default.config_path is not None and default.config_path != "_dummy_empty_config_"
    ]
    return DefaultsList(files, found.overrides.known_choices)
