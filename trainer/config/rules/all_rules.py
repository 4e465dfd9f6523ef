"""All cross-field rules.

Every public function of the modules below is a rule: a small pure function from the context to findings with full
paths; those of the stack are in `models/config/`. They run on typed keys, outside pydantic, so that every problem is
found at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from types import FunctionType, ModuleType

from ....models.config.families import model_rules
from ....models.config.key_block import Finding
from .. import dotted_paths
from ..schema.key_index import schema_keys
from . import (
    checkpoint_rules,
    component_rules,
    data_rules,
    environment_rules,
    exp_manager_rules,
    fine_tuning_rules,
    fp8_rules,
    model_key_rules,
    offload_key_rules,
    optim_rules,
    parallel_rules,
    peft_rules,
    pipeline_rules,
    process_rules,
    task_rules,
    tokenizer_rules,
)
from .rule_context import RuleContext

_ASSIGNED = re.compile(r"(?<![\w.])[a-z]\w*(?==)")
"""A name without its path that a fix assigns to."""
Rule = Callable[[RuleContext], Iterator[Finding]]

_MODULES = (
    component_rules,
    process_rules,
    parallel_rules,
    pipeline_rules,
    offload_key_rules,
    optim_rules,
    model_key_rules,
    fp8_rules,
    data_rules,
    task_rules,
    fine_tuning_rules,
    tokenizer_rules,
    peft_rules,
    checkpoint_rules,
    exp_manager_rules,
    environment_rules,
)


def _rules_of(module: ModuleType) -> Iterator[Rule]:
    """Yield the public functions that a module defines, in its order."""
    for name, member in vars(module).items():
        if isinstance(member, FunctionType) and member.__module__ == module.__name__ and not name.startswith("_"):
            yield member


RULES: tuple[Rule, ...] = tuple(rule for module in _MODULES for rule in _rules_of(module))


def run_rules(context: RuleContext) -> list[Finding]:
    """Return the findings of all rules, with full paths, without warnings that concern defaults only."""
    found = [finding for rule in RULES for finding in rule(context)]
    for finding in model_rules(context.root.model):
        keys = tuple(f"model.{key}" for key in finding.keys)
        found.append(
            replace(finding, keys=keys, fix=_with_paths(finding.fix, keys, schema_keys(context.root.model.family)))
        )
    return [finding for finding in found if finding.level == "error" or _concerns_user(finding, context)]


def _with_paths(fix: str, keys: tuple[str, ...], known: Container[str]) -> str:
    """Return a fix with full paths in place of names, which are in a block of one of the `keys`, or below `model`."""
    blocks = [*(dotted_paths.parent_of(key) for key in keys), "model"]

    def full_path(name: re.Match[str]) -> str:
        paths = (f"{block}.{name[0]}" for block in blocks)
        return next((path for path in paths if path in known), name[0])

    return _ASSIGNED.sub(full_path, fix)


def _concerns_user(finding: Finding, context: RuleContext) -> bool:
    known = finding.keys[0] not in context.environment
    return not known or any(key in context.given for key in finding.keys)
