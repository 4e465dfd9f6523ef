"""Keys that make a run need less memory, each with what it would do, and the search for those that cost the least time.

A change is a set of values below `model`. Its effect is that of a plan made with these values, nothing else: there is
one model of memory.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any

from ...kernels.attention.dispatch import NoBackendError
from ...models.config.family_rules import stacks_of_keys
from ...models.config.memory import RecomputeModule
from ...models.config.peft_slice import peft_slice
from ...models.recompute.analysis import activation_saves_nothing
from ..config.rules.all_rules import run_rules
from ..config.rules.rule_context import Facts
from ..config.schema.root import RootBlock
from ..utils.errors import UserError
from .inputs import Target
from .run_plan import Plan, make_plan

Values = Mapping[str, Any]
_RECOMPUTE = "activations_checkpoint"
_CHEAP_FIRST: tuple[RecomputeModule, ...] = ("core_attention", "norm", "mlp_activation", "moe")
_OF_STACK: dict[str, Any] = {
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
"""The keys of a stack that a change may set, with what they are where nothing is asked for."""


@dataclass(frozen=True, slots=True)
class Given:
    """What a configuration sets, beside which changes are to be typed.

    Attributes:
        keys: dotted paths that are set, on the command line or in a file.
        typed: of those on the command line, the word as typed.
    """

    keys: frozenset[str]
    typed: Mapping[str, str]


NOTHING_GIVEN = Given(keys=frozenset(), typed={})


@dataclass(frozen=True, slots=True)
class Change:
    """Other values of some keys.

    Attributes:
        values: key below `model` (`micro_batch_size`, `encoder.cpu_offloading`) to value.
        plan: the run with them.
    """

    values: Values
    plan: Plan

    def overrides(self, given: Given = NOTHING_GIVEN) -> list[str]:
        """As the command line takes them, beside what is given already."""
        found: dict[str, Any] = {}
        for key, value in self.values.items():
            shared = f"model.{key.rpartition('.')[2]}"
            if "." in key and shared in given.keys:  # the stacks of a T5 have it from there
                found[shared] = value
            if "." not in key or shared not in given.keys or f"model.{key}" in given.keys:
                found[f"model.{key}"] = value
        return [f"{key}={_shown(value)}" for key, value in found.items()]

    def replaced(self, given: Given) -> list[str]:
        """The words of the command line that the overrides take the place of: a key is given once."""
        words = (given.typed.get(override.partition("=")[0]) for override in self.overrides(given))
        return [word for word in words if word is not None]


def suggestions(root: RootBlock, target: Target, plan: Plan, *, most: int = 6) -> list[Change]:
    """What would help, one change at a time: what makes the run fit before what does not, then the fastest.

    Args:
        root: the keys.
        target: where the run will be.
        plan: the run as it is.
        most: how many at most.
    """
    found: list[Change] = []
    offloading = _offloading(root, target, plan)
    batches = [{"micro_batch_size": each} for each in _micro_batches(root)[1:7]]
    candidates = (_recomputing(root, plan), offloading, batches, _others(root, target))
    for values in chain(*candidates):
        change = _changed(root, target, plan, values)
        if change is not None and change.plan.allocated < 0.99 * plan.allocated:
            found.append(change)
    if not any(change.plan.fits for change in found):
        return sorted(found, key=lambda change: change.plan.needed)[:most]
    found.sort(key=lambda change: (change.plan.fits is False, change.plan.seconds, change.plan.allocated))
    return found[:most]


def search(root: RootBlock, target: Target, plan: Plan) -> tuple[Change | None, Change]:
    """The values with which the run fits in the least time.

    Args:
        root: the keys.
        target: where the run will be.
        plan: the run as it is.

    Returns:
        The best change that fits (None where none does), and the one that needs least.
    """
    asis = Change({}, plan)
    best = asis if plan.fits else None
    least = asis
    for values in _combinations(root, target, plan):
        change = _with_largest_batch(root, target, plan, values)
        if change is None:
            continue
        if change.plan.fits and (best is None or _cost(change) < _cost(best)):
            best = change
        if change.plan.needed < least.plan.needed:
            least = change
    return best, least


def _cost(change: Change) -> tuple[int, int, int]:
    """Less is better: time to a thousandth, then keys that change, then memory.

    Where times are not known: what goes to the host, then keys that change, then what is given up of the memory.
    """
    seconds, needed = change.plan.seconds, change.plan.needed
    if not math.isfinite(seconds):
        return change.plan.on_host, len(change.values), -needed
    return round(math.log(seconds) * 1000), len(change.values), needed


def _with_largest_batch(root: RootBlock, target: Target, plan: Plan, values: Values) -> Change | None:
    """The values with the largest micro batch that fits, which takes the least time; with the smallest if none does."""
    sizes = _micro_batches(root)

    @cache
    def of(size: int) -> Change | None:
        asked = {"micro_batch_size": size, **values}
        return _changed(root, target, plan, asked) if _differing(root, asked) else Change({}, plan)

    def fits(size: int) -> bool:
        change = of(size)
        return change is not None and change.plan.fits is True

    if fits(sizes[0]):
        return of(sizes[0])
    if not fits(sizes[-1]):
        return of(sizes[-1])
    return of(sizes[bisect_left(sizes, True, key=fits)])


# ---------------------------------------------------------------- candidates


def _combinations(root: RootBlock, target: Target, plan: Plan) -> Iterator[Values]:
    """What is recomputed, what is on the host and how parameters are cut: as it is, off, and in every other way."""
    recomputing, offloading = _recomputing(root, plan, with_some=True), _offloading(root, target, plan)
    nothing_again = _in_stacks(root, {f"{_RECOMPUTE}_granularity": None, **_without_moe(plan)})
    nothing_sent = _in_stacks(root, {"cpu_offloading": False})
    whole = _in_stacks(root, {**_full("uniform", 1), **_without_moe(plan)})
    beside = [whole, _in_stacks(root, {f"{_RECOMPUTE}_modules": _cheap_parts(plan)})] if _cheap_parts(plan) else [whole]
    stacks = [{}, *recomputing, *offloading, *({**mode, **each} for mode in beside for each in offloading)]
    stacks += [nothing_again, nothing_sent, *({**nothing_sent, **mode} for mode in (nothing_again, *recomputing))]
    stacks += [{**nothing_again, **each} for each in offloading]
    others = [{}, *_others(root, target)]
    if len(others) > 2:
        others.append({**others[1], **others[2]})
    seen: list[Values] = []
    for stack in stacks:
        for other in others:
            differing = _differing(root, {**stack, **other})
            if differing not in seen:
                seen.append(differing)
                yield differing


def _recomputing(root: RootBlock, plan: Plan, *, with_some: bool = False) -> list[dict[str, Any]]:
    """Modes of recomputation, the cheap ones first; `with_some`: also of a part of the layers."""
    order, cheap = modules_that_save(plan), _cheap_parts(plan)
    modes: list[dict[str, Any]] = [{f"{_RECOMPUTE}_modules": order[:number]} for number in range(1, len(order) + 1)]
    layers = min(stack.stack.num_layers for stack in plan.facts.stacks)
    if with_some and layers > 1:
        for eighths in range(1, 8):
            number = round(layers * eighths / 8)
            if 0 < number < layers:
                modes.append({**_full("block", number), f"{_RECOMPUTE}_modules": cheap or None})
    modes.append(_full("uniform", 1))
    root_of = round(math.sqrt(layers))
    if root_of > 1:
        modes.append(_full("uniform", root_of))
    return [_in_stacks(root, {**mode, **_without_moe(plan)}) for mode in modes]


def modules_that_save(plan: Plan) -> list[RecomputeModule]:
    """The parts of layers that save something in every stack when they are recomputed, the cheap ones first."""
    found = set(_CHEAP_FIRST)
    for each in plan.facts.stacks:
        found &= each.stack.acting_modules(range(each.stack.num_layers))
    if not any(stack.keeps_scores for stack in plan.facts.stacks):
        found.discard("core_attention")
    peft = peft_slice(plan.facts.keys.peft)
    if any(activation_saves_nothing(each.stack, peft, compiled=each.compiled) for each in plan.facts.stacks):
        found.discard("mlp_activation")
    return sorted(found, key=_CHEAP_FIRST.index)


def _cheap_parts(plan: Plan) -> list[RecomputeModule]:
    return [name for name in modules_that_save(plan) if name != "moe"]


def _without_moe(plan: Plan) -> dict[str, Any]:
    return {"moe_layer_recompute": False} if any(stack.stack.moe for stack in plan.facts.stacks) else {}


def _full(method: str, number: int) -> dict[str, Any]:
    return {
        f"{_RECOMPUTE}_granularity": "full",
        f"{_RECOMPUTE}_method": method,
        f"{_RECOMPUTE}_num_layers": number,
        f"{_RECOMPUTE}_modules": None,
    }


def _offloading(root: RootBlock, target: Target, plan: Plan) -> list[dict[str, Any]]:
    """Activations of as many layers in host memory as are copied beside the work, and of more; then all but two layers
    with their weights.
    """
    layers = min(keys.num_layers for keys in stacks_of_keys(root.model).values())
    whole = root.model.fsdp  # weights that are cut over ranks stay where they are
    found: list[dict[str, Any]] = []
    hidden = _layers_hidden(root, target, plan, layers)
    for number in sorted({hidden, max(1, layers // 4), max(1, layers // 2), layers - 2}):
        if 0 < number < layers:
            found.append(_offload(number, weights=False))
    if layers > 2 and not whole:  # with one layer less on the host copies are hidden better
        found.append(_offload(layers - 2, weights=True))
    return [_in_stacks(root, mode) for mode in found]


def _layers_hidden(root: RootBlock, target: Target, plan: Plan, layers: int) -> int:
    """The activations of how many layers are copied while others calculate, but for a hundredth of a step."""

    def waits(number: int) -> bool:
        values = _in_stacks(root, _offload(number, weights=False))
        change = _changed(root, target, plan, values) if _differing(root, values) else Change({}, plan)
        if change is None or change.plan.time is None:
            return True
        return change.plan.time.parts["copies not hidden"] > change.plan.seconds / 100

    return bisect_left(range(1, layers - 1), True, key=waits)  # a rule warns of all but one


def _offload(number: int, *, weights: bool) -> dict[str, Any]:
    return {"cpu_offloading": True, "cpu_offloading_num_layers": number, "cpu_offloading_weights": weights}


def _micro_batches(root: RootBlock) -> list[int]:
    """The size of a micro batch and those it is a multiple of, which leave the global batch as it is; largest first."""
    size = root.model.micro_batch_size
    return [each for each in range(size, 0, -1) if size % each == 0]


def _others(root: RootBlock, target: Target) -> list[dict[str, Any]]:
    """The optimizer's state on the other side; parameters cut over the ranks, where there are some."""
    found: list[dict[str, Any]] = []
    if target.world_size > 1 and not root.model.fsdp:
        found.append({"fsdp": True})
    return [*found, {"cpu_offloading_optimizer": not root.model.cpu_offloading_optimizer}]


# ---------------------------------------------------------------- plans of changed keys


def _in_stacks(root: RootBlock, values: Values) -> dict[str, Any]:
    """The same values in every stack; those of a kind, recomputation or offloading, that are not given are off."""
    kinds = [kind for kind in (_RECOMPUTE, "cpu_offloading") if any(key.startswith(kind) for key in values)]
    asked = {key: off for key, off in _OF_STACK.items() if any(key.startswith(kind) for kind in kinds)}
    return {f"{at}{key}": value for at in stacks_of_keys(root.model) for key, value in {**asked, **values}.items()}


def _changed(root: RootBlock, target: Target, plan: Plan, values: Values) -> Change | None:
    """The run with other values; None where nothing differs, or it cannot be had."""
    differing = _differing(root, values)
    if not differing:
        return None
    own: dict[str, Any] = {key: value for key, value in differing.items() if "." not in key}
    below: dict[str, dict[str, Any]] = {}
    for key, value in differing.items():
        place, _, name = key.rpartition(".")
        if place:
            below.setdefault(place, {})[name] = value
    stacks = {place: getattr(root.model, place).model_copy(update=more) for place, more in below.items()}
    changed = root.model_copy(update={"model": root.model.model_copy(update={**own, **stacks})})
    errors = _errors(changed)
    if errors and errors - _errors(root):
        return None
    try:
        return Change(differing, make_plan(changed, target, vocab_size=plan.facts.vocab_size))
    except (NoBackendError, UserError):  # another micro batch is another call, and not all can be recorded
        return None


def _differing(root: RootBlock, values: Values) -> dict[str, Any]:
    """Those of the values that the keys do not have already."""
    return {key: value for key, value in values.items() if attrgetter(key)(root.model) != value}


def _errors(root: RootBlock) -> set[str]:
    """What the rules refuse."""
    facts = Facts(root, frozenset(), frozenset(), {})
    return {finding.message for finding in run_rules(facts) if finding.level == "error"}


def _shown(value: Any) -> str:
    """A value as the command line takes it."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value)
