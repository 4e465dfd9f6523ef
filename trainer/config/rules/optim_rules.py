"""Rules of `model.optim`: required keys of optimizers and schedules, and keys without effect."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

from ....models.config.key_block import Finding
from ...utils.text import pluralize
from ..lr_schedule import SCHEDULES
from ..schema.optim import (
    PHASES,
    RELATIVE_STEP_KEYS,
    OptimBlock,
    SchedBlock,
    optimizer_kind,
    optimizer_settings,
    phase_steps,
)
from .rule_context import RuleContext, no_effect, step_limit, unused

_AT = "model.optim"
_SCHED = "model.optim.sched"
_OWN_SCHEDULE_KEYS = frozenset({"lr", "min_lr", "max_steps", "kwargs"})
"""Keys that a schedule of the user's own gets."""
_COMMON_KEYS = frozenset({"name", "lr", "weight_decay", "overlap_param_sync", "sched"})


def _schedule_length(context: RuleContext) -> int:
    """Return the number of steps of the schedule."""
    return context.root.model.optim.sched.max_steps or step_limit(context)


def _uses_relative_step(context: RuleContext) -> bool:
    """Return True if Adafactor's relative step replaces the schedule."""
    optim = context.root.model.optim
    return optim.name == "adafactor" and optim.relative_step


def _schedule_fields(sched: SchedBlock) -> frozenset[str]:
    """Return the settings of the chosen schedule."""
    kind = SCHEDULES.get(sched.name)
    return _OWN_SCHEDULE_KEYS if kind is None else frozenset(field.name for field in fields(kind))


def eps_fits_optimizer(context: RuleContext) -> Iterator[Finding]:
    """Adafactor takes two values of `eps`, AdamW and Muon one."""
    optim = context.root.model.optim
    name, eps, kind = optim.name, optim.eps, optimizer_kind(optim.name)
    if kind == "adafactor" and isinstance(eps, float):
        rule = "`adafactor` takes two values of `eps`, for squared gradients and for the RMS of parameters"
        default = "[1e-30,1e-3]"
    elif kind in ("adamw", "muon") and isinstance(eps, list):
        rule, default = f"`{name}` takes one value of `eps`; two are for adafactor", "1e-8"
    else:
        return
    yield Finding.error((f"{_AT}.eps", f"{_AT}.name"), rule, f"{_AT}.eps={default}")


def nesterov_needs_momentum(context: RuleContext) -> Iterator[Finding]:
    """Nesterov momentum needs a positive momentum (sgd, muon)."""
    optim = context.root.model.optim
    if optimizer_kind(optim.name) not in ("sgd", "muon"):
        return
    settings = optimizer_settings(optim)
    if optim.nesterov and not settings["momentum"]:
        yield Finding.error(
            (f"{_AT}.nesterov", f"{_AT}.momentum"),
            f"`nesterov` needs a `momentum` larger than 0, but it is {settings['momentum']:g}",
            f"{_AT}.momentum=0.9, or ~{_AT}.nesterov",
        )


def warmup_init_needs_relative_step(context: RuleContext) -> Iterator[Finding]:
    """`warmup_init` acts only with `relative_step`."""
    optim = context.root.model.optim
    if optim.name == "adafactor" and optim.warmup_init and not optim.relative_step:
        yield Finding.error(
            (f"{_AT}.warmup_init", f"{_AT}.relative_step"),
            "`warmup_init` warms up `relative_step`, which is False",
            f"{_SCHED}.warmup_steps=STEPS to warm up the schedule, or {_AT}.relative_step=true",
        )


def unused_optimizer_keys(context: RuleContext) -> Iterator[Finding]:
    """Warn about settings of other optimizers."""
    optim = context.root.model.optim
    acting = _COMMON_KEYS | optimizer_settings(optim).keys()
    if optim.name == "adafactor":
        acting |= set(RELATIVE_STEP_KEYS)
    for key in OptimBlock.model_fields:
        if key not in acting and getattr(optim, key) is not None:
            yield from unused(context, f"{_AT}.{key}", f"{_AT}.name", f"with `{optim.name}`")


def relative_step_replaces_schedule(context: RuleContext) -> Iterator[Finding]:
    """`lr` and `sched` have no effect with `relative_step`."""
    if not _uses_relative_step(context):
        return
    for path in sorted(context.set_by_user):
        if path == f"{_AT}.lr" or path.startswith(f"{_SCHED}."):
            yield no_effect(path, f"{_AT}.relative_step", "with `relative_step`, which sets the learning rate")


def steps_or_ratio(context: RuleContext) -> Iterator[Finding]:
    """Only one of `X_steps` and `X_ratio` may be given."""
    sched = context.root.model.optim.sched
    for name in PHASES:
        steps, ratio = getattr(sched, f"{name}_steps"), getattr(sched, f"{name}_ratio")
        if steps is not None and ratio is not None:
            yield Finding.error(
                (f"{_SCHED}.{name}_ratio", f"{_SCHED}.{name}_steps"),
                f"`{name}_steps` ({steps}) and `{name}_ratio` ({ratio:g}) set the same value; only one may be given",
                f"~{_SCHED}.{name}_ratio",
            )


def unused_schedule_keys(context: RuleContext) -> Iterator[Finding]:
    """Warn about settings of other schedules."""
    sched = context.root.model.optim.sched
    name = sched.name
    if _uses_relative_step(context):
        return
    acting = _schedule_fields(sched)
    for key, field in SchedBlock.model_fields.items():
        if key == "name" or getattr(sched, key) in (None, 0, field.default):
            continue
        if key == "kwargs":
            if key not in acting:
                yield from unused(context, f"{_SCHED}.{key}", f"{_SCHED}.name", f"with `{name}`")
            continue
        setting = key.replace("_ratio", "_steps")
        path = f"{_SCHED}.{key}"
        if name == "NoamAnnealing" and key == "max_steps" and sched.warmup_ratio is not None:
            continue  # `warmup_ratio` is relative to it
        if name == "WarmupHoldPolicy" and setting == "hold_steps" and path in context.set_by_user:
            yield no_effect(path, f"{_SCHED}.name", "with `WarmupHoldPolicy`, which holds the peak to the end")
        elif setting not in acting and path in context.set_by_user:
            yield no_effect(path, f"{_SCHED}.name", f"with `{name}`")
    if "lr" not in acting and f"{_AT}.lr" in context.set_by_user:
        yield no_effect(f"{_AT}.lr", f"{_SCHED}.name", f"with `{name}`, whose learning rate is 1 / sqrt(step)")


def min_lr_is_reached(context: RuleContext) -> Iterator[Finding]:
    """Some schedules use `min_lr` only after their last step."""
    without_floor = ("WarmupPolicy", "WarmupHoldPolicy", "InverseSquareRootAnnealing", "T5InverseSquareRootAnnealing")
    sched, path = context.root.model.optim.sched, f"{_SCHED}.min_lr"
    never = sched.name in without_floor and _schedule_length(context) >= step_limit(context)
    if never and not _uses_relative_step(context) and sched.min_lr and path in context.set_by_user:
        yield no_effect(path, f"{_SCHED}.name", f"with `{sched.name}` before the schedule has ended")


def schedule_has_required_keys(context: RuleContext) -> Iterator[Finding]:
    """Some schedules have required settings; NeMo crashes without them."""
    sched = context.root.model.optim.sched
    name, length = sched.name, _schedule_length(context)
    if _uses_relative_step(context):
        return
    if name == "NoamAnnealing" and sched.d_model is None:
        yield Finding.error(
            (f"{_SCHED}.d_model", f"{_SCHED}.name"),
            "`NoamAnnealing` divides by the square root of `d_model`, which is not set",
            f"{_SCHED}.d_model='${{model.hidden_size}}'",
        )
    if name == "NoamHoldAnnealing" and not phase_steps(sched, "warmup", length):
        yield Finding.error(
            (f"{_SCHED}.warmup_steps", f"{_SCHED}.name"),
            "`NoamHoldAnnealing` needs warm-up steps, which scale its decay",
            f"{_SCHED}.warmup_steps={max(1, min(1000, length // 10))}",
        )
    if name == "T5InverseSquareRootAnnealing" and not phase_steps(sched, "constant", length):
        yield Finding.error(
            (f"{_SCHED}.constant_steps", f"{_SCHED}.name"),
            "`T5InverseSquareRootAnnealing` starts at 1 / sqrt(`constant_steps`), which must be set",
            f"{_SCHED}.constant_steps=10000, as in T5's pre-training",
        )


def schedule_phases_fit(context: RuleContext) -> Iterator[Finding]:
    """Warn if warm-up, hold and constant phase leave no steps for the decay, as in NeMo's short test runs."""
    sched, total = context.root.model.optim.sched, _schedule_length(context)
    acting = _schedule_fields(sched)
    if _uses_relative_step(context) or "max_steps" not in acting or "warmup_steps" not in acting:
        return
    phases = {"warmup": "warm-up", "hold": "hold", "constant": "constant phase"}
    steps_of_phase = {
        name: phase_steps(sched, name, total)
        for name in phases
        if f"{name}_steps" in acting and not (name == "hold" and sched.name == "WarmupHoldPolicy")
    }
    taken = sum(steps_of_phase.values())
    if taken and taken >= total:
        first = next(name for name, steps in steps_of_phase.items() if steps)
        by_ratio = {name for name in steps_of_phase if getattr(sched, f"{name}_steps") is None}
        length = f"{_SCHED}.max_steps" if sched.max_steps else "trainer.max_steps"
        listed = " and ".join(f"{phases[name]} ({pluralize(steps, 'step')})" for name, steps in steps_of_phase.items())
        share = sum(getattr(sched, f"{name}_ratio") or 0 for name in by_ratio)
        fixed = sum(steps for name, steps in steps_of_phase.items() if name not in by_ratio)
        yield Finding.warning(
            (f"{_SCHED}.{first}_{'ratio' if first in by_ratio else 'steps'}", length),
            f"no steps are left for the decay by {listed}, since the schedule has {total}",
            "use fewer" + (f", or {length}={math.ceil(fixed / (1 - share)) + max(1, total)}" if share < 1 else ""),
        )


def min_lr_is_below_lr(context: RuleContext) -> Iterator[Finding]:
    """`min_lr` must not exceed `lr`."""
    optim = context.root.model.optim
    if optim.sched.min_lr > optim.lr and "lr" in _schedule_fields(optim.sched) and not _uses_relative_step(context):
        yield Finding.error(
            (f"{_SCHED}.min_lr", f"{_AT}.lr"),
            f"`min_lr` ({optim.sched.min_lr:g}) must not be larger than `lr` ({optim.lr:g})",
            f"{_SCHED}.min_lr={optim.lr / 10:g}",
        )
