"""Static analysis of activation checkpointing: which modules are recomputed, use RNG, or save no memory.

Functions take the slice of a model, its attention backends by label, its PEFT scheme, and whether layers are compiled;
they return one result for each stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ...kernels.attention.backend_support import BACKENDS_BY_NAME
from ...kernels.attention.call_spec import AttentionCall
from ...kernels.attention.dispatch import BackendSelection
from ..config.families import FamilySlice
from ..config.memory import RecomputeModule, RecomputeSlice
from ..config.peft import LoRASlice, PeftSlice, peft_dropout
from ..config.stack import StackSlice
from ..config.t5 import T5Slice
from ..layers.mlp import is_fp8_function, saves_only_output
from ..peft.lora_mlp import is_lora_mlp_fused

_CHEAP_FIRST: tuple[RecomputeModule, ...] = ("norm", "mlp_activation", "core_attention", "moe")


def training_labels(model: FamilySlice) -> tuple[tuple[str, ...], ...]:
    """Return the labels of the training attention calls of each stack, self-attention first."""
    if isinstance(model, T5Slice):
        return ("encoder training",), ("decoder training", "cross training")
    return (("training",),)


def modules_with_rng(
    model: FamilySlice, decisions: Mapping[str, BackendSelection]
) -> tuple[frozenset[RecomputeModule], ...]:
    """Return the modules of each stack that draw from PyTorch's generator in training.

    This is attention with the dropout of a backend that is not ours, or not known; all other dropouts, and the jitter
    of routers, are functions of their keys (`kernels.dropout`).
    """
    found: list[frozenset[RecomputeModule]] = []
    for stack, labels in zip(model.stacks, training_labels(model), strict=True):
        chosen = [decisions[label] for label in labels if label in decisions]
        drawn = [bool(each.call.dropout) and not BACKENDS_BY_NAME[each.backend].keyed_dropout for each in chosen]
        draws = any(drawn) or (not chosen and bool(stack.attention.dropout))
        found.append(frozenset[RecomputeModule](("core_attention",) if draws else ()))
    return tuple(found)


def recompute_uses_rng(model: FamilySlice, decisions: Mapping[str, BackendSelection]) -> bool:
    """Return True if recomputed modules use the RNG, so that the generator state must be saved and restored."""
    recomputes = effective_recompute(model, decisions)
    return any(
        recompute is not None and bool(drawn if recompute.recomputes_layers else drawn & recompute.modules)
        for drawn, recompute in zip(modules_with_rng(model, decisions), recomputes, strict=True)
    )


def effective_recompute(
    model: FamilySlice, decisions: Mapping[str, BackendSelection]
) -> tuple[RecomputeSlice | None, ...]:
    """Return the effective recompute settings of each stack: without core attention if its backend saves no scores."""
    effective: list[RecomputeSlice | None] = []
    for stack, labels in zip(model.stacks, training_labels(model), strict=True):
        recompute = stack.recompute
        chosen = [decisions[label] for label in labels if label in decisions]
        if chosen and not any(decision.saves_scores for decision in chosen):
            recompute = _without(recompute, frozenset({"core_attention"}))
        effective.append(recompute)
    return tuple(effective)


def memory_saving_recompute(
    model: FamilySlice, decisions: Mapping[str, BackendSelection], peft: PeftSlice | None, *, compiled: bool
) -> tuple[RecomputeSlice | None, ...]:
    """Return the recompute settings that save memory: the effective ones without modules that save nothing anyway."""
    return tuple(
        _without(recompute, _idle(stack, decisions[labels[0]].call, peft, compiled=compiled))
        for stack, labels, recompute in zip(
            model.stacks, training_labels(model), effective_recompute(model, decisions), strict=True
        )
    )


def _without(recompute: RecomputeSlice | None, modules: frozenset[RecomputeModule]) -> RecomputeSlice | None:
    if recompute is None:
        return None
    others = recompute.modules - modules
    return replace(recompute, modules=others) if recompute.recomputes_layers or others else None


def activation_recompute_saves_nothing(stack: StackSlice, peft: PeftSlice | None, *, compiled: bool) -> bool:
    """Return True if recomputing the MLP activation only saves its input instead of its output, which is as large.

    Recompute does save memory in compiled layers, which otherwise save the mask of positive outputs too, and with
    dropout or a norm after the activation, whose outputs are otherwise saved too.
    """
    has_successor = stack.mlp.dropout or stack.block == "normformer" or peft_dropout(peft)
    return saves_only_output(stack.mlp) and not (compiled or has_successor)


def _is_in_fp8(stack: StackSlice, peft: PeftSlice | None) -> bool:
    """Return True if all layers of a dense stack multiply in fp8 and train their matrices."""
    return stack.fp8 is not None and all(stack.fp8.layers) and stack.moe is None and not isinstance(peft, LoRASlice)


def _idle(
    stack: StackSlice, call: AttentionCall, peft: PeftSlice | None, *, compiled: bool
) -> frozenset[RecomputeModule]:
    """Return modules whose recompute saves nothing: LoRA does not save their output, or as much is saved instead."""
    found: set[RecomputeModule] = set()
    if isinstance(peft, LoRASlice) and peft.can_skip_norm_output(stack):
        found.add("norm")
    if _is_in_fp8(stack, peft):
        if compiled and stack.fp8 is not None and stack.fp8.recipe.wgrad:
            found.add("norm")
        if is_fp8_function(stack, stack.mlp.ffn_hidden_size, compiled=compiled, split=stack.attention.split):
            found.add("mlp_activation")
    saves_nothing = activation_recompute_saves_nothing(stack, peft, compiled=compiled)
    if saves_nothing or is_lora_mlp_fused(peft, stack, call.device, call.dtype):
        found.add("mlp_activation")
    return frozenset(found)


def recomputed_for_offload(
    model: FamilySlice, decisions: Mapping[str, BackendSelection], peft: PeftSlice | None, *, compiled: bool
) -> tuple[frozenset[RecomputeModule], ...]:
    """Return the modules that offloaded layers of each stack recompute on a GPU, so that less is copied to the host."""
    found: list[frozenset[RecomputeModule]] = []
    for stack, labels in zip(model.stacks, training_labels(model), strict=True):
        chosen = [decisions[label] for label in labels if label in decisions]
        layers = range(stack.offload.layers if stack.offload is not None else 0)
        modules = frozenset[RecomputeModule]().union(
            *(stack.recomputed_modules(number, offloading=True) for number in layers)
        )
        if not any(decision.saves_scores for decision in chosen):
            modules -= {"core_attention"}
        if (
            compiled
            and isinstance(peft, LoRASlice)
            and peft.can_skip_norm_output(stack)
            and peft.updates_all_norm_consumers
        ):
            modules -= {"norm"}
        if chosen and is_lora_mlp_fused(peft, stack, chosen[0].call.device, chosen[0].call.dtype):
            modules -= {"mlp_activation"}
        found.append(modules)
    return tuple(found)


def ineffective_recompute_messages(
    model: FamilySlice, decisions: Mapping[str, BackendSelection], peft: PeftSlice | None, *, compiled: bool
) -> Iterator[str]:
    """Yield a message for each module whose recompute saves no memory: the reason, and an alternative."""
    saving = memory_saving_recompute(model, decisions, peft, compiled=compiled)
    blocks = [f"model.{labels[0].rpartition(' ')[0]}".rstrip(".") for labels in training_labels(model)]
    for stack, labels, effective, block in zip(model.stacks, training_labels(model), saving, blocks, strict=True):
        if stack.recompute is None:
            continue
        idle = _idle(stack, decisions[labels[0]].call, peft, compiled=compiled)
        suggested = _suggested_modules(stack, frozenset() if effective is None else effective.modules, idle)
        advice = f"; {block}.activations_checkpoint_modules=[{','.join(suggested)}] saves memory" if suggested else ""
        in_fp8 = _is_in_fp8(stack, peft)
        if "norm" in stack.recompute.modules & idle and in_fp8:
            yield (
                "recomputing norm has no effect in compiled layers that multiply in fp8: they save a cast of the norm "
                f"output, not the output{advice}"
            )
        elif "norm" in stack.recompute.modules & idle:
            yield (
                "recomputing norm has no effect in compiled layers where LoRA updates the projection after an RMSNorm: "
                f"they do not save the norm output{advice}"
            )
        if "mlp_activation" in stack.recompute.modules & idle and in_fp8 and stack.mlp.gated:
            yield (
                "recomputing mlp_activation has no effect in MLPs that are one function in fp8: they do not save the "
                f"activation output{advice}"
            )
        elif "mlp_activation" in stack.recompute.modules & idle and saves_only_output(stack.mlp):
            yield (
                "recomputing mlp_activation has no effect on memory in layers that are not compiled: the backward of "
                f"{stack.mlp.nonlinearity} needs only its output, and its input would be saved instead{advice}"
            )
        elif "mlp_activation" in stack.recompute.modules & idle:
            yield (
                "recomputing mlp_activation has no effect where LoRA updates both projections of an MLP: it does not "
                f"save the activation output{advice}"
            )
        if "core_attention" not in stack.recompute.modules:
            continue
        for label in labels:
            if label in decisions and not decisions[label].saves_scores:
                yield (
                    f"recomputing core attention has no effect on attention `{label}`: its backend "
                    f"{decisions[label].backend} keeps no scores{advice}"
                )


def _suggested_modules(
    stack: StackSlice, modules: frozenset[RecomputeModule], idle: frozenset[RecomputeModule]
) -> list[RecomputeModule]:
    """Return `modules` and more that save memory: the cheap ones, or else the experts; [] if there are no more."""
    first = 0 if stack.recompute is None else stack.recompute.layers
    available = stack.effective_modules(range(first, stack.num_layers)) - idle
    steps: tuple[frozenset[RecomputeModule], ...] = (frozenset({"norm", "mlp_activation"}), frozenset({"moe"}))
    for step in steps:
        if new := (step & available) - modules:
            return [name for name in _CHEAP_FIRST if name in modules | new]
    return []
