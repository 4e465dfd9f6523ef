"""Cross-field rules of recompute and CPU offloading; paths are relative to the block of the stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .dense_stack import is_own_block
from .key_block import Finding
from .memory import (
    MemoryKeys,
    full_recompute_layers,
    last_chunk_start,
    num_offloaded_layers,
    partial_recompute,
    selected_modules,
)
from .moe import has_experts, layers_with_experts

_GRANULARITY = "activations_checkpoint_granularity"
_METHOD = "activations_checkpoint_method"
_NUMBER = "activations_checkpoint_num_layers"
_MODULES = "activations_checkpoint_modules"
_MOE = "moe_layer_recompute"
_PARTIAL = "num_micro_batches_with_partial_activation_checkpoints"
_FEWER = "activations_checkpoint_layers_per_pipeline"

_SWITCH = "cpu_offloading"
_FIRST = "cpu_offloading_num_layers"
_ACTIVATIONS = "cpu_offloading_activations"
_WEIGHTS = "cpu_offloading_weights"


def recompute_rules(keys: MemoryKeys) -> Iterator[Finding]:
    """All cross-field checks of recompute for one stack."""
    for rule in RECOMPUTE_RULES:
        yield from rule(keys)


def full_needs_method_and_number(keys: MemoryKeys) -> Iterator[Finding]:
    """`full` needs a method and a number of layers, as in Megatron."""
    missing = [name for name in (_METHOD, _NUMBER) if getattr(keys, name) is None]
    if keys.activations_checkpoint_granularity != "full" or not missing:
        return
    needed = " and ".join(f"`{name}`" for name in missing)
    block = keys.activations_checkpoint_method == "block"
    yield Finding.error(
        (*missing, _GRANULARITY),
        f"`{_GRANULARITY}` (full) needs {needed} to select the layers.",
        f"use {_METHOD}={'block' if block else 'uniform'} {_NUMBER}={keys.num_layers if block else 1} for every layer",
    )


def method_and_number_need_full(keys: MemoryKeys) -> Iterator[Finding]:
    """Method and number of layers have no effect without `full`."""
    granularity, method, number = (getattr(keys, name) for name in (_GRANULARITY, _METHOD, _NUMBER))
    ineffective = [name for name, value in ((_METHOD, method), (_NUMBER, number)) if value is not None]
    if granularity == "full" or not ineffective:
        return
    given = " and ".join(f"`{name}` ({getattr(keys, name)})" for name in ineffective)
    have = "have" if len(ineffective) > 1 else "has"
    if granularity == "selective":
        yield Finding.info(
            (*ineffective, _GRANULARITY),
            f"{given} {have} no effect with `{_GRANULARITY}` (selective), which applies to every layer.",
            f"use {_GRANULARITY}=full for whole layers",
        )
    else:  # NeMo's T5 configurations all set the number of layers alone
        yield Finding(
            "info" if method is None else "warning",
            (*ineffective, _GRANULARITY),
            f"{given} {have} no effect without `{_GRANULARITY}`: nothing is recomputed.",
            f"use {_GRANULARITY}=full",
        )


def number_is_within_num_layers(keys: MemoryKeys) -> Iterator[Finding]:
    """The number of layers should be from 1 to `num_layers`."""
    number, layers = keys.activations_checkpoint_num_layers, keys.num_layers
    if keys.activations_checkpoint_granularity != "full" or keys.activations_checkpoint_method is None:
        return
    if number == 0 and partial_recompute(keys)[0] is None and full_recompute_layers(keys)[1] == 0:
        yield Finding.warning(
            (_NUMBER, _GRANULARITY),
            f"`{_NUMBER}` (0) recomputes no layer, as in Megatron; NeMo's older models read it as 1.",
            f"use {_NUMBER}=1, or {_GRANULARITY}=null",
        )
    elif number is not None and number > layers:
        yield Finding.warning(
            (_NUMBER, "num_layers"),
            f"`{_NUMBER}` ({number}) is larger than `num_layers` ({layers}) and reduced to it.",
            f"use {_NUMBER}={layers}",
        )


def modules_have_an_effect(keys: MemoryKeys) -> Iterator[Finding]:
    """Modules are recomputed in layers that have them and are not recomputed as a whole."""
    modules = selected_modules(keys)
    (_, layers), (partial, fewer) = full_recompute_layers(keys), partial_recompute(keys)
    if partial is not None and modules:
        name = _MOE if keys.activations_checkpoint_modules is None else _MODULES
        yield Finding.error(
            (name, _PARTIAL),
            f"`{name}` ({_shown(keys, name)}) cannot be combined with `{_PARTIAL}` ({partial}): some micro batches "
            "recompute all layers as a whole.",
            f"use {name}={'false' if name == _MOE else 'null'}",
        )
        return
    if layers == keys.num_layers and not fewer:
        if keys.moe_layer_recompute and has_experts(keys):
            yield Finding.error(
                (_MOE, _GRANULARITY),
                f"`{_MOE}` (True) cannot be combined with `{_GRANULARITY}` (full) of all layers, which recomputes the "
                "experts too.",
                f"use {_MOE}=false, or {_GRANULARITY}=null",
            )
        if keys.activations_checkpoint_modules is not None:
            yield Finding.warning(
                (_MODULES, _GRANULARITY),
                f"`{_MODULES}` ({_listed(keys)}) has no effect with `{_GRANULARITY}` (full) of all layers, which "
                "recomputes everything.",
                f"use {_MODULES}=null, or {_METHOD}=block with fewer layers",
            )
        return
    with_experts = layers_with_experts(keys) if has_experts(keys) else ()
    rest = with_experts if fewer else with_experts[layers:]
    shared = keys.moe_shared_expert_intermediate_size is not None
    scope = "layer that is not recomputed as a whole" if layers else "layer"
    if "moe" in modules and not any(rest) and (any(with_experts) or not keys.moe_layer_recompute):
        name = _MOE if keys.moe_layer_recompute else _MODULES
        yield Finding.warning(
            (name, "num_moe_experts"),
            f"`{name}` ({_shown(keys, name)}): `moe` has no effect, because no {scope} has experts.",
            "use num_moe_experts=8, or leave it out",
        )
    if "mlp_activation" in modules and rest and all(rest) and not shared:
        yield Finding.warning(
            (_MODULES, "num_moe_experts"),
            f"`{_MODULES}` ({_listed(keys)}): `mlp_activation` has no effect, because every {scope} has experts, "
            "whose activations it does not cover.",
            f"use {_MODULES}=[moe]",
        )
    if "norm" in modules and keys.transformer_block_type == "post_ln":
        yield Finding.warning(
            (_MODULES, "transformer_block_type"),
            f"`{_MODULES}` ({_listed(keys)}): `norm` has no effect with `transformer_block_type` (post_ln), where the "
            "outputs of the norms are the residual stream, which is saved anyway.",
            "use transformer_block_type=pre_ln",
        )
    if "norm" in modules and is_own_block(keys.transformer_block_type):
        yield Finding.error(
            (_MODULES, "transformer_block_type"),
            f"`{_MODULES}` ({_listed(keys)}): `norm` is not supported with a `transformer_block_type` of your own "
            f"({keys.transformer_block_type}), which runs its norms itself.",
            f"leave `norm` out of {_MODULES}, or use activations_checkpoint_granularity=full",
        )


def partial_recompute_needs_blocks(keys: MemoryKeys) -> Iterator[Finding]:
    """Some micro batches and ranks recompute fewer layers with `full` and `block` only, as in NeMo."""
    granularity, method = keys.activations_checkpoint_granularity, keys.activations_checkpoint_method
    partial, fewer = getattr(keys, _PARTIAL), getattr(keys, _FEWER)
    if granularity == "full" and method != "uniform":
        if partial == 0 and keys.activations_checkpoint_num_layers is not None:
            also = "" if not fewer else f" and `{_FEWER}` ({fewer:g})"
            yield Finding.warning(
                (_PARTIAL, _NUMBER),
                f"`{_PARTIAL}` (0) lets every micro batch recompute all layers, whatever `{_NUMBER}` "
                f"({keys.activations_checkpoint_num_layers}){also} says.",
                f"use {_PARTIAL}=null",
            )
        return
    for name, value in ((_PARTIAL, partial), (_FEWER, fewer)):
        if value is None or (name == _FEWER and not value):
            continue
        lacking = f"`{_METHOD}` ({method})" if granularity == "full" else f"`{_GRANULARITY}` ({granularity or 'null'})"
        needed = f"needs `{_GRANULARITY}` (full) and `{_METHOD}` (block)"
        text, fix = f"`{name}` ({value:g}) has no effect with {lacking}: it {needed}.", f"use {name}=null"
        if granularity is None and name == _PARTIAL and value:
            yield Finding.error((name, _GRANULARITY), f"`{name}` ({value}) {needed}, not {lacking}.", fix)
        elif value:
            yield Finding.warning((name, _GRANULARITY), text, fix)
        else:  # in NVIDIA's files
            yield Finding.info((name, _GRANULARITY), text, fix)


def modules_replace_selective_default(keys: MemoryKeys) -> Iterator[Finding]:
    """As in Megatron, explicit modules replace the default of `selective`."""
    named = keys.activations_checkpoint_modules
    if keys.activations_checkpoint_granularity == "selective" and named is not None and "core_attention" not in named:
        yield Finding.info(
            (_MODULES, _GRANULARITY),
            f"`{_GRANULARITY}` (selective) recomputes only `{_MODULES}` ({_listed(keys)}), not `core_attention`.",
            f"use {_MODULES}=null for core_attention",
        )


def _listed(keys: MemoryKeys) -> str:
    return ", ".join(keys.activations_checkpoint_modules or ())


def _shown(keys: MemoryKeys, name: str) -> str:
    return _listed(keys) if name == _MODULES else str(getattr(keys, name))


RECOMPUTE_RULES: tuple[Callable[[MemoryKeys], Iterator[Finding]], ...] = (
    full_needs_method_and_number,
    method_and_number_need_full,
    number_is_within_num_layers,
    modules_have_an_effect,
    partial_recompute_needs_blocks,
    modules_replace_selective_default,
)


# ---------------------------------------------------------------- CPU offloading


def offload_rules(keys: MemoryKeys) -> Iterator[Finding]:
    """All cross-field checks of CPU offloading for one stack."""
    if not keys.cpu_offloading:
        yield from settings_need_the_switch(keys)
        return
    for rule in OFFLOAD_RULES:
        yield from rule(keys)


def settings_need_the_switch(keys: MemoryKeys) -> Iterator[Finding]:
    """Report keys without `cpu_offloading`, unless they have the values that all NeMo configurations have."""
    number = keys.cpu_offloading_num_layers
    ineffective = [name for name in (_ACTIVATIONS, _WEIGHTS) if not getattr(keys, name)]
    if number is not None and number != keys.num_layers - 1:
        ineffective.insert(0, _FIRST)
    if ineffective:
        given = " and ".join(f"`{name}` ({getattr(keys, name)})" for name in ineffective)
        yield Finding.info(
            (*ineffective, _SWITCH),
            f"{given} {'have' if len(ineffective) > 1 else 'has'} no effect without `{_SWITCH}`: nothing is offloaded.",
            f"use {_SWITCH}=true",
        )


def number_of_layers_is_valid(keys: MemoryKeys) -> Iterator[Finding]:
    """The last layer stays on the GPU, as the backward starts with it; if it is the only one, copies do not overlap.

    With fully recomputed layers they do, since only the layers' inputs are copied.
    """
    number, layers, last = num_offloaded_layers(keys), keys.num_layers, last_chunk_start(keys)
    if number >= layers:
        yield Finding.error(
            (_FIRST, "num_layers"),
            f"`{_FIRST}` ({number}) must be less than `num_layers` ({layers}): the backward starts with the last "
            "layer.",
            f"use {_FIRST}={max(layers - 2, 0)}, or {_SWITCH}=false",
        )
    elif number == 0:
        default_note = "" if keys.cpu_offloading_num_layers is not None else ", all but one of `num_layers` (1)"
        yield Finding.info(
            (_FIRST, _SWITCH),
            f"`{_FIRST}` (0{default_note}) offloads nothing.",
            f"use {_FIRST}={max(layers - 2, 1)}" if layers > 1 else f"use {_SWITCH}=false",
        )
    elif number > last:
        key = f"`{_FIRST}` ({'null, which is ' * (keys.cpu_offloading_num_layers is None)}{number})"
        reason = "one recompute chunk (`activations_checkpoint_num_layers`), and the backward starts with it."
        message = (
            f"{key} offloads the first {last} layers: the others are {reason}"
            if last
            else f"{key} offloads nothing: all layers are {reason}"
        )
        fix = f"use {_FIRST}={last}" if last else "use activations_checkpoint_num_layers=1"
        paths = (_FIRST, "activations_checkpoint_num_layers")
        yield Finding("info" if last else "warning", paths, message, fix)
    elif number == layers - 1 and keys.cpu_offloading_activations and full_recompute_layers(keys)[1] < number:
        default_note = "null, which is " if keys.cpu_offloading_num_layers is None else ""
        fewer = f"use {_FIRST}={layers - 2} or fewer" if layers > 2 else f"use {_SWITCH}=false"
        yield Finding.warning(
            (_FIRST, "num_layers"),
            f"`{_FIRST}` ({default_note}{number}) leaves one layer of {layers} on the GPU: in the forward pass each "
            "layer waits for the copies of the previous one.",
            fewer,
        )


def something_is_offloaded(keys: MemoryKeys) -> Iterator[Finding]:
    """Activations, weights or both must be offloaded, as in TransformerEngine."""
    if not (keys.cpu_offloading_activations or keys.cpu_offloading_weights):
        yield Finding.error(
            (_ACTIVATIONS, _WEIGHTS, _SWITCH),
            f"`{_SWITCH}` (True) needs `{_ACTIVATIONS}` or `{_WEIGHTS}`, which are both False.",
            f"use {_ACTIVATIONS}=true, or {_SWITCH}=false",
        )


OFFLOAD_RULES: tuple[Callable[[MemoryKeys], Iterator[Finding]], ...] = (
    number_of_layers_is_valid,
    something_is_offloaded,
)
