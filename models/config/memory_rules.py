"""Cross-field rules of recompute (activation checkpointing); paths are relative to the block of the stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .key_block import Finding
from .memory_slice import full_recompute_layers, selected_modules
from .moe_slice import has_experts, layers_with_experts
from .stack import StackKeys

_GRANULARITY = "activations_checkpoint_granularity"
_METHOD = "activations_checkpoint_method"
_NUMBER = "activations_checkpoint_num_layers"
_MODULES = "activations_checkpoint_modules"
_MOE = "moe_layer_recompute"

RecomputeRule = Callable[[StackKeys, bool], Iterator[Finding]]
"""Takes the keys of a stack and whether it belongs to a T5."""


def recompute_rules(keys: StackKeys, *, is_t5: bool = False) -> Iterator[Finding]:
    """All cross-field checks of recompute for one stack, of a T5 or not."""
    for rule in RECOMPUTE_RULES:
        yield from rule(keys, is_t5)


def full_needs_method_and_number(keys: StackKeys, is_t5: bool) -> Iterator[Finding]:
    """`full` needs a method and a number of layers, as in Megatron."""
    missing = [name for name in (_METHOD, _NUMBER) if getattr(keys, name) is None]
    if keys.activations_checkpoint_granularity != "full" or not missing:
        return
    needed = " and ".join(f"`{name}`" for name in missing)
    block = keys.activations_checkpoint_method == "block"
    yield Finding(
        "error",
        (*missing, _GRANULARITY),
        f"`{_GRANULARITY}` (full) needs {needed} to select the layers.",
        f"use {_METHOD}={'block' if block else 'uniform'} {_NUMBER}={keys.num_layers if block else 1} for every layer",
    )


def method_and_number_need_full(keys: StackKeys, is_t5: bool) -> Iterator[Finding]:
    """Method and number of layers have no effect without `full`."""
    granularity, method, number = (getattr(keys, name) for name in (_GRANULARITY, _METHOD, _NUMBER))
    ineffective = [name for name, value in ((_METHOD, method), (_NUMBER, number)) if value is not None]
    if granularity == "full" or not ineffective:
        return
    given = " and ".join(f"`{name}` ({getattr(keys, name)})" for name in ineffective)
    have = "have" if len(ineffective) > 1 else "has"
    if granularity == "selective":
        yield Finding(
            "info",
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


def number_is_within_num_layers(keys: StackKeys, is_t5: bool) -> Iterator[Finding]:
    """The number of layers should be from 1 to `num_layers`."""
    number, layers = keys.activations_checkpoint_num_layers, keys.num_layers
    if keys.activations_checkpoint_granularity != "full" or keys.activations_checkpoint_method is None:
        return
    if number == 0:
        yield Finding(
            "warning",
            (_NUMBER, _GRANULARITY),
            f"`{_NUMBER}` (0) recomputes no layer, as in Megatron; NeMo's older models read it as 1.",
            f"use {_NUMBER}=1, or {_GRANULARITY}=null",
        )
    elif number is not None and number > layers:
        yield Finding(
            "warning",
            (_NUMBER, "num_layers"),
            f"`{_NUMBER}` ({number}) is larger than `num_layers` ({layers}) and reduced to it.",
            f"use {_NUMBER}={layers}",
        )


def modules_have_an_effect(keys: StackKeys, is_t5: bool) -> Iterator[Finding]:
    """Modules are recomputed in layers that have them and are not recomputed as a whole."""
    modules = selected_modules(keys)
    _, layers = full_recompute_layers(keys)
    if layers == keys.num_layers:
        if keys.moe_layer_recompute and has_experts(keys, is_t5=is_t5):
            yield Finding(
                "error",
                (_MOE, _GRANULARITY),
                f"`{_MOE}` (True) cannot be combined with `{_GRANULARITY}` (full) of all layers, which recomputes the "
                "experts too.",
                f"use {_MOE}=false, or {_GRANULARITY}=null",
            )
        if keys.activations_checkpoint_modules is not None:
            yield Finding(
                "warning",
                (_MODULES, _GRANULARITY),
                f"`{_MODULES}` ({_listed(keys)}) has no effect with `{_GRANULARITY}` (full) of all layers, which "
                "recomputes everything.",
                f"use {_MODULES}=null, or {_METHOD}=block with fewer layers",
            )
        return
    with_experts = layers_with_experts(keys) if has_experts(keys, is_t5=is_t5) else ()
    rest = with_experts[layers:]
    shared = keys.moe_shared_expert_intermediate_size is not None
    scope = "layer that is not recomputed as a whole" if layers else "layer"
    if "moe" in modules and not any(rest) and (any(with_experts) or not keys.moe_layer_recompute):
        name = _MOE if keys.moe_layer_recompute else _MODULES
        yield Finding(
            "warning",
            (name, "num_moe_experts"),
            f"`{name}` ({_shown(keys, name)}): `moe` has no effect, because no {scope} has experts.",
            "use num_moe_experts=8, or leave it out",
        )
    if "mlp_activation" in modules and rest and all(rest) and not shared:
        yield Finding(
            "warning",
            (_MODULES, "num_moe_experts"),
            f"`{_MODULES}` ({_listed(keys)}): `mlp_activation` has no effect, because every {scope} has experts, "
            "whose activations it does not cover.",
            f"use {_MODULES}=[moe]",
        )
    if "norm" in modules and keys.transformer_block_type == "post_ln":
        yield Finding(
            "warning",
            (_MODULES, "transformer_block_type"),
            f"`{_MODULES}` ({_listed(keys)}): `norm` has no effect with `transformer_block_type` (post_ln), where the "
            "outputs of the norms are the residual stream, which is saved anyway.",
            "use transformer_block_type=pre_ln",
        )


def modules_replace_selective_default(keys: StackKeys, is_t5: bool) -> Iterator[Finding]:
    """As in Megatron, explicit modules replace the default of `selective`."""
    named = keys.activations_checkpoint_modules
    if keys.activations_checkpoint_granularity == "selective" and named is not None and "core_attention" not in named:
        yield Finding(
            "info",
            (_MODULES, _GRANULARITY),
            f"`{_GRANULARITY}` (selective) recomputes only `{_MODULES}` ({_listed(keys)}), not `core_attention`.",
            f"use {_MODULES}=null for core_attention",
        )


def _listed(keys: StackKeys) -> str:
    return ", ".join(keys.activations_checkpoint_modules or ())


def _shown(keys: StackKeys, name: str) -> str:
    return _listed(keys) if name == _MODULES else str(getattr(keys, name))


RECOMPUTE_RULES: tuple[RecomputeRule, ...] = (
    full_needs_method_and_number,
    method_and_number_need_full,
    number_is_within_num_layers,
    modules_have_an_effect,
    modules_replace_selective_default,
)
