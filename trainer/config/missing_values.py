"""Keys without a value (`???`, or made of a variable that is not set): which of them a run needs, and their errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ...models.config.key_block import Finding
from ...models.config.model import Family
from . import dotted_paths, validate
from .dotted_paths import MISSING, Tree
from .nemo.launcher_files import is_variable
from .problems import Problem
from .schema.key_index import schema_keys

_ANY_VALUES = (MISSING, [MISSING], "1,1,1", 1, 0.5, True, False)
"""Values of which each key without a list of choices accepts one."""


def unread_keys(
    given: Tree, missing: Collection[str], family: Family, rules: Callable[[Tree], Collection[Finding]]
) -> set[str]:
    """Return the keys of `missing` that have no effect with the keys `given`: with any value, a rule says so."""
    if not missing:
        return set()
    probe = dotted_paths.merged(given, {})
    keys = schema_keys(family)
    for path in missing:
        for value in (keys[path].choices if path in keys else ()) or _ANY_VALUES:
            alone: Tree = {"model": {"family": family}}
            dotted_paths.put(alone, path, value)
            if not validate.validate_types(alone, str)[1]:
                dotted_paths.put(probe, path, value)
                break
    return {path for finding in rules(probe) for path in finding.keys if path in missing and _is_off(path, finding)}


def _is_off(path: str, finding: Finding) -> bool:
    """Return True if a finding advises to leave the key out, or to enable the feature it belongs to."""
    return f"~{path}" in finding.fix.replace(",", " ").split() or finding.fix == f"{finding.keys[-1]}=true"


def missing_value_problems(causes: Mapping[str, Sequence[str]], origin_of: Callable[[str], str]) -> Iterator[Problem]:
    """Yield one error per key without a value, and one for all variables.

    Args:
        causes: key or variable without a value -> the keys that need it.
        origin_of: returns the origin of a key.
    """
    variables = sorted(filter(is_variable, causes))
    for path in (cause for cause in causes if cause not in variables):
        others = ", ".join(other for other in causes[path] if other != path)
        rule = "must be given before a run can start" + (f", also for {others}" if others else "")
        yield Problem(path, MISSING, origin_of(path), rule, f"{path}=VALUE")
    if variables:
        keys = list(dict.fromkeys(path for name in variables for path in causes[name]))
        listed = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        rule = f"no value in this file of the NeMo-Framework-Launcher; read by {listed}"
        fix = " ".join(f"{name}={'FOLDER' if name.endswith(('_dir', '_path')) else 'VALUE'}" for name in variables)
        yield Problem(", ".join(variables), None, origin_of(keys[0]), rule, fix)
