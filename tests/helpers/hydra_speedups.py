"""Speed up the composition of configurations, on which thousands of tests spend their time; results are the same."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra._internal import defaults_list as hydra
from hydra.core.override_parser.types import Override

from stoker.trainer.config import compose, hydra_defaults, overrides, yaml_reader


def install() -> None:
    """Read packaged files, compute their defaults lists and parse overrides once each in this process.

    Interpolations are computed where there are any.
    """
    read, parse = yaml_reader.read_yaml, overrides.parse_override
    compute, interpolate = hydra_defaults.compute_defaults_list, hydra._create_interpolation_map
    known: dict[Any, hydra_defaults.DefaultsList] = {}
    files: dict[Path, yaml_reader.YamlFile] = {}
    parsed: dict[str, Override] = {}

    def read_once(path: Path) -> yaml_reader.YamlFile:
        if not path.is_relative_to(compose.PACKAGED_CONF):
            return read(path)
        if path not in files:
            files[path] = read(path)
        file = files[path]  # its values become parts of a configuration, which changes them
        return replace(file, tree=copy.deepcopy(file.tree), defaults=copy.deepcopy(file.defaults))

    def parse_once(parser: Any, typed: str) -> Override:
        if typed not in parsed:
            parsed[typed] = parse(parser, typed)
        return copy.copy(parsed[typed])

    def compute_once(repository: Any, config_name: str, choices: Sequence[Override]) -> hydra_defaults.DefaultsList:
        if [source.directory for source in repository.sources] != [compose.PACKAGED_CONF]:
            return compute(repository, config_name, choices)
        key = (config_name, *((choice.type, choice.get_key_element(), repr(choice.value())) for choice in choices))
        if key not in known:
            known[key] = compute(repository, config_name, choices)
        return known[key]

    def interpolate_if_needed(overrides: Any, defaults_list: list[Any], self_added: bool) -> Any:
        needed = any(default.is_interpolation() for default in defaults_list if not default.is_self())
        return interpolate(overrides, defaults_list, self_added) if needed else None

    yaml_reader.read_yaml, overrides.parse_override = read_once, parse_once
    compose.compute_defaults_list = compute_once
    hydra._create_interpolation_map = interpolate_if_needed
