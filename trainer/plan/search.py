"""Suggest changes of keys that lower memory, and search for the fastest settings that fit.

A change is a set of values below `model`. Its effect is that of the plan with these values; there is no second memory
model.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

from ...kernels.attention.dispatch import NoBackendError
from ...models.config.families import keys_by_stack
from ...models.config.memory import RecomputeModule
from ...models.recompute.analysis import activation_recompute_saves_nothing
from ..config.resolved_run import resolve_run
from ..config.rules.all_rules import run_rules
from ..config.rules.rule_context import RuleContext
from ..config.schema.root import RootBlock
from ..utils.errors import UserError
from ..utils.progress import Progress
from .run_plan import Plan, make_plan
from .target import Target

Values = Mapping[str, Any]
_RECOMPUTE = "activations_checkpoint"
_CHEAP_FIRST: tuple[RecomputeModule, ...] = ("core_attention", "norm", "mlp_activation", "moe")
_STACK_DEFAULTS: dict[str, Any] = {
    f"{_RECOMPUTE}_granularity": None,
    f"{_RECOMPUTE}_method": None,
    f"{_RECOMPUTE}_num_layers": None,
    f"{_RECOMPUTE}_modules": None,
    "moe_layer_recompute": False,
    "cpu_offloading": False,
    "cpu_offloading_num_layers": None,
    "cpu_offloading_activations": True,
    "cpu_offloading_weights": True,
}
"""Keys of a stack that a change may set, with their default values."""


@dataclass(frozen=True, slots=True)
class CurrentOverrides:
    """Keys that a configuration sets already, which overrides of a change must take into account.

    Attributes:
        keys: dotted paths that are set, on the command line or in a file.
        arguments: for those on the command line, path to the argument as typed.
    """

    keys: frozenset[str]
    arguments: Mapping[str, str]


NO_OVERRIDES = CurrentOverrides(keys=frozenset(), arguments={})


@dataclass(frozen=True, slots=True)
class Change:
    """Other values of some keys.

    Attributes:
        values: key below `model` (`micro_batch_size`, `encoder.cpu_offloading`) to value.
        plan: of the run with these values.
    """

    values: Values
    plan: Plan

    def overrides(self, given: CurrentOverrides = NO_OVERRIDES) -> list[str]:
        """Return the values as command-line overrides, to be added to the keys in `given`."""
        overrides: dict[str, Any] = {}
        for key, value in self.values.items():
            shared = f"model.{key.rpartition('.')[2]}"
            if "." in key and shared in given.keys:  # both T5 stacks inherit it from there
                overrides[shared] = value
            if "." not in key or shared not in given.keys or f"model.{key}" in given.keys:
                overrides[f"model.{key}"] = value
        return [f"{key}={_format_value(value)}" for key, value in overrides.items()]

    def replaced(self, given: CurrentOverrides) -> list[str]:
        """Return the arguments of the command line that the overrides replace; a key can be given only once."""
        arguments = (given.arguments.get(override.partition("=")[0]) for override in self.overrides(given))
        return [argument for argument in arguments if argument is not None]


def suggest_changes(root: RootBlock, target: Target, plan: Plan, *, limit: int = 6) -> list[Change]:
    """Return single changes that lower memory: those that make the run fit first, then by step time.

    `plan` is that of the unchanged run.
    """
    run, found = PlannedRun(root, target, plan), []
    batches = [{"micro_batch_size": each} for each in run.micro_batches()[1:7]]
    candidates = [*recompute_modes(run), *_offloading(run), *batches, *_others(run)]
    with Progress("searching settings", len(candidates), "settings") as progress:
        for values in progress.over(candidates):
            change = run.changed(values)
            if change is not None and change.plan.allocated < 0.99 * plan.allocated:
                found.append(change)
    if not any(change.plan.fits for change in found):
        return sorted(found, key=lambda change: change.plan.needed)[:limit]
    found.sort(key=lambda change: (change.plan.fits is False, change.plan.seconds, change.plan.allocated))
    return found[:limit]


def search(root: RootBlock, target: Target, plan: Plan) -> tuple[Change | None, Change]:
    """Search for the settings that fit with the least step time.

    Returns:
        The best change of the unchanged `plan` that fits (None if none does), and the one that needs the least memory.
    """
    run, unchanged = PlannedRun(root, target, plan), Change({}, plan)
    best = unchanged if plan.fits else None
    least = unchanged
    combinations = list(_combinations(run))
    with Progress("searching settings", len(combinations), "settings") as progress:
        for values in progress.over(combinations):
            change = with_largest_batch(run, values)
            if change is None:
                continue
            if change.plan.fits and (best is None or cost(change) < cost(best)):
                best = change
            if change.plan.needed < least.plan.needed:
                least = change
    return best, least


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run before any change, and its plans with other values of its keys."""

    root: RootBlock
    target: Target
    plan: Plan

    def micro_batches(self) -> list[int]:
        """Return the micro batch size and its divisors, which keep the global batch size valid; largest first."""
        size = self.root.model.micro_batch_size
        return [each for each in range(size, 0, -1) if size % each == 0]

    def in_stacks(self, values: Values) -> dict[str, Any]:
        """Set `values` in every stack; other keys of the same kind (recomputation, offloading) get their defaults."""
        kinds = [kind for kind in (_RECOMPUTE, "cpu_offloading") if any(key.startswith(kind) for key in values)]
        defaults = {key: value for key, value in _STACK_DEFAULTS.items() if any(key.startswith(kind) for kind in kinds)}
        merged = {**defaults, **values}
        return {f"{prefix}{key}": value for prefix in keys_by_stack(self.root.model) for key, value in merged.items()}

    def planned(self, values: Values) -> Change | None:
        """Plan the run with other values, or with its own; None if they are not valid."""
        return self.changed(values) if differing(self.root, values) else Change({}, self.plan)

    def changed(self, values: Values) -> Change | None:
        """Plan the run with other values; None if nothing differs or they are not valid."""
        own = differing(self.root, values)
        if not own:
            return None
        root, inputs = with_values(self.root, own), self.plan.inputs
        errors = rule_errors(root)
        if errors and errors - rule_errors(self.root):
            return None
        plan = plan_if_valid(root, self.target, inputs.ranks, inputs.vocab_size)
        return None if plan is None else Change(own, plan)


def differing(root: RootBlock, values: Values) -> dict[str, Any]:
    """Return the values of keys below `model` that differ from the configuration's."""
    return {key: value for key, value in values.items() if attrgetter(key)(root.model) != value}


def with_values(root: RootBlock, values: Values) -> RootBlock:
    """Return a configuration with other values of keys below `model`, also of its blocks (`encoder.num_layers`)."""
    model, update = root.model, dict[str, Any]()
    for key, value in values.items():
        block, _, name = key.rpartition(".")
        if block:
            update[block] = update.get(block, getattr(model, block)).model_copy(update={name: value})
        else:
            update[name] = value
    return root.model_copy(update={"model": model.model_copy(update=update)})


def plan_if_valid(root: RootBlock, target: Target, ranks: int, vocab_size: int | None) -> Plan | None:
    """Plan a run; None if attention, CUDA graphs or the distribution of layers do not support it."""
    try:
        run = resolve_run(root, world_size=ranks, capability=target.capability)
        return make_plan(run, target, vocab_size=vocab_size)
    except (NoBackendError, UserError, ValueError):
        return None


def cost(change: Change) -> tuple[int, int, int]:
    """Sort key, lower is better: log of the time in steps of 0.1 %, then number of changed keys, then memory.

    If times are not known: host memory, then number of changed keys, then unused device memory.
    """
    seconds, needed = change.plan.seconds, change.plan.needed
    if not math.isfinite(seconds):
        return change.plan.on_host, len(change.values), -needed
    return round(math.log(seconds) * 1000), len(change.values), needed


def with_largest_batch(run: PlannedRun, values: Values) -> Change | None:
    """Combine `values` with the largest micro batch that fits, the fastest one; with the smallest if none fits."""
    sizes = run.micro_batches()

    @cache
    def with_size(size: int) -> Change | None:
        return run.planned({"micro_batch_size": size, **values})

    def fits(size: int) -> bool:
        change = with_size(size)
        return change is not None and change.plan.fits is True

    if fits(sizes[0]):
        return with_size(sizes[0])
    if not fits(sizes[-1]):
        return with_size(sizes[-1])
    return with_size(sizes[bisect_left(sizes, True, key=fits)])


# ---------------------------------------------------------------- candidates


def _combinations(run: PlannedRun) -> Iterator[Values]:
    """Yield combinations of recomputation, offloading and sharding: unchanged, off, and every other mode."""
    recomputing, offloading = recompute_modes(run, partial=True), _offloading(run)
    no_recompute = run.in_stacks({f"{_RECOMPUTE}_granularity": None, **_without_moe(run.plan)})
    no_offload = run.in_stacks({"cpu_offloading": False})
    combinable = [run.in_stacks({**full_recompute("uniform", 1), **_without_moe(run.plan)})]
    if cheap := _cheap_modules(run.plan):
        combinable.append(run.in_stacks({f"{_RECOMPUTE}_modules": cheap}))
    stacks = [{}, *recomputing, *offloading, *({**mode, **each} for mode in combinable for each in offloading)]
    stacks += [no_recompute, no_offload, *({**no_offload, **mode} for mode in (no_recompute, *recomputing))]
    stacks += [{**no_recompute, **each} for each in offloading]
    others = [{}, *_others(run)]
    if len(others) > 2:
        others.append({**others[1], **others[2]})
    seen: list[Values] = []
    for stack in stacks:
        for other in others:
            own = differing(run.root, {**stack, **other})
            if own not in seen:
                seen.append(own)
                yield own


def recompute_modes(run: PlannedRun, *, partial: bool = False) -> list[dict[str, Any]]:
    """Return recompute modes, cheap ones first; `partial`: also full recomputation of a part of the layers."""
    order, cheap = effective_modules(run.plan), _cheap_modules(run.plan)
    modes: list[dict[str, Any]] = [{f"{_RECOMPUTE}_modules": order[:number]} for number in range(1, len(order) + 1)]
    layers = min(len(stage.layers) for rank in run.plan.ranks for stage in rank.inputs.stages)
    if partial and layers > 1:
        for eighths in range(1, 8):
            number = round(layers * eighths / 8)
            if 0 < number < layers:
                modes.append({**full_recompute("block", number), f"{_RECOMPUTE}_modules": cheap or None})
    modes.append(full_recompute("uniform", 1))
    chunk = round(math.sqrt(layers))
    if chunk > 1:
        modes.append(full_recompute("uniform", chunk))
    return [run.in_stacks({**mode, **_without_moe(run.plan)}) for mode in modes]


def effective_modules(plan: Plan) -> list[RecomputeModule]:
    """Return the modules whose recomputation saves memory in every stack, cheap ones first."""
    found = set(_CHEAP_FIRST)
    for each in plan.inputs.stacks:
        found &= each.stack.effective_modules(range(each.stack.num_layers))
    if not any(stack.saves_scores for stack in plan.inputs.stacks):
        found.discard("core_attention")
    peft = plan.inputs.peft
    if any(activation_recompute_saves_nothing(each.stack, peft, compiled=each.compiled) for each in plan.inputs.stacks):
        found.discard("mlp_activation")
    return sorted(found, key=_CHEAP_FIRST.index)


def _cheap_modules(plan: Plan) -> list[RecomputeModule]:
    return [name for name in effective_modules(plan) if name != "moe"]


def _without_moe(plan: Plan) -> dict[str, Any]:
    return {"moe_layer_recompute": False} if any(stack.stack.moe for stack in plan.inputs.stacks) else {}


def full_recompute(method: str, number: int) -> dict[str, Any]:
    """Return the values that recompute whole layers."""
    return {
        f"{_RECOMPUTE}_granularity": "full",
        f"{_RECOMPUTE}_method": method,
        f"{_RECOMPUTE}_num_layers": number,
        f"{_RECOMPUTE}_modules": None,
    }


def _offloading(run: PlannedRun) -> list[dict[str, Any]]:
    """Return offloading modes: activations of as many layers as can be copied during computation, and of more; then
    activations and weights of all but two layers.
    """
    layers = min(keys.num_layers for keys in keys_by_stack(run.root.model).values())
    modes: list[dict[str, Any]] = []
    overlapped = _layers_overlapped(run, layers)
    for number in sorted({overlapped, max(1, layers // 4), max(1, layers // 2), layers - 2}):
        if 0 < number < layers:
            modes.append(_offload(number, weights=False))
    # weights sharded by FSDP are not offloaded; L - 2 layers, since copies of L - 1 overlap less
    model = run.root.model
    if layers > 2 and (not model.fsdp or model.fsdp_sharding_strategy == "grad"):
        modes.append(_offload(layers - 2, weights=True))
    return [run.in_stacks(mode) for mode in modes]


def _layers_overlapped(run: PlannedRun, layers: int) -> int:
    """Return the number of layers whose activations can be copied with stalls of at most 1 % of the step."""

    def waits(number: int) -> bool:
        change = run.planned(run.in_stacks(_offload(number, weights=False)))
        if change is None or change.plan.time is None:
            return True
        return change.plan.time.parts["copies not hidden"] > change.plan.seconds / 100

    return bisect_left(range(1, layers - 1), True, key=waits)  # up to L - 2: a rule warns about L - 1


def _offload(number: int, *, weights: bool) -> dict[str, Any]:
    return {"cpu_offloading": True, "cpu_offloading_num_layers": number, "cpu_offloading_weights": weights}


def _others(run: PlannedRun) -> list[dict[str, Any]]:
    """Return other changes: FSDP if there are several ranks, optimizer offloading toggled."""
    model = run.root.model
    fsdp: list[dict[str, Any]] = [{"fsdp": True}] if run.plan.inputs.ranks > 1 and not model.fsdp else []
    return [*fsdp, {"cpu_offloading_optimizer": not model.cpu_offloading_optimizer}]


def rule_errors(root: RootBlock) -> set[str]:
    """Return the messages of all violated rules."""
    context = RuleContext(root, frozenset(), frozenset(), {})
    return {finding.message for finding in run_rules(context) if finding.level == "error"}


def _format_value(value: Any) -> str:
    """Format a value for the command line."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value)
