"""Speed up the composition of configurations, on which thousands of tests spend their time; results are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra._internal import defaults_list as hydra
from hydra.core.override_parser.types import Override

from stoker.trainer.config import compose, hydra_defaults


def install() -> None:
    """Compute each defaults list of packaged files once in this process, and no interpolations where there are none."""
    compute, interpolate = hydra_defaults.compute_defaults_list, hydra._create_interpolation_map
    known: dict[Any, hydra_defaults.DefaultsList] = {}

    def compute_once(repository: Any, name: str, choices: Sequence[Override]) -> hydra_defaults.DefaultsList:
        if [source.directory for source in repository.sources] != [compose.PACKAGED_CONF]:
            return compute(repository, name, choices)
        key = (name, *((choice.type, choice.get_key_element(), repr(choice.value())) for choice in choices))
        if key not in known:
            known[key] = compute(repository, name, choices)
        return known[key]

    def interpolate_if_needed(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
        needed = any(default.is_interpolation() for default in defaults if not default.is_self())
        return interpolate(overrides, defaults, self_added) if needed else None

    compose.compute_defaults_list = compute_once
    hydra._create_interpolation_map = interpolate_if_needed
