"""Log lines that describe a run: model, data and settings at its start, offloading traffic at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ...models.build import LanguageModel
from ...models.config.families import keys_by_stack
from ...models.config.memory import join_module_names
from ...models.config.peft import FROZEN_SCHEMES
from ...models.fp8 import fp8_modules
from ...models.layer_graphs import WARM_UP_MICRO_BATCHES
from ...models.model_cost import count_parameters
from ...models.parallel.schedule import bubble_fraction
from ...models.parallel.stages import PipelineSplit
from ...models.recompute.analysis import ineffective_recompute_messages, memory_saving_recompute, recomputed_for_offload
from ..config.captured_layers import captures_layers
from ..config.resolved_run import ResolvedRun
from ..data.build_datasets import Data
from ..device.choose_device import device_name
from ..optim.base_optimizer import Optimizer
from ..plan.trainable_count import count_trainable
from ..utils.text import pluralize

_OPTIMIZER_KEY, _EMA_KEY = "model.cpu_offloading_optimizer", "exp_manager.ema.cpu_offload"


def summarize_run(
    run: ResolvedRun, model: LanguageModel, data: Data, device: torch.device, *, cuda_graph: bool
) -> Iterator[str]:
    """Yield the log lines at the start of a run: device, data, model, attention, recomputation, offloading, steps."""
    keys, form, layout, mesh = run.model, run.batch_spec, run.layout, run.mesh
    yield f"device {device_name(device)}, {run.precision.name}"
    if layout is not None or mesh.world_size > 1:
        processes = pluralize(mesh.world_size, "process", "processes")
        axes = f" ({mesh.description})" if mesh.data < mesh.world_size else ""
        yield processes + axes + (f", {layout.name}: {layout.description}" if layout else "")
    if run.pipeline is not None:
        yield _describe_pipeline(run, run.pipeline)
    yield f"data {data.description}"
    stacks = keys_by_stack(keys)
    *others, last = (stack.num_layers for stack in stacks.values())
    layers = " and ".join([*map(str, others), pluralize(last, "layer")])
    width = next(iter(stacks.values())).hidden_size
    active = count_parameters(keys, data.vocab_size, form, active=True)
    total = count_parameters(keys, data.vocab_size, form)
    active_text = f" ({active:,} for each token)" if active < total else ""
    yield f"model {total:,} parameters{active_text}, {layers}, hidden size {width}"
    if keys.peft.is_on:
        counts = count_trainable(keys, data.vocab_size, form)  # of all ranks
        share = 100 * counts.trainable / counts.total
        yield (
            f"{keys.peft.peft_scheme}: {counts.trainable:,} parameters are trained ({share:.2g} % of all), the others "
            "frozen"
        )
    described, peft = run.family, run.peft
    for at, stack in zip(stacks, described.stacks, strict=True):
        if (moe := stack.moe) is not None:
            yield (
                f"experts {f'of the {at[:-1]} ' if at else ''}{moe.experts}, {moe.topk} for each token, in "
                f"{sum(moe.layers)} of {pluralize(stack.num_layers, 'layer')}; balancing {moe.balancing}"
                f"{f' times {moe.aux_loss:g}' if moe.balancing == 'aux_loss' else ''}"
            )
    attention = ", ".join(
        f"{kind} {decision.backend}{' (packed)' * decision.call.packed}"
        for kind, decision in model.attention_decisions.items()
    )
    yield f"attention {attention} (reasons in run.log)"
    yield f"layers {'compiled' if model.compiled else 'not compiled'}: {model.compile_reason}"
    yield from describe_fp8(run, model, device)
    saving = memory_saving_recompute(described, model.attention_decisions, peft, compiled=model.compiled)
    counts = [stack.num_layers for stack in described.stacks]
    for index, (at, recompute) in enumerate(zip(stacks, saving, strict=True)):
        most = run.pipeline and run.pipeline.most_layers(index, counts)
        text = recompute and (recompute.describe_stages(most) if most else recompute.description)
        if text:
            yield f"recompute {f'in the {at[:-1]}: ' if at else ''}{text}"
    for note in ineffective_recompute_messages(described, model.attention_decisions, peft, compiled=model.compiled):
        yield f"warning: {note}"
    yield from describe_offload(run, model, device)
    if cuda_graph:
        captured = "layers run as CUDA graphs"
        if not captures_layers(keys, mesh.world_size):
            captured = "micro batches run as a CUDA graph"
        begins = "from the first step after" if run.pipeline else "after"
        yield f"{captured} {begins} {WARM_UP_MICRO_BATCHES} warm-up micro batches"
    epochs = "" if run.trainer.max_epochs is None else f" ({pluralize(run.trainer.max_epochs, 'epoch')})"
    ramp_up = (
        f", after a ramp-up from {pluralize(keys.rampup_batch_size[0], 'sample')}" if keys.rampup_batch_size else ""
    )
    yield (
        f"{pluralize(run.trainer.max_steps, 'step')}{epochs} of {pluralize(keys.global_batch_size, 'sample')} in "
        f"{pluralize(run.micro_batches, 'micro batch', 'micro batches')}{' per data-parallel rank' * (mesh.data > 1)}, "
        f"{keys.global_batch_size * (form.seq_length + form.decoder_seq_length):,} tokens each{ramp_up}"
    )
    if run.trainer.enable_model_summary:
        if mesh.model_ranks > 1 or mesh.expert > 1:
            yield "parameters of rank 0:"
        yield from module_table(model)


def describe_fp8(run: ResolvedRun, model: LanguageModel, device: torch.device) -> Iterator[str]:
    """Yield the line about linear layers, experts and attentions that multiply in fp8."""
    slices = [stack.fp8 for stack in run.family.stacks if stack.fp8 is not None]
    if not slices:
        return
    modules = fp8_modules(model).values()
    linear = sum(isinstance(module, nn.Linear) for module in modules)
    experts = f" and experts of {pluralize(len(modules) - linear, 'layer')}" if len(modules) > linear else ""
    cores = sum(getattr(module, "fp8_core", None) is not None for module in model.modules())
    number = (
        pluralize(linear, "linear layer") + experts + f" and attention of {pluralize(cores, 'layer')}" * (cores > 0)
    )
    of = (
        ""
        if all(all(each.layers) for each in slices)
        else f" of {pluralize(sum(sum(each.layers) for each in slices), 'layer')}"
    )
    how = ", emulated on a CPU, slowly" if device.type == "cpu" else ""
    when = "once" if run.model.peft.peft_scheme in FROZEN_SCHEMES else "once a step"
    casts = f"; weights are cast {when}" if run.keeps_fp8_casts else ""
    unasked = run.model.fp8_recipe is None and slices[0].recipe.scaling == "tensorwise"
    nemo = " (delayed scaling, NeMo's default, needs `transformer_engine: True`)" if unasked else ""
    recipe = f"{slices[0].description}{nemo}"
    if device.type != "cpu" and slices[0].uses_transformer_engine:
        how = ", through TransformerEngine"
    elif slices[0].transformer_engine and device.type != "cpu":
        how = f", by own kernels: {slices[0].why_own_kernels}"
    yield f"fp8 in training: {recipe}, {number}{of}{how}{casts}; validation multiplies in {run.precision.compute}"
    for reason in sorted({stack.why_experts_without_fp8 for stack in run.family.stacks} - {""}):
        yield f"experts multiply in {run.precision.compute}: {reason}"


def _describe_pipeline(run: ResolvedRun, split: PipelineSplit) -> str:
    """Return the line about the stages and the schedule of a pipeline."""
    stages, batches = split.stages(*(stack.num_layers for stack in run.family.stacks)), run.micro_batches
    layers = " + ".join(str(len(stage.layers)) for stage in stages)
    several = f", {split.chunks} on each rank" if split.chunks > 1 else ""
    bubble = 100 * bubble_fraction(split.ranks, split.chunks, batches)
    return f"pipeline of {len(stages)} stages{several}: {layers} layers; bubble {bubble:.0f} % if all take as long"


def module_table(model: nn.Module) -> Iterator[str]:
    """Yield a table of the modules of a model with their parameters, of which shared ones count in the first only."""
    parts = [(name, type(part).__name__, part.parameters()) for name, part in model.named_children()]
    parts.append(("(model)", type(model).__name__, model.parameters(recurse=False)))
    seen: set[nn.Parameter] = set()
    rows: list[tuple[str, str, int, int]] = []
    for name, kind, parameters in parts:
        new = set(parameters) - seen
        seen |= new
        trained = sum(parameter.numel() for parameter in new if parameter.requires_grad)
        if new or name != "(model)":
            rows.append((name, kind, trained, sum(parameter.numel() for parameter in new)))
    rows.append(("total", "", sum(row[2] for row in rows), sum(row[3] for row in rows)))
    frozen = rows[-1][2] < rows[-1][3]
    yield f"  {'module':<24} {'type':<20} " + f"{'trainable':>15} " * frozen + f"{'parameters':>15}"
    for name, kind, trained, total in rows:
        yield f"  {name:<24} {kind:<20} " + f"{trained:>15,} " * frozen + f"{total:>15,}"


def host_offload_keys(run: ResolvedRun) -> tuple[str, ...]:
    """Return the keys of a run that move tensors to host memory."""
    stacks = zip(keys_by_stack(run.model), run.family.stacks, strict=True)
    keys = [f"model.{at}cpu_offloading" for at, part in stacks if part.offload is not None]
    keys += [_OPTIMIZER_KEY] * run.model.cpu_offloading_optimizer
    keys += [_EMA_KEY] * (run.exp_manager.ema.enable and run.exp_manager.ema.cpu_offload)
    return tuple(keys)


def no_effect_on_host(keys: Sequence[str], device_type: str = "") -> str:
    """Return the clause that the keys have no effect on a device which uses host memory."""
    names = " and ".join(f"`{key}` (True)" for key in keys)
    on = f" on {device_type}, which uses host memory ({' '.join(f'~{key}' for key in keys)})" if device_type else ""
    return f"{names} {'has' if len(keys) == 1 else 'have'} no effect{on}"


def describe_offload(run: ResolvedRun, model: LanguageModel, device: torch.device) -> Iterator[str]:
    """Yield a line for each stack with `cpu_offloading`."""
    recomputed = recomputed_for_offload(run.family, model.attention_decisions, run.peft, compiled=model.compiled)
    rows = zip(keys_by_stack(run.model), run.family.stacks, model.stacks, recomputed, strict=True)
    for at, part, stack, modules in rows:
        offload = part.offload
        if offload is None:
            continue
        of_stack = f" of the {at[:-1]}" if at else ""
        if stack.activation_offload is None and stack.weight_offload is None:
            if run.trainer.accelerator == "auto":  # else a configuration rule has warned already
                yield f"warning: {no_effect_on_host([f'model.{at}cpu_offloading'], device.type)}"
            continue
        tensors: list[str] = []
        if stack.activation_offload is not None:
            tensors.append("activations")
        if stack.weight_offload is not None:
            moved = stack.weight_offload.sent_bytes / 2**30
            tensors.append(f"weights ({moved:,.2f} GiB to host memory and back per micro batch)")
        layers = f"{pluralize(offload.layers, 'layer')}{of_stack}"
        instead = f"; recomputed instead of offloaded: {join_module_names(modules)}" if modules else ""
        yield f"CPU offloading of the first {layers}: {' and '.join(tensors)}{instead}"


def describe_offload_traffic(model: LanguageModel) -> Iterator[str]:
    """Yield the line after training with the bytes `cpu_offloading` moved per micro batch and the host memory used."""
    stacks = model.stacks
    offloads = [part for stack in stacks for part in (stack.activation_offload, stack.weight_offload) if part]
    if offloads:
        moved = sum(part.sent_bytes for part in offloads) / 2**30
        held = max(part.copies.host_bytes for part in offloads) / 2**30  # they share a pool
        yield (
            f"CPU offloading moved {moved:,.2f} GiB to host memory and back per micro batch, and used {held:,.2f} GiB "
            "of host memory"
        )


def describe_optimizer_offload(run: ResolvedRun, optimizer: Optimizer, device: torch.device) -> Iterator[str]:
    """Yield lines about `model.cpu_offloading_optimizer` and `exp_manager.ema.cpu_offload`, if they are set."""
    ema = run.exp_manager.ema
    if ema.enable and ema.cpu_offload and device.type != "cuda":
        yield f"warning: {no_effect_on_host([_EMA_KEY], device.type)}"
    if not run.model.cpu_offloading_optimizer:
        return
    host = optimizer.host_state
    if host is None:
        if run.trainer.accelerator == "auto":  # else a configuration rule has warned already
            yield f"warning: {no_effect_on_host([_OPTIMIZER_KEY], device.type)}"
        return
    held, moved, slots = (
        f"{size / 2**30:,.2f} GiB" for size in (host.plan.host_bytes, host.plan.moved_bytes, sum(host.plan.slot_bytes))
    )
    yield (
        f"optimizer state in host memory, {held}: each step moves {moved} to the device and back, through {slots} of "
        "device buffers"
    )
