"""Rules between the keys of `model.optim`: what an optimizer or a schedule needs, and what has no effect on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from ....models.config.key_block import Finding
from ...utils.text import counted
from ..lr_schedule import SCHEDULES, steps_of
from ..schema.optim import RELATIVE_STEP_KEYS, OptimBlock, SchedBlock, optimizer_kind, optimizer_settings
from .rule_context import no_effect

_AT = "model.optim"
_SCHED = "model.optim.sched"
_TWICE = ("warmup", "constant", "hold")
_ALWAYS = frozenset({"name", "lr", "weight_decay", "sched"})


@dataclass(frozen=True)
class OptimFacts:
    """What a rule may look at.

    Attributes:
        optim: the typed keys.
        own: paths that the user set, not one of the packaged files.
        max_steps: of the trainer.
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
        """Whether Adafactor's relative step takes the place of the schedule."""
        return self.optim.name == "adafactor" and self.optim.relative_step

    @property
    def schedule_fields(self) -> frozenset[str]:
        """The settings that the chosen schedule has."""
        return frozenset(field.name for field in fields(SCHEDULES[self.sched.name]))


def eps_fits_the_optimizer(facts: OptimFacts) -> Iterator[Finding]:
    """Adafactor has two of them."""
    name, eps = facts.optim.name, facts.optim.eps
    kind = optimizer_kind(name)
    if kind == "adafactor" and isinstance(eps, float):
        rule, cure = "`adafactor` takes two values of `eps`, for squared gradients and for the size of weights", None
    elif kind in ("adamw", "muon") and isinstance(eps, list):
        rule, cure = f"`{name}` takes one value of `eps`; two are adafactor's", "1e-8"
    else:
        return
    yield Finding("error", (f"{_AT}.eps", f"{_AT}.name"), rule, f"{_AT}.eps={cure or '[1e-30,1e-3]'}")


def nesterov_needs_momentum(facts: OptimFacts) -> Iterator[Finding]:
    """Without momentum there is nothing to look ahead with; for muon nothing is left to average."""
    if optimizer_kind(facts.optim.name) not in ("sgd", "muon"):
        return
    settings = optimizer_settings(facts.optim)
    if facts.optim.nesterov and not settings["momentum"]:
        yield Finding(
            "error",
            (f"{_AT}.nesterov", f"{_AT}.momentum"),
            f"`nesterov` needs a `momentum` larger than 0, which is {settings['momentum']:g}",
            f"{_AT}.momentum=0.9, or ~{_AT}.nesterov",
        )


def warmup_init_needs_relative_step(facts: OptimFacts) -> Iterator[Finding]:
    """It warms that up, not the schedule."""
    optim = facts.optim
    if optim.name == "adafactor" and optim.warmup_init and not optim.relative_step:
        yield Finding(
            "error",
            (f"{_AT}.warmup_init", f"{_AT}.relative_step"),
            "`warmup_init` warms up `relative_step`, which is False",
            f"{_SCHED}.warmup_steps=STEPS to warm up the schedule, or {_AT}.relative_step=true",
        )


def keys_of_other_optimizers(facts: OptimFacts) -> Iterator[Finding]:
    """A setting acts for the optimizers that have it."""
    optim = facts.optim
    acting = _ALWAYS | optimizer_settings(optim).keys()
    if optim.name == "adafactor":
        acting |= set(RELATIVE_STEP_KEYS)
    for key in OptimBlock.model_fields:
        changes = getattr(optim, key) not in (None, OptimBlock.model_fields[key].default)
        if key not in acting and changes and f"{_AT}.{key}" in facts.own:
            yield no_effect(f"{_AT}.{key}", f"{_AT}.name", f"with `{optim.name}`")


def relative_step_is_the_schedule(facts: OptimFacts) -> Iterator[Finding]:
    """Then neither `lr` nor `sched` is read."""
    if not facts.relative:
        return
    for path in sorted(facts.own):
        if path == f"{_AT}.lr" or path.startswith(f"{_SCHED}."):
            yield no_effect(path, f"{_AT}.relative_step", "with `relative_step`, which gives the learning rate")


def steps_are_given_once(facts: OptimFacts) -> Iterator[Finding]:
    """`_steps` and `_ratio` say the same thing."""
    for name in _TWICE:
        steps, ratio = getattr(facts.sched, f"{name}_steps"), getattr(facts.sched, f"{name}_ratio")
        if steps is not None and ratio is not None:
            yield Finding(
                "error",
                (f"{_SCHED}.{name}_ratio", f"{_SCHED}.{name}_steps"),
                f"`{name}_steps` ({steps}) and `{name}_ratio` ({ratio:g}) say the same thing; only one may be given",
                f"~{_SCHED}.{name}_ratio",
            )


def keys_of_other_schedules(facts: OptimFacts) -> Iterator[Finding]:
    """A setting acts for the schedules that have it."""
    sched, name = facts.sched, facts.sched.name
    if facts.relative:
        return
    acting = facts.schedule_fields
    for key, field in SchedBlock.model_fields.items():
        if key == "name" or getattr(sched, key) in (None, 0, field.default):
            continue
        setting = key.replace("_ratio", "_steps")
        path = f"{_SCHED}.{key}"
        if name == "NoamAnnealing" and key == "max_steps" and sched.warmup_ratio is not None:
            continue  # the warm-up is a part of it
        if name == "WarmupHoldPolicy" and setting == "hold_steps" and path in facts.own:
            yield no_effect(path, f"{_SCHED}.name", "with `WarmupHoldPolicy`, which holds to the end")
        elif setting not in acting and path in facts.own:
            yield no_effect(path, f"{_SCHED}.name", f"with `{name}`")
    if "lr" not in acting and f"{_AT}.lr" in facts.own:
        yield no_effect(f"{_AT}.lr", f"{_SCHED}.name", f"with `{name}`, whose rate is 1 / sqrt(step)")


def min_lr_comes_after_the_end(facts: OptimFacts) -> Iterator[Finding]:
    """Some schedules have no floor before their last step."""
    endless = ("WarmupPolicy", "WarmupHoldPolicy", "InverseSquareRootAnnealing", "T5InverseSquareRootAnnealing")
    path = f"{_SCHED}.min_lr"
    never = facts.sched.name in endless and facts.length >= facts.max_steps and not facts.relative
    if never and facts.sched.min_lr and path in facts.own:
        yield no_effect(path, f"{_SCHED}.name", f"with `{facts.sched.name}` before the schedule has ended")


def schedule_has_what_it_needs(facts: OptimFacts) -> Iterator[Finding]:
    """What NeMo crashes without."""
    sched, name = facts.sched, facts.sched.name
    if facts.relative:
        return
    if name == "NoamAnnealing" and sched.d_model is None:
        yield Finding(
            "error",
            (f"{_SCHED}.d_model", f"{_SCHED}.name"),
            "`NoamAnnealing` divides by the root of `d_model`, which is not given",
            f"{_SCHED}.d_model='${{model.hidden_size}}'",
        )
    if name == "NoamHoldAnnealing" and not steps_of(sched.warmup_steps, sched.warmup_ratio, facts.length):
        yield Finding(
            "error",
            (f"{_SCHED}.warmup_steps", f"{_SCHED}.name"),
            "`NoamHoldAnnealing` decays by the steps of its warm-up, which has none",
            f"{_SCHED}.warmup_steps={max(1, facts.length // 10)}",
        )
    if name == "T5InverseSquareRootAnnealing":
        constant = steps_of(sched.constant_steps, sched.constant_ratio, facts.length)
        if not constant:
            yield Finding(
                "error",
                (f"{_SCHED}.constant_steps", f"{_SCHED}.name"),
                "`T5InverseSquareRootAnnealing` begins at 1 / sqrt(constant_steps), and there are none",
                f"{_SCHED}.constant_steps=10000, as T5 was trained",
            )


def schedule_has_room(facts: OptimFacts) -> Iterator[Finding]:
    """Warm-up, hold, decay and constant part share the steps."""
    sched, total, acting = facts.sched, facts.length, facts.schedule_fields
    if facts.relative or "max_steps" not in acting or "warmup_steps" not in acting:
        return
    said = {"warmup": "warm-up", "hold": "hold", "constant": "constant part"}
    parts: dict[str, int] = {}
    for name in said:
        if f"{name}_steps" in acting and not (name == "hold" and sched.name == "WarmupHoldPolicy"):
            parts[name] = steps_of(getattr(sched, f"{name}_steps"), getattr(sched, f"{name}_ratio"), total)
    taken = sum(parts.values())
    if taken and taken >= total:
        first = next(name for name, steps in parts.items() if steps)
        by_ratio = getattr(sched, f"{first}_steps") is None
        length = f"{_SCHED}.max_steps" if sched.max_steps else "trainer.max_steps"
        taken_by = {name: counted(steps, "step") for name, steps in parts.items()}
        yield Finding(
            "error",
            (f"{_SCHED}.{first}_{'ratio' if by_ratio else 'steps'}", length),
            f"{' and '.join(f'{said[name]} ({taken_by[name]})' for name in parts)} must leave "
            f"steps for the decay, but the schedule has {total}",
            f"use fewer, or {length}={taken + max(1, total)}",
        )


def min_lr_is_smaller(facts: OptimFacts) -> Iterator[Finding]:
    """A schedule ends below its peak."""
    optim = facts.optim
    if optim.sched.min_lr > optim.lr and "lr" in facts.schedule_fields and not facts.relative:
        yield Finding(
            "error",
            (f"{_SCHED}.min_lr", f"{_AT}.lr"),
            f"`min_lr` ({optim.sched.min_lr:g}) must not be larger than `lr` ({optim.lr:g})",
            f"{_SCHED}.min_lr={optim.lr / 10:g}",
        )


RULES: tuple[Callable[[OptimFacts], Iterator[Finding]], ...] = (
    eps_fits_the_optimizer,
    nesterov_needs_momentum,
    warmup_init_needs_relative_step,
    keys_of_other_optimizers,
    relative_step_is_the_schedule,
    steps_are_given_once,
    keys_of_other_schedules,
    min_lr_comes_after_the_end,
    schedule_has_what_it_needs,
    schedule_has_room,
    min_lr_is_smaller,
)


def optim_rules(optim: OptimBlock, own: frozenset[str], max_steps: int) -> Iterator[Finding]:
    """Everything the keys of `model.optim` have against each other.

    Args:
        optim: the typed keys.
        own: paths that the user set, not one of the packaged files.
        max_steps: of the trainer.
    """
    facts = OptimFacts(optim, own, max_steps)
    for rule in RULES:
        yield from rule(facts)
