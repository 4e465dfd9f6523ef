"""Rules of `model.optim`: required keys of optimizers and schedules, and keys without effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from ....models.config.key_block import Finding
from ...utils.text import counted
from ..lr_schedule import SCHEDULES, resolve_steps
from ..schema.optim import RELATIVE_STEP_KEYS, OptimBlock, SchedBlock, optimizer_kind, optimizer_settings
from .rule_context import no_effect

_AT = "model.optim"
_SCHED = "model.optim.sched"
_PHASES = ("warmup", "constant", "hold")
_COMMON_KEYS = frozenset({"name", "lr", "weight_decay", "sched"})


@dataclass(frozen=True)
class OptimContext:
    """Input of an optimizer rule.

    Attributes:
        optim: the typed keys.
        set_by_user: paths set by the user, not by a packaged file.
        max_steps: `trainer.max_steps`.
    """

    optim: OptimBlock
    own: frozenset[str]
    max_steps: int

    @property
    def sched(self) -> SchedBlock:
        """The keys of the schedule."""
        return self.optim.sched

    @property
    def length(self) -> int:
        """Steps of the schedule."""
        return self.sched.max_steps or self.max_steps

    @property
    def relative(self) -> bool:
        """True if Adafactor's relative step replaces the schedule."""
        return self.optim.name == "adafactor" and self.optim.relative_step

    @property
    def schedule_fields(self) -> frozenset[str]:
        """Settings of the chosen schedule."""
        return frozenset(field.name for field in fields(SCHEDULES[self.sched.name]))


def eps_fits_optimizer(context: OptimContext) -> Iterator[Finding]:
    """Adafactor takes two values of `eps`, AdamW and Muon one."""
    name, eps = context.optim.name, context.optim.eps
    kind = optimizer_kind(name)
    if kind == "adafactor" and isinstance(eps, float):
        rule = "`adafactor` takes two values of `eps`, for squared gradients and for the RMS of parameters"
        default = "[1e-30,1e-3]"
    elif kind in ("adamw", "muon") and isinstance(eps, list):
        rule, default = f"`{name}` takes one value of `eps`; two are for adafactor", "1e-8"
    else:
        return
    yield Finding("error", (f"{_AT}.eps", f"{_AT}.name"), rule, f"{_AT}.eps={default}")


def nesterov_needs_momentum(context: OptimContext) -> Iterator[Finding]:
    """Nesterov momentum needs a positive momentum (sgd, muon)."""
    if optimizer_kind(context.optim.name) not in ("sgd", "muon"):
        return
    settings = optimizer_settings(context.optim)
    if context.optim.nesterov and not settings["momentum"]:
        yield Finding(
            "error",
            (f"{_AT}.nesterov", f"{_AT}.momentum"),
            f"`nesterov` needs a `momentum` larger than 0, but it is {settings['momentum']:g}",
            f"{_AT}.momentum=0.9, or ~{_AT}.nesterov",
        )


def warmup_init_needs_relative_step(context: OptimContext) -> Iterator[Finding]:
    """`warmup_init` acts only with `relative_step`."""
    optim = context.optim
    if optim.name == "adafactor" and optim.warmup_init and not optim.relative_step:
        yield Finding(
            "error",
            (f"{_AT}.warmup_init", f"{_AT}.relative_step"),
            "`warmup_init` warms up `relative_step`, which is False",
            f"{_SCHED}.warmup_steps=STEPS to warm up the schedule, or {_AT}.relative_step=true",
        )


def unused_optimizer_keys(context: OptimContext) -> Iterator[Finding]:
    """Warn about settings of other optimizers."""
    optim = context.optim
    acting = _COMMON_KEYS | optimizer_settings(optim).keys()
    if optim.name == "adafactor":
        acting |= set(RELATIVE_STEP_KEYS)
    for key in OptimBlock.model_fields:
        changes = getattr(optim, key) not in (None, OptimBlock.model_fields[key].default)
        if key not in acting and changes and f"{_AT}.{key}" in context.own:
            yield no_effect(f"{_AT}.{key}", f"{_AT}.name", f"with `{optim.name}`")


def relative_step_replaces_schedule(context: OptimContext) -> Iterator[Finding]:
    """`lr` and `sched` have no effect with `relative_step`."""
    if not context.relative:
        return
    for path in sorted(context.own):
        if path == f"{_AT}.lr" or path.startswith(f"{_SCHED}."):
            yield no_effect(path, f"{_AT}.relative_step", "with `relative_step`, which sets the learning rate")


def steps_or_ratio(context: OptimContext) -> Iterator[Finding]:
    """Only one of `X_steps` and `X_ratio` may be given."""
    for name in _PHASES:
        steps, ratio = getattr(context.sched, f"{name}_steps"), getattr(context.sched, f"{name}_ratio")
        if steps is not None and ratio is not None:
            yield Finding(
                "error",
                (f"{_SCHED}.{name}_ratio", f"{_SCHED}.{name}_steps"),
                f"`{name}_steps` ({steps}) and `{name}_ratio` ({ratio:g}) set the same value; only one may be given",
                f"~{_SCHED}.{name}_ratio",
            )


def unused_schedule_keys(context: OptimContext) -> Iterator[Finding]:
    """Warn about settings of other schedules."""
    sched, name = context.sched, context.sched.name
    if context.relative:
        return
    acting = context.schedule_fields
    for key, field in SchedBlock.model_fields.items():
        if key == "name" or getattr(sched, key) in (None, 0, field.default):
            continue
        setting = key.replace("_ratio", "_steps")
        path = f"{_SCHED}.{key}"
        if name == "NoamAnnealing" and key == "max_steps" and sched.warmup_ratio is not None:
            continue  # `warmup_ratio` is relative to it
        if name == "WarmupHoldPolicy" and setting == "hold_steps" and path in context.own:
            yield no_effect(path, f"{_SCHED}.name", "with `WarmupHoldPolicy`, which holds the peak to the end")
        elif setting not in acting and path in context.own:
            yield no_effect(path, f"{_SCHED}.name", f"with `{name}`")
    if "lr" not in acting and f"{_AT}.lr" in context.own:
        yield no_effect(f"{_AT}.lr", f"{_SCHED}.name", f"with `{name}`, whose learning rate is 1 / sqrt(step)")


def min_lr_is_reached(context: OptimContext) -> Iterator[Finding]:
    """Some schedules use `min_lr` only after their last step."""
    without_floor = ("WarmupPolicy", "WarmupHoldPolicy", "InverseSquareRootAnnealing", "T5InverseSquareRootAnnealing")
    path = f"{_SCHED}.min_lr"
    never = context.sched.name in without_floor and context.length >= context.max_steps and not context.relative
    if never and context.sched.min_lr and path in context.own:
        yield no_effect(path, f"{_SCHED}.name", f"with `{context.sched.name}` before the schedule has ended")


def schedule_has_required_keys(context: OptimContext) -> Iterator[Finding]:
    """Some schedules have required settings; NeMo crashes without them."""
    sched, name = context.sched, context.sched.name
    if context.relative:
        return
    if name == "NoamAnnealing" and sched.d_model is None:
        yield Finding(
            "error",
            (f"{_SCHED}.d_model", f"{_SCHED}.name"),
            "`NoamAnnealing` divides by the square root of `d_model`, which is not set",
            f"{_SCHED}.d_model='${{model.hidden_size}}'",
        )
    if name == "NoamHoldAnnealing" and not resolve_steps(sched.warmup_steps, sched.warmup_ratio, context.length):
        yield Finding(
            "error",
            (f"{_SCHED}.warmup_steps", f"{_SCHED}.name"),
            "`NoamHoldAnnealing` needs warm-up steps, which scale its decay",
            f"{_SCHED}.warmup_steps={max(1, context.length // 10)}",
        )
    if name == "T5InverseSquareRootAnnealing":
        constant = resolve_steps(sched.constant_steps, sched.constant_ratio, context.length)
        if not constant:
            yield Finding(
                "error",
                (f"{_SCHED}.constant_steps", f"{_SCHED}.name"),
                "`T5InverseSquareRootAnnealing` starts at 1 / sqrt(`constant_steps`), which must be set",
                f"{_SCHED}.constant_steps=10000, as in T5's pre-training",
            )


def schedule_phases_fit(context: OptimContext) -> Iterator[Finding]:
    """Warm-up, hold and constant phase must leave steps for the decay."""
    sched, total, acting = context.sched, context.length, context.schedule_fields
    if context.relative or "max_steps" not in acting or "warmup_steps" not in acting:
        return
    phases = {"warmup": "warm-up", "hold": "hold", "constant": "constant phase"}
    steps_of_phase: dict[str, int] = {}
    for name in phases:
        if f"{name}_steps" in acting and not (name == "hold" and sched.name == "WarmupHoldPolicy"):
            steps_of_phase[name] = resolve_steps(
                getattr(sched, f"{name}_steps"), getattr(sched, f"{name}_ratio"), total
            )
    taken = sum(steps_of_phase.values())
    if taken and taken >= total:
        first = next(name for name, steps in steps_of_phase.items() if steps)
        by_ratio = getattr(sched, f"{first}_steps") is None
        length = f"{_SCHED}.max_steps" if sched.max_steps else "trainer.max_steps"
        listed = " and ".join(f"{phases[name]} ({counted(steps, 'step')})" for name, steps in steps_of_phase.items())
        yield Finding(
            "error",
            (f"{_SCHED}.{first}_{'ratio' if by_ratio else 'steps'}", length),
            f"{listed} must leave steps for the decay, but the schedule has {total}",
            f"use fewer, or {length}={taken + max(1, total)}",
        )


def min_lr_is_below_lr(context: OptimContext) -> Iterator[Finding]:
    """`min_lr` must not exceed `lr`."""
    optim = context.optim
    if optim.sched.min_lr > optim.lr and "lr" in context.schedule_fields and not context.relative:
        yield Finding(
            "error",
            (f"{_SCHED}.min_lr", f"{_AT}.lr"),
            f"`min_lr` ({optim.sched.min_lr:g}) must not be larger than `lr` ({optim.lr:g})",
            f"{_SCHED}.min_lr={optim.lr / 10:g}",
        )


RULES: tuple[Callable[[OptimContext], Iterator[Finding]], ...] = (
    eps_fits_optimizer,
    nesterov_needs_momentum,
    warmup_init_needs_relative_step,
    unused_optimizer_keys,
    relative_step_replaces_schedule,
    steps_or_ratio,
    unused_schedule_keys,
    min_lr_is_reached,
    schedule_has_required_keys,
    schedule_phases_fit,
    min_lr_is_below_lr,
)


def optim_rules(optim: OptimBlock, set_by_user: frozenset[str], max_steps: int) -> Iterator[Finding]:
    """Check all rules of `model.optim`.

    Args:
        optim: the typed keys.
        set_by_user: paths set by the user, not by a packaged file.
        max_steps: `trainer.max_steps`.
    """
    context = OptimContext(optim, set_by_user, max_steps)
    for rule in RULES:
        yield from rule(context)
