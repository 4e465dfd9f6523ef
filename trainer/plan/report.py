"""Format a plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from ...models.config.memory import RecomputeModule, join_module_names
from ...models.layers.cost import StackInputs
from ..config.captured_layers import captures_layers
from ..config.schema.root import RootBlock
from ..utils.text import format_gib, pluralize
from .data_exchange import exchange_of
from .hardware import GIB
from .pipeline_report import pipeline_document, pipeline_lines
from .run_inputs import RunInputs
from .run_plan import Plan, effective_recompute, offload_recompute
from .search import NO_OVERRIDES, Change, CurrentOverrides, suggest_changes
from .state_memory import CUDA_CONTEXT_BYTES
from .timeline import Moment
from .traffic import AxisTraffic

_LABELS = {
    "average of the weights": "EMA of the weights",
    "sums of gradients": "gradient accumulators",
    "activations made again": "recomputed activations",
    "matrix products": "matmuls",
    "starting kernels": "kernel launches",
    "copies not hidden": "exposed offload copies",
    "messages": "communication",
    "stream": "residual stream",
}
"""Labels in the text report for names of the JSON document, where they differ."""
_MIN_SHOWN = GIB // 200
_MIN_WAITING = 0.1
"""Fraction of the step spent waiting for the host above which CUDA graphs are recommended."""


def memory_categories(plan: Plan) -> list[tuple[str, int]]:
    """Return (name, bytes) of each kind of memory at the peak; their sum is the peak."""
    held, peak = plan.memory.persistent, plan.memory.peak
    return [
        ("weights", held.weights - peak.offloaded_weights),
        ("main weights", held.main_weights),
        ("optimizer state", held.optimizer),
        ("average of the weights", held.ema),
        ("sums of gradients", held.gradient_sums),
        ("tables and masks", held.tables),
        ("batches", held.batches),
        ("library workspace", held.workspace),
        ("gradients", peak.gradients + peak.sums),
        ("activations", peak.activations),
        ("activations made again", peak.recomputed),
        ("logits and the loss", peak.logits),
        ("working memory", peak.working),
    ]


def _activation_parts(plan: Plan) -> list[tuple[str, int]]:
    """Return (part, bytes) of what layers save for the backward pass, on the device or on the host; largest first."""
    found: dict[str, int] = {}
    for layer in plan.memory.layers:
        if layer.skips_backward:
            continue
        own = layer.saved_bytes
        if not layer.is_recomputed:
            modules = layer.recomputed_modules
            for part in layer.memory.saved:
                if not part.is_recomputed(modules):
                    found[part.part] = found.get(part.part, 0) + part.num_bytes
                    own -= part.num_bytes
            for part, size in zip(("attention", "mlp"), layer.memory.recompute_inputs(modules), strict=True):
                found[part] = found.get(part, 0) + size
                own -= size
        found["layer inputs"] = found.get("layer inputs", 0) + own
    return sorted(found.items(), key=lambda item: -item[1])


def summary_lines(plan: Plan) -> list[str]:
    """Return a few lines for the log at the start of a run."""
    device = plan.inputs.target
    if device.device != "cuda":
        return [
            f"plan: {format_gib(plan.memory.persistent.total)} of weights and optimizer state; with gradients "
            "and activations "
            f"about {format_gib(plan.allocated)}"
        ]
    largest = sorted(memory_categories(plan), key=lambda item: -item[1])[:4]
    parts = ", ".join(f"{_LABELS.get(name, name)} {format_gib(size)}" for name, size in largest if size >= _MIN_SHOWN)
    lines = [f"plan: {format_gib(plan.allocated)} at the peak ({plan.peak_at}): {parts}"]
    if plan.available is not None:
        if plan.needed <= plan.available:
            lines[0] += f"; {format_gib(plan.available - plan.needed)} left of {format_gib(plan.available)}"
        else:
            lines.append(
                f"warning: plan: needs {format_gib(plan.needed)} including allocator overhead and the CUDA context, of "
                f"{format_gib(plan.available)}; `stoker plan --fit` with the same keys searches for settings that fit"
            )
    if plan.time is not None:
        time = plan.time
        recomputed = f", {time.recomputed_flops / 1e12:,.1f} of them recomputed" if time.recomputed_flops else ""
        lines.append(
            f"plan: {(time.model_flops + time.recomputed_flops) / 1e12:,.1f} TFLOP per step{recomputed}, about "
            f"{_seconds(time.seconds)}, {time.tokens_per_second:,.0f} tokens/s{_not_measured(plan)}"
        )
        lines += [f"plan: {line}" for line in _cuda_graph_advice(plan)]
    exchange = exchange_of(plan.inputs)
    if exchange is not None:
        lines.append(f"plan: weights and gradients {exchange}")
    if plan.on_host:
        lines.append(f"plan: {format_gib(plan.on_host)} of host memory per process")
    if plan.missing_host_memory:
        lines.append(f"warning: plan: {format_gib(plan.missing_host_memory)} more host memory is needed than available")
    return lines


def measured_line(plan: Plan, allocated: int, reserved: int) -> str:
    """Return a line that compares the plan of the first rank with `torch.cuda.max_memory_allocated` and
    `max_memory_reserved`.
    """

    def compare(measured: int, planned: int) -> str:
        return f"{format_gib(measured)} (planned {format_gib(planned)}, {100 * (planned / measured - 1):+.1f} %)"

    return (
        f"memory at the peak: allocated {compare(allocated, plan.ranks[0].allocated)}, "
        f"reserved {compare(reserved, plan.ranks[0].reserved)}"
    )


def report_lines(plan: Plan, changes: Sequence[Change], given: CurrentOverrides = NO_OVERRIDES) -> Iterator[str]:
    """Yield the lines of the full text report, with suggested `changes` of keys as overrides of the `given` ones."""
    yield from _run_lines(plan)
    yield ""
    if len(plan.ranks) > 1:
        yield from pipeline_lines(plan)
        yield ""
    yield from _memory_lines(plan)
    yield ""
    yield from _time_lines(plan)
    if plan.time is not None and plan.time.traffic:
        yield ""
        rank = f"of pipeline rank {plan.time.rank} per step" if len(plan.ranks) > 1 else "of each process per step"
        yield from _traffic_lines(plan.time.traffic, rank)
    if changes:
        yield ""
        yield "changes that need less memory" if plan.fits else "changes that could make it fit"
        yield from change_lines(plan, changes, given)
        if plan.fits is False and not any(change.plan.fits for change in changes):
            yield "  no single change is enough; `stoker plan --fit` with the same keys searches combinations"
    gpu = plan.inputs.target.gpu
    if gpu is not None and plan.time is not None and (gpu.bench or not gpu.measured):
        yield ""
        yield (
            f"rates as `stoker bench` measured them: {gpu.bench}"
            if gpu.bench
            else "the efficiencies of this GPU are not measured; those of the H100 are used"
        )


def _run_lines(plan: Plan) -> Iterator[str]:
    """Describe model, device, step and stacks."""
    run = plan.inputs
    active = (
        f", {plan.num_active_parameters:,} active per token" if plan.num_active_parameters < plan.num_parameters else ""
    )
    yield f"model        {plan.num_parameters:,} parameters{active}"
    yield f"device       {_device(plan)}"
    axes = f" ({run.mesh.description})" if run.mesh.data < run.ranks else ""
    ranks = f"{run.ranks} processes{axes}, " if run.ranks > 1 else ""
    per_rank = (" per data-parallel rank" if axes else " per process") if run.mesh.data > 1 else ""
    layout = f"{run.layout.name}, " if run.layout else ""
    yield (
        f"step         {ranks}{layout}{pluralize(run.micro_batches, 'micro batch', 'micro batches')} of "
        f"{pluralize(run.model_config.micro_batch_size, 'sample')}"
        f"{per_rank}, {run.precision.name}{_fp8(run)}{_cuda_graphs(run)}"
    )
    exchange = exchange_of(run)
    if exchange is not None:
        yield f"exchange     weights and gradients {exchange}"
    counts, split = [stack.stack.num_layers for stack in run.stacks], run.run.pipeline
    rows = zip(run.stacks, offload_recompute(run), effective_recompute(run), strict=True)
    for index, (stack, modules, recompute) in enumerate(rows):
        cross = f", cross {stack.cross_attention.backend}" if stack.cross_attention else ""
        mode = "compiled" if stack.compiled else "eager"
        most = split and split.most_layers(index, counts)
        text = recompute and (recompute.describe_stages(most) if most else recompute.description)
        yield (
            f"{stack.name or 'layers':<12} {stack.stack.num_layers} of {stack.length:,} tokens, {mode}, attention "
            f"{stack.attention.backend}{cross}; recomputes {text or 'nothing'}{_offloaded(stack, modules)}"
        )


def _fp8(run: RunInputs) -> str:
    """Return the recipe of fp8, in attention and experts too or not, and the number of layers; empty without."""
    slices = [stack.stack.fp8 for stack in run.stacks if stack.stack.fp8 is not None]
    if not slices:
        return ""
    layers, of = sum(sum(each.layers) for each in slices), sum(stack.stack.num_layers for stack in run.stacks)
    through = ", TransformerEngine" if run.target.device != "cpu" and slices[0].uses_transformer_engine else ""
    through += ", with attention" * any(each.attention for each in slices)
    without = " without their experts" * any(stack.stack.why_experts_without_fp8 for stack in run.stacks)
    return f", fp8 ({slices[0].description}{through}) in {layers} of {pluralize(of, 'layer')}{without}"


def _memory_lines(plan: Plan) -> Iterator[str]:
    """Describe the memory at the peak, by kind and by moment, and whether it fits."""
    yield f"memory       {format_gib(plan.allocated)} allocated at the peak: {plan.peak_at}"
    for name, size in memory_categories(plan):
        if size >= _MIN_SHOWN:
            yield f"  {_LABELS.get(name, name):<26} {size / GIB:>9,.2f} GiB"
    saved = [(_LABELS.get(name, name), size) for name, size in _activation_parts(plan) if size >= _MIN_SHOWN]
    parts = ", ".join(f"{name} {size / GIB:,.2f}" for name, size in saved)
    each = " for each micro batch" * (len(plan.ranks) > 1)
    yield f"  saved by layers{each}, in GiB: {parts}" if parts else f"  layers save less than {format_gib(_MIN_SHOWN)}"
    yield f"  {_by_moment(plan)}"
    yield (
        f"  {format_gib(plan.reserved)} reserved by the allocator, {format_gib(plan.needed)} with the CUDA "
        f"context ({format_gib(CUDA_CONTEXT_BYTES)}){_symmetric(plan)}"
    )
    if plan.on_host:
        yield f"  {format_gib(plan.on_host)} of host memory{' per process' * (plan.inputs.ranks > 1)}"
    if plan.fits is not None and plan.available is not None:
        left = plan.available - plan.needed
        yield f"  fits, with {format_gib(left)} left" if left >= 0 else f"  does not fit: {format_gib(-left)} too much"
    if plan.missing_host_memory:
        yield f"  does not fit: {format_gib(plan.missing_host_memory)} more host memory is needed than available"


def _symmetric(plan: Plan) -> str:
    held = plan.memory.persistent
    found = (("NCCL's communicators", held.nccl), ("memory that other processes write", held.symmetric))
    return "".join(f", {name} ({format_gib(size)})" for name, size in found if size)


def _offloaded(stack: StackInputs, recomputed: frozenset[RecomputeModule]) -> str:
    """Describe what a stack offloads, and which modules it recomputes to avoid copies."""
    what = _on_host(stack)
    instead = f", which recompute {join_module_names(recomputed)}" if recomputed else ""
    return f"; {what} on the host{instead}" if what else ""


def _on_host(stack: StackInputs) -> str:
    offload = stack.stack.offload
    if offload is None or stack.attention.call.device != "cuda":
        return ""
    what = " and ".join(name for name in ("activations", "weights") if getattr(offload, name))
    return f"{what} of {pluralize(offload.layers, 'layer')}"


def change_lines(plan: Plan, changes: Sequence[Change], given: CurrentOverrides = NO_OVERRIDES) -> Iterator[str]:
    """Yield one line for each change: memory needed, effects, overrides and the words they replace."""
    for change in changes:
        more = change.plan.needed - plan.needed
        effects = [f"{'+' if more > 0 else '-'}{format_gib(abs(more))}"]
        if plan.time and change.plan.time:
            effects.append(f"step {100 * (change.plan.seconds / plan.seconds - 1):+.0f} %")
        if change.plan.on_host:
            effects.append(f"{format_gib(change.plan.on_host)} on the host")
        if change.plan.fits is False:
            effects.append("does not fit yet")
        replaced = change.replaced(given)
        instead = f"  (instead of {' '.join(replaced)})" if replaced else ""
        yield f"  {format_gib(change.plan.needed)} ({', '.join(effects)})  {' '.join(change.overrides(given))}{instead}"


def layout_lines(
    changes: Sequence[Change], gpus: int, machines: Sequence[str], given: CurrentOverrides, limit: int = 5
) -> Iterator[str]:
    """Yield the lines of the layouts of `gpus` GPUs that fit, fastest first: time, memory and overrides."""
    if not changes:
        yield f"no layout of {pluralize(gpus, 'GPU')} fits, with any mode of recomputation and offloading"
        return
    yield f"the fastest of {pluralize(len(changes), 'layout')} of {pluralize(gpus, 'GPU')} that fit:"
    for change in changes[:limit]:
        time, mesh = change.plan.time, change.plan.inputs.mesh
        speed = f"{_seconds(time.seconds)}, MFU {100 * time.mfu:.0f} %, " if time else ""
        layout = f", {change.plan.inputs.layout.name}" if change.plan.inputs.layout else ""
        yield f"  {speed}{format_gib(change.plan.needed)}: {mesh.description}{layout}"
        replaced = change.replaced(given)
        instead = f"  (instead of {' '.join(replaced)})" if replaced else ""
        yield f"    {' '.join([*machines, *change.overrides(given)])}{instead}"


def layout_document(change: Change, machines: Sequence[str], given: CurrentOverrides) -> dict[str, Any]:
    """Return a layout as a JSON document."""
    document = change_document(change, given)
    return document | {"overrides": [*machines, *document["overrides"]], "mesh": asdict(change.plan.inputs.mesh)}


def out_of_memory_lines(root: RootBlock, plan: Plan | None) -> list[str]:
    """Return lines that list the keys that lower the memory of a run that failed, and by how much."""
    if plan is None or plan.inputs.target.device != "cuda":
        return ["use a smaller model.micro_batch_size, shorter samples or a smaller model"]
    lines = [f"the plan estimated {format_gib(plan.needed)} of {format_gib(plan.available or 0)} device memory"]
    if plan.inputs.uses_cuda_graph:
        lines.append(
            "CUDA graphs use a memory pool of their own, not shared with other tensors; "
            "`model.enable_cuda_graph=False` frees it"
        )
    changes = suggest_changes(root, plan.inputs.target, plan)
    if not changes:
        return [*lines, "use shorter samples or a smaller model"]
    return [*lines, "changes that need less memory:", *change_lines(plan, changes)]


def _by_moment(plan: Plan) -> str:
    """List the memory at each kind of moment: the loss, the highest layer, the embeddings, the update."""
    kinds: dict[str, Moment] = {}
    for moment in plan.memory.moments:
        kind = "a layer, backward" if moment.where.startswith("layer") else moment.where
        if kind not in kinds or moment.total > kinds[kind].total:
            kinds[kind] = moment
    sizes = ", ".join(
        f"{kind} {(plan.memory.persistent.total + moment.total) / GIB:,.1f}" for kind, moment in kinds.items()
    )
    return f"by moment, in GiB: {sizes}"


def _time_lines(plan: Plan) -> Iterator[str]:
    time = plan.time
    if time is None:
        other_precision = plan.inputs.widths.compute != 2
        yield f"time         not known: no peak is known for this device{' in this precision' * other_precision}"
        return
    recomputed = f" and {time.recomputed_flops / 1e12:,.1f} recomputed" if time.recomputed_flops else ""
    yield (
        f"time         about {_seconds(time.seconds)} per step, {time.tokens_per_second:,.0f} tokens/s, MFU "
        f"{100 * time.mfu:.0f} %: {time.model_flops / 1e12:,.1f} TFLOP{recomputed}"
    )
    for name, seconds in time.parts.items():
        if seconds >= time.seconds / 1000:
            yield f"  {_LABELS.get(name, name):<26} {seconds * 1e3:>9,.1f} ms"
    yield from (f"  {line}" for line in _cuda_graph_advice(plan))
    if time.sent:
        gpu = plan.inputs.target.gpu
        assert gpu is not None
        yield (
            f"  {format_gib(time.sent)} per step to the host and back, {1e3 * time.sent / gpu.host_link:,.0f} "
            "ms each way at "
            f"{gpu.host_link / 1e9:,.0f} GB/s"
        )


def _traffic_lines(traffic: Sequence[AxisTraffic], of: str) -> Iterator[str]:
    """Describe what a rank sends to others per step: on which axis, to how many, in which collectives, over what."""
    yield f"traffic      {of:<33} {'sent':>9}  link                  time   exposed"
    for each in traffic:
        link, name = each.link, f"{each.axis} ({pluralize(each.link.ranks, 'rank')})"
        name = "pipeline (to neighbours)" if each.axis == "pipeline" else name
        where = f"{link.name}, {link.bandwidth / 1e9:,.0f} GB/s"
        by = f", by {each.by}" if each.by else ""
        yield (
            f"  {name:<43} {each.sent / GIB:>6,.2f} GiB  {where:<18} {each.seconds * 1e3:>6,.1f} ms "
            f"{each.exposed * 1e3:>6,.1f} ms"
        )
        yield "    " + ", ".join(f"{kind} of {format_gib(size)}" for kind, size in each.collectives.items()) + by


def _cuda_graphs(run: RunInputs) -> str:
    if not run.uses_cuda_graph:
        return ""
    return ", layers as CUDA graphs" if captures_layers(run.model_config, run.ranks) else ", as CUDA graphs"


def _cuda_graph_advice(plan: Plan) -> Iterator[str]:
    """Recommend CUDA graphs if the GPU waits for kernel launches and graphs are supported."""
    run, time = plan.inputs, plan.time
    assert time is not None
    waiting = time.parts["waiting for the host"]
    if run.can_use_cuda_graph and not run.uses_cuda_graph and waiting > _MIN_WAITING * time.seconds:
        by_layer = captures_layers(run.model_config, run.ranks)
        yield (
            "the host launches kernels more slowly than the GPU runs them: with `model.enable_cuda_graph=null` a "
            f"step takes {'at least' if by_layer else 'about'} {_seconds(time.seconds - waiting)}"
        )


def _device(plan: Plan) -> str:
    name = plan.inputs.target.name
    return name if plan.available is None else f"{name}, {format_gib(plan.available)}"


def _not_measured(plan: Plan) -> str:
    gpu = plan.inputs.target.gpu
    if gpu is not None and gpu.bench:
        return f" (rates of {gpu.bench})"
    return "" if gpu is None or gpu.measured else " (efficiencies of this GPU not measured)"


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.{0 if seconds >= 0.01 else 1}f} ms"


def plan_document(plan: Plan, changes: Sequence[Change], given: CurrentOverrides = NO_OVERRIDES) -> dict[str, Any]:
    """Return the plan as a JSON document; sizes in bytes, times in seconds."""
    run, target = plan.inputs, plan.inputs.target
    exchange = exchange_of(run)
    return {
        "device": {
            "name": target.name,
            "memory": plan.available,
            "measured": target.gpu.measured if target.gpu else False,
            "bench": target.gpu.bench if target.gpu else "",
        },
        "parameters": plan.num_parameters,
        "active_parameters": plan.num_active_parameters,
        "processes": run.ranks,
        "mesh": asdict(run.mesh),
        "exchange": exchange and exchange._asdict(),
        "micro_batches": run.micro_batches,
        "precision": run.precision.name,
        "compiled": run.compiled,
        "attention": dict(_attention(run)),
        "recomputes": {
            stack.name or "self": recompute.description if recompute else ""
            for stack, recompute in zip(run.stacks, effective_recompute(run), strict=True)
        },
        "offloads": {stack.name or "self": _on_host(stack) for stack in run.stacks},
        "memory": {
            "allocated": plan.allocated,
            "reserved": plan.reserved,
            "needed": plan.needed,
            "symmetric": plan.memory.persistent.symmetric,
            "nccl": plan.memory.persistent.nccl,
            "on_host": plan.on_host,
            "short_of_host": plan.missing_host_memory,
            "peak_at": plan.peak_at,
            "at_peak": dict(memory_categories(plan)),
            "layers_keep": dict(_activation_parts(plan)),
            "moments": {moment.where: plan.memory.persistent.total + moment.total for moment in plan.memory.moments},
        },
        "fits": plan.fits,
        "time": None
        if plan.time is None
        else {
            **asdict(replace(plan.time, stages=())),
            "tokens_per_second": plan.time.tokens_per_second,
            "mfu": plan.time.mfu,
        },
        "pipeline": pipeline_document(plan) if len(plan.ranks) > 1 else None,
        "changes": [change_document(change, given) for change in changes],
    }


def _attention(run: RunInputs) -> Iterator[tuple[str, str]]:
    for stack in run.stacks:
        yield stack.name or "self", stack.attention.backend
        if stack.cross_attention is not None:
            yield "cross", stack.cross_attention.backend


def change_document(change: Change, given: CurrentOverrides = NO_OVERRIDES) -> dict[str, Any]:
    """Return a change as a JSON document."""
    return {
        "overrides": change.overrides(given),
        "instead_of": change.replaced(given),
        "allocated": change.plan.allocated,
        "needed": change.plan.needed,
        "on_host": change.plan.on_host,
        "short_of_host": change.plan.missing_host_memory,
        "fits": change.plan.fits,
        "seconds": change.plan.time.seconds if change.plan.time else None,
    }
