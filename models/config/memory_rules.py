"""Rules between the keys of recomputation; paths are relative to the block of their stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .key_block import Finding
from .memory_slice import modules_of, whole_layers
from .moe_slice import has_experts, layers_with_experts
from .stack import StackKeys

_GRANULARITY = "activations_checkpoint_granularity"
_METHOD = "activations_checkpoint_method"
_NUMBER = "activations_checkpoint_num_layers"
_MODULES = "activations_checkpoint_modules"
_MOE = "moe_layer_recompute"

RecomputeRule = Callable[[StackKeys, bool], Iterator[Finding]]
"""From the keys of a stack, and whether it is one of a T5, to findings."""


def recompute_rules(keys: StackKeys, *, of_t5: bool = False) -> Iterator[Finding]:
    """Everything the keys of recomputation of one stack, of a T5 or not, have against each other."""
    for rule in RECOMPUTE_RULES:
        yield from rule(keys, of_t5)


def full_says_which_layers(keys: StackKeys, of_t5: bool) -> Iterator[Finding]:
    """`full` needs a method and a number, as in Megatron."""
    missing = [name for name in (_METHOD, _NUMBER) if getattr(keys, name) is None]
    if keys.activations_checkpoint_granularity != "full" or not missing:
        return
    needed = " and ".join(f"`{name}`" for name in missing)
    block = keys.activations_checkpoint_method == "block"
    yield Finding(
        "error",
        (*missing, _GRANULARITY),
        f"`{_GRANULARITY}` (full) needs {needed} to say which layers.",
        f"{_METHOD}={'block' if block else 'uniform'} {_NUMBER}={keys.num_layers if block else 1} is every layer",
    )


def layers_are_of_full(keys: StackKeys, of_t5: bool) -> Iterator[Finding]:
    """Without `full` nobody asks for a method and a number of layers."""
    granularity, method, number = (getattr(keys, name) for name in (_GRANULARITY, _METHOD, _NUMBER))
    unheard = [name for name, value in ((_METHOD, method), (_NUMBER, number)) if value is not None]
    if granularity == "full" or not unheard:
        return
    given = " and ".join(f"`{name}` ({getattr(keys, name)})" for name in unheard)
    have = "have" if len(unheard) > 1 else "has"
    if granularity == "selective":
        yield Finding(
            "info",
            (*unheard, _GRANULARITY),
            f"{given} {have} no effect with `{_GRANULARITY}` (selective), which is for every layer.",
            f"use {_GRANULARITY}=full for whole layers",
        )
    else:  # a number alone is in every T5 file of NeMo
        yield Finding(
            "info" if method is None else "warning",
            (*unheard, _GRANULARITY),
            f"{given} {have} no effect without `{_GRANULARITY}`: nothing is recomputed.",
            f"use {_GRANULARITY}=full",
        )


def number_is_within_stack(keys: StackKeys, of_t5: bool) -> Iterator[Finding]:
    """0 layers is nothing, and there are no more than there are."""
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
            f"`{_NUMBER}` ({number}) is read as `num_layers` ({layers}): there are no more.",
            f"use {_NUMBER}={layers}",
        )


def modules_are_in_some_layer(keys: StackKeys, of_t5: bool) -> Iterator[Finding]:
    """Parts are recomputed in layers that are not recomputed as a whole and that have them."""
    modules = modules_of(keys)
    _, layers = whole_layers(keys)
    if layers == keys.num_layers:
        if keys.moe_layer_recompute and has_experts(keys, of_t5=of_t5):
            yield Finding(
                "error",
                (_MOE, _GRANULARITY),
                f"`{_MOE}` (True) must not meet `{_GRANULARITY}` (full) of all layers, which recomputes the experts "
                "too.",
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
    with_experts = layers_with_experts(keys) if has_experts(keys, of_t5=of_t5) else ()
    rest = with_experts[layers:]
    shared = keys.moe_shared_expert_intermediate_size is not None
    others = "layers that are not recomputed as a whole have" if layers else "layers have"
    if "moe" in modules and not any(rest) and (any(with_experts) or not keys.moe_layer_recompute):
        name = _MOE if keys.moe_layer_recompute else _MODULES
        yield Finding(
            "warning",
            (name, "num_moe_experts"),
            f"`{name}` ({_shown(keys, name)}): `moe` has no effect where no {others} experts.",
            "use num_moe_experts=8, or leave it out",
        )
    if "mlp_activation" in modules and rest and all(rest) and not shared:
        yield Finding(
            "warning",
            (_MODULES, "num_moe_experts"),
            f"`{_MODULES}` ({_listed(keys)}): `mlp_activation` has no effect where all {others} experts, whose "
            "activations it does not reach.",
            f"use {_MODULES}=[moe]",
        )
    if "norm" in modules and keys.transformer_block_type == "post_ln":
        yield Finding(
            "warning",
            (_MODULES, "transformer_block_type"),
            f"`{_MODULES}` ({_listed(keys)}): `norm` has no effect with `transformer_block_type` (post_ln), whose "
            "norms give the stream itself, which is kept.",
            "use transformer_block_type=pre_ln",
        )


def selective_says_what(keys: StackKeys, of_t5: bool) -> Iterator[Finding]:
    """As in Megatron, modules replace what `selective` is without them."""
    named = keys.activations_checkpoint_modules
    if keys.activations_checkpoint_granularity == "selective" and named is not None and "core_attention" not in named:
        yield Finding(
            "info",
            (_MODULES, _GRANULARITY),
            f"`{_MODULES}` ({_listed(keys)}) is what `{_GRANULARITY}` (selective) recomputes: `core_attention` is not "
            "among it.",
            f"{_MODULES}=null is core_attention",
        )


def _listed(keys: StackKeys) -> str:
    return ", ".join(keys.activations_checkpoint_modules or ())


def _shown(keys: StackKeys, name: str) -> str:
    return _listed(keys) if name == _MODULES else str(getattr(keys, name))


RECOMPUTE_RULES: tuple[RecomputeRule, ...] = (
    full_says_which_layers,
    layers_are_of_full,
    number_is_within_stack,
    modules_are_in_some_layer,
    selective_says_what,
)
