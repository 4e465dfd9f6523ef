"""Keys without a value (`???`, or made of a variable that is not set): which of them a run needs, and their errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ...models.config.key_block import Finding
from ...models.config.model import Family
from . import dotted_paths, validate
from .dotted_paths import MISSING, Tree
from .nemo.launcher_files import is_variable
from .problems import Problem
from .schema.key_index import find_key, schema_keys

_SOURCE = "model.data.data_impl"
_DATASETS = ("model.data.train_ds", "model.data.validation_ds", "model.data.test_ds")
"""Blocks that are lists of files until NeMo 1.20."""
_ANY_VALUES = (MISSING, "x", "y1", "1,1,1", [MISSING], ["x"], [1.0], [0.5], 1, 2, 0.5, 0.25, True, False)
"""Values of which each key without a list of choices accepts one or more."""


def fill_missing(
    given: Tree, missing: Collection[str], family: Family, rules: Callable[[Tree], Collection[Finding]]
) -> set[str]:
    """Return the keys of `missing` that have no effect with the keys `given`: with any value, a rule says so.

    Of the others, files and names without a default get any value in `given`, so that no rule reports them as well.
    """
    values = {path: found for path in missing if (found := _accepted_values(path, family))}
    unread: set[str] = set()
    while values:
        first, last = (_superfluous_keys(given, values, index, rules) for index in (0, -1))
        found = {path for path, _ in first & last}  # an equal message is not about the value
        if not found:
            break
        unread |= found
        values = {path: accepted for path, accepted in values.items() if path not in found}
    keys = schema_keys(family)
    for path, accepted in values.items():
        if path in keys and keys[path].default is None and isinstance(accepted[0], (str, list)):
            dotted_paths.put(given, path, accepted[0])
    return unread


def _superfluous_keys(
    given: Tree, values: Mapping[str, list[object]], index: int, rules: Callable[[Tree], Collection[Finding]]
) -> set[tuple[str, str]]:
    """Return the keys that a rule advises to leave out, with its message, if each has the value at `index`."""
    probe = dotted_paths.merged(given, {})
    for path, accepted in values.items():
        dotted_paths.put(probe, path, accepted[index])
    return {
        (path, finding.message)
        for finding in rules(probe)
        if _SOURCE not in finding.keys or dotted_paths.get(given, _SOURCE) is not None  # mock is only the default
        for path in values.keys() & set(finding.keys)
        if _is_superfluous(path, values[path][index], finding)
    }


def _accepted_values(path: str, family: Family) -> list[object]:
    """Return values other than the default that a key accepts."""
    key = schema_keys(family).get(path)
    found = []
    for value in (key and key.choices) or _ANY_VALUES:
        alone: Tree = {"model": {"family": family}}
        dotted_paths.put(alone, path, value)
        if not (key and value == key.default) and not validate.validate_types(alone, str)[1]:
            found.append(value)
    return found


def _is_superfluous(path: str, value: object, finding: Finding) -> bool:
    """Return True if a finding is to leave the key out, or to enable its feature, or rejects any file or text."""
    rejects = finding.level == "error" and finding.keys[0] == path and isinstance(value, (str, list))
    enables = finding.fix == f"{finding.keys[-1]}=true"
    return rejects or enables or f"~{path}" in finding.fix.replace(",", " ").split()


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
        key = find_key(path)
        value = "[VALUE]" if key is not None and key.kind.startswith("a list") else "VALUE"
        fix = f"{path}.file_names=[FILE]" if path in _DATASETS else f"{path}={value}"
        yield Problem(path, MISSING, origin_of(path), rule, fix)
    if variables:
        keys = list(dict.fromkeys(path for name in variables for path in causes[name]))
        listed = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        rule = f"no value in this file of the NeMo-Framework-Launcher; read by {listed}"
        fix = " ".join(f"{name}={'FOLDER' if name.endswith(('_dir', '_path')) else 'VALUE'}" for name in variables)
        yield Problem(", ".join(variables), None, origin_of(keys[0]), rule, fix)
