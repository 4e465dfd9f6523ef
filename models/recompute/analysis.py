"""What recomputation comes to in a model before it is built: where it draws, which parts act, which save nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ...kernels.attention.call_spec import AttentionCall
from ...kernels.attention.dispatch import Decision
from ..config.families import FamilySlice
from ..config.memory import RecomputeModule
from ..config.memory_slice import RecomputeSlice
from ..config.peft_slice import LoRASlice, PeftSlice, peft_dropout
from ..config.slices import MLPSlice, StackSlice
from ..config.t5_slice import T5Slice
from ..peft.lora_mlp import is_one_operation

_CHEAP_FIRST: tuple[RecomputeModule, ...] = ("norm", "mlp_activation", "core_attention", "moe")


def training_labels(model: FamilySlice) -> tuple[tuple[str, ...], ...]:
    """The attentions of each stack in training, self-attention first, as the decisions name them."""
    if isinstance(model, T5Slice):
        return ("encoder training",), ("decoder training", "cross training")
    return (("training",),)


def has_dropout(stack: StackSlice) -> bool:
    """Whether a layer draws random numbers in training."""
    moe = stack.moe
    of_experts = moe is not None and (moe.dropout or moe.jitter)
    return bool(stack.hidden_dropout or stack.attention.dropout or stack.mlp.dropout or of_experts)


def recomputes_draws(stack: StackSlice, peft: PeftSlice | None = None) -> bool:
    """Whether random numbers are drawn in what the backward runs again: it then asks generators for their state.

    Args:
        stack: what it recomputes, and where it has dropout.
        peft: what fine-tuning adds: a projection with a low-rank update runs again with the part it reads.
    """
    recompute, moe = stack.recompute, stack.moe
    if recompute is None:
        return False
    in_mlp = bool(stack.mlp.dropout)
    in_experts = moe is not None and bool(moe.dropout or moe.jitter or (moe.shared_ffn_hidden_size and in_mlp))
    of_modules: dict[RecomputeModule, bool] = {
        "norm": False,
        "mlp_activation": in_mlp,
        "core_attention": bool(stack.attention.dropout),
        "moe": in_experts,
    }
    drawn = (recompute.layers > 0 and has_dropout(stack)) or any(of_modules[name] for name in recompute.modules)
    in_parts = isinstance(peft, LoRASlice) and bool(recompute.modules - {"core_attention"})
    return drawn or (peft_dropout(peft) > 0 and (recompute.layers > 0 or in_parts))


def keeps_result_alone(mlp: MLPSlice) -> bool:
    """Whether the backward of an activation reads its result, not what it was made from."""
    return mlp.nonlinearity == "relu" and not mlp.gated  # a gate reads both


def acting_recompute(model: FamilySlice, decisions: Mapping[str, Decision]) -> tuple[RecomputeSlice | None, ...]:
    """What the backward of each stack calculates again: core attention only where an attention of it keeps scores.

    Args:
        model: what the model is.
        decisions: what the dispatcher chose for each attention and kind of call.
    """
    acting: list[RecomputeSlice | None] = []
    for stack, labels in zip(model.stacks, training_labels(model), strict=True):
        recompute = stack.recompute
        made = [decisions[label] for label in labels if label in decisions]
        if made and not any(decision.keeps_scores for decision in made):
            recompute = _without(recompute, frozenset({"core_attention"}))
        acting.append(recompute)
    return tuple(acting)


def saving_recompute(
    model: FamilySlice, decisions: Mapping[str, Decision], peft: PeftSlice | None, *, compiled: bool
) -> tuple[RecomputeSlice | None, ...]:
    """What each stack saves by recomputation: what acts, but for parts that would keep nothing in any case."""
    return tuple(
        _without(recompute, _idle(stack, decisions[labels[0]].call, peft, compiled=compiled))
        for stack, labels, recompute in zip(
            model.stacks, training_labels(model), acting_recompute(model, decisions), strict=True
        )
    )


def _without(recompute: RecomputeSlice | None, parts: frozenset[RecomputeModule]) -> RecomputeSlice | None:
    if recompute is None:
        return None
    modules = recompute.modules - parts
    return replace(recompute, modules=modules) if recompute.layers or modules else None


def activation_saves_nothing(stack: StackSlice, peft: PeftSlice | None, *, compiled: bool) -> bool:
    """Whether a layer without the result of its activation keeps as much instead: what that is made from.

    Compiled, it keeps besides where the result is positive; dropout or a norm behind it have a result of their own.
    """
    more = stack.mlp.dropout or stack.block == "normformer" or peft_dropout(peft)
    return keeps_result_alone(stack.mlp) and not (compiled or more)


def _idle(
    stack: StackSlice, call: AttentionCall, peft: PeftSlice | None, *, compiled: bool
) -> frozenset[RecomputeModule]:
    """The parts of a layer that save nothing: since a low-rank update reads something else, or as much is kept."""
    found: set[RecomputeModule] = set()
    if isinstance(peft, LoRASlice) and peft.spares_norms(stack):
        found.add("norm")
    saves_nothing = activation_saves_nothing(stack, peft, compiled=compiled)
    if saves_nothing or is_one_operation(peft, stack, call.device, call.dtype):
        found.add("mlp_activation")
    return frozenset(found)


def made_again_for_copies(
    model: FamilySlice, decisions: Mapping[str, Decision], peft: PeftSlice | None, *, compiled: bool
) -> tuple[frozenset[RecomputeModule], ...]:
    """What offloaded layers of each stack make again so that it need not be copied, of what they would keep.

    Args:
        model: what the model is.
        decisions: what the dispatcher chose for each attention and kind of call; on a GPU, for elsewhere it is nothing.
        peft: what fine-tuning adds.
        compiled: whether layers are.
    """
    found: list[frozenset[RecomputeModule]] = []
    for stack, labels in zip(model.stacks, training_labels(model), strict=True):
        made = [decisions[label] for label in labels if label in decisions]
        layers = range(stack.offload.layers if stack.offload is not None else 0)
        again = frozenset[RecomputeModule]().union(*(stack.made_again(number, offloads=True) for number in layers))
        if not any(decision.keeps_scores for decision in made):
            again -= {"core_attention"}
        if compiled and isinstance(peft, LoRASlice) and peft.spares_norms(stack) and peft.updates_all_readers:
            again -= {"norm"}
        if made and is_one_operation(peft, stack, made[0].call.device, made[0].call.dtype):
            again -= {"mlp_activation"}
        found.append(again)
    return tuple(found)


def idle_recompute(
    model: FamilySlice, decisions: Mapping[str, Decision], peft: PeftSlice | None, *, compiled: bool
) -> Iterator[str]:
    """For each part that shall be recomputed but keeps nothing: why that saves nothing, and what would.

    Args:
        model: what the model is.
        decisions: what the dispatcher chose for each attention and kind of call.
        peft: what fine-tuning adds.
        compiled: whether layers are.
    """
    saving = saving_recompute(model, decisions, peft, compiled=compiled)
    places = [f"model.{labels[0].rpartition(' ')[0]}".rstrip(".") for labels in training_labels(model)]
    for stack, labels, done, at in zip(model.stacks, training_labels(model), saving, places, strict=True):
        if stack.recompute is None:
            continue
        idle = _idle(stack, decisions[labels[0]].call, peft, compiled=compiled)
        others = _with_more(stack, frozenset() if done is None else done.modules, idle)
        more = f"; {at}.activations_checkpoint_modules=[{','.join(others)}] saves memory" if others else ""
        if "norm" in stack.recompute.modules & idle:
            yield (
                "recomputing norm has no effect in compiled layers where LoRA updates what reads an RMS norm: they do "
                f"not keep the norm{more}"
            )
        if "mlp_activation" in stack.recompute.modules & idle and keeps_result_alone(stack.mlp):
            yield (
                "recomputing mlp_activation has no effect on memory in layers that are not compiled: the backward of "
                f"{stack.mlp.nonlinearity} reads its result alone, and in place of that its input is kept{more}"
            )
        elif "mlp_activation" in stack.recompute.modules & idle:
            yield (
                "recomputing mlp_activation has no effect where LoRA updates both projections of an MLP: it keeps no "
                f"activated rows{more}"
            )
        if "core_attention" not in stack.recompute.modules:
            continue
        for label in labels:
            if label in decisions and not decisions[label].keeps_scores:
                yield (
                    f"recomputing core attention has no effect on attention `{label}`: its backend "
                    f"{decisions[label].backend} keeps no scores{more}"
                )


def _with_more(
    stack: StackSlice, modules: frozenset[RecomputeModule], idle: frozenset[RecomputeModule]
) -> list[RecomputeModule]:
    """These parts and others that save in the stack: the cheap ones, or else the experts; [] where none is left."""
    first = 0 if stack.recompute is None else stack.recompute.layers
    acting = stack.acting_modules(range(first, stack.num_layers)) - idle
    steps: tuple[frozenset[RecomputeModule], ...] = (frozenset({"norm", "mlp_activation"}), frozenset({"moe"}))
    for step in steps:
        if more := (step & acting) - modules:
            return [name for name in _CHEAP_FIRST if name in modules | more]
    return []
