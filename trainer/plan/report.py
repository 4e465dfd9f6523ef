"""A plan in words and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ...models.config.memory import RecomputeModule
from ...models.config.memory_slice import named
from ..utils.text import counted
from .hardware import GIB
from .inputs import RunFacts, StackFacts
from .run_plan import Plan, made_again, saved_by_recomputation
from .search import NOTHING_GIVEN, Change, Given
from .state_memory import CONTEXT
from .timeline import Moment

_HELD = {
    "weights": "weights",
    "main_weights": "main weights",
    "optimizer": "optimizer state",
    "average": "average of the weights",
    "gradient_sums": "sums of gradients",
    "tables": "tables and masks",
    "batches": "batches",
    "workspace": "library workspace",
}
_AT_PEAK = {
    "gradients": "gradients",
    "activations": "activations",
    "recomputed": "activations made again",
    "logits": "logits and the loss",
    "working": "working memory",
}
_LEAST_SHOWN = GIB // 200
LEAST_WAITING = 0.1
"""Part of a step that the card waits for the host, from which on it is told."""


def gib(size: float) -> str:
    """A size in GiB, or in MiB where it is small."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.0f} MiB"


def categories(plan: Plan) -> list[tuple[str, int]]:
    """What there is at the peak, by what it is, as many bytes as the peak in all."""
    held, peak = plan.memory.held, plan.memory.peak
    found = [(name, getattr(held, field)) for field, name in _HELD.items()]
    found[0] = (found[0][0], found[0][1] - peak.away)
    return found + [(name, getattr(peak, field)) for field, name in _AT_PEAK.items()]


def activation_parts(plan: Plan) -> list[tuple[str, int]]:
    """What layers keep for the backward pass, by part, on the device or on the host."""
    found: dict[str, int] = {}
    for layer in plan.memory.layers:
        if layer.is_idle:
            continue
        own = layer.kept
        if not layer.is_recomputed:
            modules = layer.modules
            for part in layer.memory.kept:
                if not part.is_made_again(modules):
                    found[part.part] = found.get(part.part, 0) + part.size
                    own -= part.size
            if "core_attention" in modules:
                found["attention"] = found.get("attention", 0) + layer.memory.beside_scores
                own -= layer.memory.beside_scores
            beside_activation = layer.memory.beside_activation_with(modules)
            found["mlp"] = found.get("mlp", 0) + beside_activation
            own -= beside_activation
        found["layer inputs"] = found.get("layer inputs", 0) + own
    return sorted(found.items(), key=lambda item: -item[1])


def summary(plan: Plan) -> list[str]:
    """A few lines for the beginning of a run."""
    device = plan.facts.target
    if device.device != "cuda":
        return [
            f"plan: {gib(plan.memory.held.total)} of weights and optimizer state, with gradients and what layers keep "
            f"about {gib(plan.allocated)}"
        ]
    largest = sorted(categories(plan), key=lambda item: -item[1])[:4]
    parts = ", ".join(f"{name} {gib(size)}" for name, size in largest if size >= _LEAST_SHOWN)
    lines = [f"plan: {gib(plan.allocated)} at the peak ({plan.memory.peak.where}): {parts}"]
    if plan.available is not None:
        there = f"of {gib(plan.available)}"
        if plan.needed <= plan.available:
            lines[0] += f"; {gib(plan.available - plan.needed)} left {there}"
        else:
            lines.append(
                f"warning: plan: needs {gib(plan.needed)} with what the allocator and CUDA take, {there}; "
                "`stoker plan --fit` with the same keys finds some that fit"
            )
    if plan.time is not None:
        time = plan.time
        again = f", {time.recomputed_flops / 1e12:,.1f} of them again" if time.recomputed_flops else ""
        lines.append(
            f"plan: {(time.model_flops + time.recomputed_flops) / 1e12:,.1f} TFLOP a step{again}, about "
            f"{_seconds(time.seconds)}, {time.tokens_per_second:,.0f} tokens/s{_how_sure(plan)}"
        )
        lines += [f"plan: {line}" for line in _idle_card(plan)]
    if plan.on_host:
        lines.append(f"plan: {gib(plan.on_host)} in host memory for each process")
    if plan.short_of_host:
        lines.append(f"warning: plan: that is {gib(plan.short_of_host)} more in host memory than there is")
    return lines


def comparison(plan: Plan, allocated: int, reserved: int) -> str:
    """What was measured beside what was planned."""

    def beside(measured: int, planned: int) -> str:
        return f"{gib(measured)} (planned {gib(planned)}, {100 * (planned / measured - 1):+.1f} %)"

    return (
        f"memory at the peak: allocated {beside(allocated, plan.allocated)}, reserved {beside(reserved, plan.reserved)}"
    )


def report(plan: Plan, changes: Sequence[Change], given: Given = NOTHING_GIVEN) -> Iterator[str]:
    """The whole plan, in lines."""
    facts, target = plan.facts, plan.facts.target
    each = f", {plan.active:,} for each token" if plan.active < plan.parameters else ""
    yield f"model        {plan.parameters:,} parameters{each}"
    yield f"device       {_device(plan)}"
    ranks = f"{facts.ranks} processes, " if facts.ranks > 1 else ""
    layout = f"{facts.layout.name}, " if facts.layout else ""
    samples = f"{facts.keys.micro_batch_size} sample{'s' * (facts.keys.micro_batch_size != 1)}"
    yield (
        f"step         {ranks}{layout}{facts.micro_batches} micro batch{'es' * (facts.micro_batches != 1)} of {samples}"
        f"{' per process' * (facts.ranks > 1)}, {facts.precision.name}{', as CUDA graphs' * facts.is_recorded}"
    )
    for stack, again, recompute in zip(facts.stacks, made_again(facts), saved_by_recomputation(facts), strict=True):
        cross = f", cross {stack.cross_attention.backend}" if stack.cross_attention else ""
        how = "compiled" if stack.compiled else "as written"
        saves = (recompute.description if recompute else "") or "nothing"
        yield (
            f"{stack.name or 'layers':<12} {stack.stack.num_layers} of {stack.length:,} tokens, {how}, attention "
            f"{stack.attention.backend}{cross}; recomputes {saves}{_offloaded(stack, again)}"
        )
    yield ""
    yield f"memory       {gib(plan.allocated)} allocated at the peak: {plan.memory.peak.where}"
    for name, size in categories(plan):
        if size >= _LEAST_SHOWN:
            yield f"  {name:<26} {size / GIB:>9,.2f} GiB"
    parts = ", ".join(f"{name} {size / GIB:,.2f}" for name, size in activation_parts(plan) if size >= _LEAST_SHOWN)
    yield f"  layers keep, in GiB: {parts}" if parts else "  layers keep nothing worth telling"
    yield f"  {_where_else(plan)}"
    yield (
        f"  {gib(plan.reserved)} reserved by the allocator, {gib(plan.needed)} with the CUDA context ({gib(CONTEXT)})"
    )
    if plan.on_host:
        yield f"  {gib(plan.on_host)} in host memory{' for each process' * (facts.ranks > 1)}"
    if plan.fits is not None and plan.available is not None:
        left = plan.available - plan.needed
        yield f"  fits, with {gib(left)} left" if left >= 0 else f"  does not fit: {gib(-left)} too much"
    if plan.short_of_host:
        yield f"  does not fit: {gib(plan.short_of_host)} more in host memory than there is"
    yield ""
    yield from _time_lines(plan)
    if changes:
        yield ""
        yield "to need less" if plan.fits else "to fit"
        yield from change_lines(plan, changes, given)
        if plan.fits is False and not any(change.plan.fits for change in changes):
            yield "  none of these is enough alone; `stoker plan --fit` with the same keys looks for several together"
    if target.card is not None and not target.card.measured and plan.time is not None:
        yield ""
        yield "the speeds of this card are those of the H100 in the same part of its peak, not measured"


def _offloaded(stack: StackFacts, again: frozenset[RecomputeModule]) -> str:
    """What a stack keeps in host memory, and what it makes again so that it need not be moved."""
    what = _on_host(stack)
    instead = f", which make {named(again)} again" if again else ""
    return f"; {what} on the host{instead}" if what else ""


def _on_host(stack: StackFacts) -> str:
    offload = stack.stack.offload
    if offload is None or stack.attention.call.device != "cuda":
        return ""
    what = " and ".join(name for name in ("activations", "weights") if getattr(offload, name))
    return f"{what} of {counted(offload.layers, 'layer')}"


def change_lines(plan: Plan, changes: Sequence[Change], given: Given = NOTHING_GIVEN) -> Iterator[str]:
    """Changes with their effect, one line each: what is needed of the device, then overrides and what they replace."""
    for change in changes:
        more = change.plan.needed - plan.needed
        told = [f"{'+' if more > 0 else '-'}{gib(abs(more))}"]
        if plan.time and change.plan.time:
            told.append(f"step {100 * (change.plan.seconds / plan.seconds - 1):+.0f} %")
        if change.plan.on_host:
            told.append(f"{gib(change.plan.on_host)} on the host")
        if change.plan.fits is False:
            told.append("does not fit yet")
        replaced = change.replaced(given)
        instead = f"  (instead of {' '.join(replaced)})" if replaced else ""
        yield f"  {gib(change.plan.needed)} ({', '.join(told)})  {' '.join(change.overrides(given))}{instead}"


def _where_else(plan: Plan) -> str:
    """The highest moment of each kind."""
    kinds: dict[str, Moment] = {}
    for moment in plan.memory.moments:
        kind = "a layer, backward" if moment.where.startswith("layer") else moment.where
        if kind not in kinds or moment.total > kinds[kind].total:
            kinds[kind] = moment
    told = ", ".join(f"{kind} {(plan.memory.held.total + moment.total) / GIB:,.1f}" for kind, moment in kinds.items())
    return f"by moment, in GiB: {told}"


def _time_lines(plan: Plan) -> Iterator[str]:
    time = plan.time
    if time is None:
        wide = plan.facts.widths.compute != 2
        yield f"time         not known: there is no figure of this device's speed{' in this precision' * wide}"
        return
    again = f" and {time.recomputed_flops / 1e12:,.1f} recomputed" if time.recomputed_flops else ""
    yield (
        f"time         about {_seconds(time.seconds)} a step, {time.tokens_per_second:,.0f} tokens/s, MFU "
        f"{100 * time.mfu:.0f} %: {time.model_flops / 1e12:,.1f} TFLOP{again}"
    )
    for name, seconds in time.parts.items():
        if seconds >= time.seconds / 1000:
            yield f"  {name:<26} {seconds * 1e3:>9,.1f} ms"
    yield from (f"  {line}" for line in _idle_card(plan))
    if time.sent:
        card = plan.facts.target.card
        assert card is not None
        yield (
            f"  {gib(time.sent)} a step to the host and back, {1e3 * time.sent / card.host_link:,.0f} ms each way at "
            f"{card.host_link / 1e9:,.0f} GB/s"
        )


def _idle_card(plan: Plan) -> Iterator[str]:
    """What to do about a card that waits for the host, where something can be done."""
    facts, time = plan.facts, plan.time
    assert time is not None
    waiting = time.parts["waiting for the host"]
    if facts.can_be_recorded and not facts.is_recorded and waiting > LEAST_WAITING * time.seconds:
        yield (
            f"the host launches this model's kernels more slowly than the card runs them: model.enable_cuda_graph=null "
            f"would take about {_seconds(time.seconds - waiting)} a step"
        )


def _device(plan: Plan) -> str:
    target = plan.facts.target
    name = target.card.name if target.card else target.device
    return name if plan.available is None else f"{name}, {gib(plan.available)}"


def _how_sure(plan: Plan) -> str:
    card = plan.facts.target.card
    return "" if card is None or card.measured else " (speeds of this card not measured)"


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.{0 if seconds >= 0.01 else 1}f} ms"


def as_document(plan: Plan, changes: Sequence[Change], given: Given = NOTHING_GIVEN) -> dict[str, Any]:
    """Everything as plain data; sizes in bytes, times in seconds."""
    facts, target = plan.facts, plan.facts.target
    return {
        "device": {
            "name": target.card.name if target.card else target.device,
            "memory": plan.available,
            "measured": target.card.measured if target.card else False,
        },
        "parameters": plan.parameters,
        "active_parameters": plan.active,
        "processes": facts.ranks,
        "micro_batches": facts.micro_batches,
        "precision": facts.precision.name,
        "compiled": facts.compiled,
        "attention": dict(_attention(facts)),
        "recomputes": {
            stack.name or "self": recompute.description if recompute else ""
            for stack, recompute in zip(facts.stacks, saved_by_recomputation(facts), strict=True)
        },
        "offloads": {stack.name or "self": _on_host(stack) for stack in facts.stacks},
        "memory": {
            "allocated": plan.allocated,
            "reserved": plan.reserved,
            "needed": plan.needed,
            "on_host": plan.on_host,
            "short_of_host": plan.short_of_host,
            "peak_at": plan.memory.peak.where,
            "at_peak": dict(categories(plan)),
            "layers_keep": dict(activation_parts(plan)),
            "moments": {moment.where: plan.memory.held.total + moment.total for moment in plan.memory.moments},
        },
        "fits": plan.fits,
        "time": None
        if plan.time is None
        else {
            **asdict(plan.time),
            "tokens_per_second": plan.time.tokens_per_second,
            "mfu": plan.time.mfu,
        },
        "changes": [change_document(change, given) for change in changes],
    }


def _attention(facts: RunFacts) -> Iterator[tuple[str, str]]:
    for stack in facts.stacks:
        yield stack.name or "self", stack.attention.backend
        if stack.cross_attention is not None:
            yield "cross", stack.cross_attention.backend


def change_document(change: Change, given: Given = NOTHING_GIVEN) -> dict[str, Any]:
    """A change as plain data."""
    return {
        "overrides": change.overrides(given),
        "instead_of": change.replaced(given),
        "allocated": change.plan.allocated,
        "needed": change.plan.needed,
        "on_host": change.plan.on_host,
        "short_of_host": change.plan.short_of_host,
        "fits": change.plan.fits,
        "seconds": change.plan.time.seconds if change.plan.time else None,
    }
