"""Cross-field rules of mixture of experts; paths are relative to the block of the stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .key_block import Finding
from .moe import MoEKeys, capacity_factor_of, has_experts, layers_with_experts, needs_pre_softmax, routing_of

_EXPERTS = "num_moe_experts"
_BALANCING = "moe_router_load_balancing_type"
_AUX = "moe_aux_loss_coeff"
_FACTOR = "moe_expert_capacity_factor"
_PAD = "moe_pad_expert_input_to_capacity"
_DROPPING = "moe_token_dropping"
_SCORE = "moe_router_score_function"
_BIAS = "moe_router_enable_expert_bias"
_GROUPS = ("moe_router_num_groups", "moe_router_group_topk")


def moe_rules(keys: MoEKeys) -> Iterator[Finding]:
    """All cross-field checks of the experts of one stack."""
    if not has_experts(keys):
        yield from _keys_without_experts(keys)
        return
    for rule in MOE_RULES:
        yield from rule(keys)


def _keys_without_experts(keys: MoEKeys) -> Iterator[Finding]:
    """MoE keys have no effect in a dense stack."""
    ineffective = [
        name
        for name in MoEKeys.own_keys()
        if name != _EXPERTS and getattr(keys, name) != MoEKeys.model_fields[name].default
    ]
    if not ineffective:
        return
    listed = ", ".join(f"`{name}` ({getattr(keys, name)})" for name in ineffective)
    one = keys.num_moe_experts == 1
    yield Finding.warning(
        (*ineffective, _EXPERTS),
        f"{listed} {'has' if len(ineffective) == 1 else 'have'} no effect "
        + ("with `num_moe_experts` (1), which is a dense MLP in a T5." if one else "without `num_moe_experts`."),
        f"use {_EXPERTS}=8, or leave {'it' if len(ineffective) == 1 else 'them'} out",
    )


def _no_effect(keys: MoEKeys, name: str, other: str, when: str, fix: str) -> Finding:
    """Warn that the key `name` has no effect because of the key `other`."""
    return Finding.warning((name, other), f"`{name}` ({getattr(keys, name)}) has no effect {when}.", fix)


# ---------------------------------------------------------------- layers and experts


def topk_is_within_experts(keys: MoEKeys) -> Iterator[Finding]:
    """The top-k experts of a token are distinct."""
    experts, (topk, _) = keys.num_moe_experts, routing_of(keys)
    if experts is not None and topk > experts:
        default_note = ", the default" if keys.moe_router_topk is None else ""
        yield Finding.error(
            ("moe_router_topk", _EXPERTS),
            f"`moe_router_topk` ({topk}{default_note}) must not be above `num_moe_experts` ({experts}).",
            f"use moe_router_topk={experts} or less" if experts > 1 else f"use moe_router_topk=1, or {_EXPERTS}=null",
        )


def moe_layers_are_set_once(keys: MoEKeys) -> Iterator[Finding]:
    """The layers with experts are set by either `moe_layer_freq` or `moe_frequency`, and there is at least one."""
    every, pattern, layers = keys.moe_frequency, keys.moe_layer_freq, keys.num_layers
    if every != 1 and pattern != 1:
        yield Finding.error(
            ("moe_frequency", "moe_layer_freq"),
            f"`moe_frequency` ({every}) and `moe_layer_freq` ({pattern}) both select the layers with experts.",
            "use moe_frequency=1, or moe_layer_freq=1",
        )
    elif every > layers:
        yield Finding.error(
            ("moe_frequency", "num_layers"),
            f"`moe_frequency` ({every}) must not be above `num_layers` ({layers}): no layer would have experts.",
            f"use moe_frequency={layers} or less, or {_EXPERTS}=null",
        )
    elif isinstance(pattern, list) and len(pattern) != layers:
        yield Finding.error(
            ("moe_layer_freq", "num_layers"),
            f"`moe_layer_freq` must have a 0 or 1 for each of the {layers} layers (`num_layers`), but has "
            f"{len(pattern)}.",
            f"use a list of {layers}",
        )
    elif not any(layers_with_experts(keys)):
        yield Finding.error(
            ("moe_layer_freq", _EXPERTS),
            f"`moe_layer_freq` ({pattern}) leaves no layer for the {keys.num_moe_experts} experts of `{_EXPERTS}`.",
            f"use a 1 for each layer with experts, or {_EXPERTS}=null",
        )


def experts_have_no_inner_norm(keys: MoEKeys) -> Iterator[Finding]:
    """NormFormer's norm inside the MLP is not implemented for experts."""
    if keys.transformer_block_type == "normformer":
        yield Finding.error(
            ("transformer_block_type", _EXPERTS),
            f"`transformer_block_type` (normformer) is not supported with `{_EXPERTS}` ({keys.num_moe_experts}): "
            "experts have no inner norm.",
            f"use transformer_block_type=pre_ln, or {_EXPERTS}=null",
        )


def ffn_dropout_needs_dense_layers(keys: MoEKeys) -> Iterator[Finding]:
    """`ffn_dropout` applies to dense layers and shared experts; experts use `moe_dropout`."""
    unused = all(layers_with_experts(keys)) and keys.moe_shared_expert_intermediate_size is None
    if keys.ffn_dropout and unused:
        yield _no_effect(
            keys,
            "ffn_dropout",
            _EXPERTS,
            "where every layer has experts",
            f"use ffn_dropout=0 and moe_dropout={keys.ffn_dropout:g}, or ffn_dropout=0",
        )


# ---------------------------------------------------------------- the router


def t5_defaults_differ_from_gpt(keys: MoEKeys) -> Iterator[Finding]:
    """T5 defaults to the only router of NeMo's T5, which differs from GPT's default."""
    if keys.is_t5 and keys.moe_router_topk is None and keys.moe_router_load_balancing_type is None:
        yield Finding.info(
            (_EXPERTS, "moe_router_topk", _BALANCING),
            "`moe_router_topk` and `moe_router_load_balancing_type` are not set: each token is routed to one expert by "
            "`sinkhorn`, as in NeMo's T5.",
            f"use moe_router_topk=2 {_BALANCING}=aux_loss {_AUX}=0.01 to route as in GPT",
        )


def one_expert_needs_pre_softmax(keys: MoEKeys) -> Iterator[Finding]:
    """The softmax over a single expert is constant, so that the router gets no gradient from the loss."""
    if keys.num_moe_experts == 1:
        if needs_pre_softmax(keys):
            yield Finding.warning(
                (_EXPERTS, _SCORE),
                f"`{_EXPERTS}` (1) gives the router no gradient: the softmax over one expert is always 1, also with "
                "`moe_router_pre_softmax`.",
                f"use {_EXPERTS}=8, or null for a dense MLP",
            )
    elif needs_pre_softmax(keys) and not keys.moe_router_pre_softmax:
        yield Finding.warning(
            ("moe_router_pre_softmax", "moe_router_topk"),
            "`moe_router_topk` (1) uses the softmax over all experts, although `moe_router_pre_softmax` is False: over "
            "the selected expert it would always be 1, and the router would get no gradient.",
            "use moe_router_pre_softmax=true",
        )


def sinkhorn_balances_alone(keys: MoEKeys) -> Iterator[Finding]:
    """Sinkhorn balances the load itself, computes its own gates and does not support a capacity."""
    _, balancing = routing_of(keys)
    if balancing != "sinkhorn":
        return
    default_note = ", the default of a T5" if keys.moe_router_load_balancing_type is None else ""
    is_sinkhorn = f"`{_BALANCING}` (sinkhorn{default_note})"
    modern = f"{_BALANCING}=aux_loss moe_router_topk=2" if default_note else f"{_BALANCING}=aux_loss"
    needs_coefficient = (keys.moe_router_topk or 2) != keys.num_moe_experts and not getattr(keys, _BIAS)
    if needs_coefficient and not keys.moe_aux_loss_coeff:
        modern += f" {_AUX}=0.01"
    for name, why in (
        (_AUX, "balances the load itself"),
        (_FACTOR, "has no capacity"),
        (_PAD, "has no capacity"),
        (_DROPPING, "has no capacity"),
        (_BIAS, "balances the load itself"),
    ):
        if capacity_factor_of(keys) is not None if name == _FACTOR else getattr(keys, name):
            field = MoEKeys.model_fields[name]
            off = "null" if field.default is None else f"{field.default:g}" if name == _AUX else "false"
            yield Finding.error(
                (name, _BALANCING),
                f"`{name}` ({getattr(keys, name)}) cannot be combined with {is_sinkhorn}, which {why}.",
                f"use {modern}, or {name}={off}",
            )
    gates = ("moe_router_pre_softmax", _SCORE, "moe_router_topk_scaling_factor", *_GROUPS)
    for name in (*gates, "moe_token_drop_policy"):
        if getattr(keys, name) != MoEKeys.model_fields[name].default:
            why = "computes its own gates" if name in gates else "has no capacity"
            yield _no_effect(keys, name, _BALANCING, f"with {is_sinkhorn}, which {why}", f"use {modern}")


def score_function_fits_other_keys(keys: MoEKeys) -> Iterator[Finding]:
    """Softmax keys have no effect with sigmoid scores; the expert bias needs sigmoid scores, between 0 and 1."""
    _, balancing = routing_of(keys)
    if balancing == "sinkhorn":
        return
    sigmoid = keys.moe_router_score_function == "sigmoid"
    if sigmoid and keys.moe_router_pre_softmax:
        yield _no_effect(
            keys, "moe_router_pre_softmax", _SCORE, f"with `{_SCORE}` (sigmoid)", "use moe_router_pre_softmax=false"
        )
    if keys.moe_router_enable_expert_bias and not sigmoid:
        yield Finding.error(
            (_BIAS, _SCORE),
            f"`{_BIAS}` (True) needs scores between 0 and 1 and is not supported with `{_SCORE}` (softmax).",
            f"use {_SCORE}=sigmoid",
        )


def bias_update_rate_needs_bias(keys: MoEKeys) -> Iterator[Finding]:
    """The update rate has no effect without the expert bias."""
    name = "moe_router_bias_update_rate"
    if not keys.moe_router_enable_expert_bias and getattr(keys, name) != MoEKeys.model_fields[name].default:
        yield _no_effect(keys, name, _BIAS, f"without `{_BIAS}`", f"use {_BIAS}=true")


def expert_groups_are_valid(keys: MoEKeys) -> Iterator[Finding]:
    """The number of groups divides the number of experts, and the groups of a token have at least top-k experts."""
    experts, groups, chosen = keys.num_moe_experts, keys.moe_router_num_groups, keys.moe_router_group_topk
    topk, balancing = routing_of(keys)
    if experts is None or balancing == "sinkhorn" or (groups is None and chosen is None):
        return
    if groups is None or chosen is None:
        given, missing = _GROUPS if chosen is None else _GROUPS[::-1]
        yield _no_effect(keys, given, missing, f"without `{missing}`", f"set both, or {given}=null")
    elif experts % groups:
        valid = [str(number) for number in range(2, experts) if experts % number == 0] or ["null"]
        yield Finding.error(
            (_GROUPS[0], _EXPERTS),
            f"`{_EXPERTS}` ({experts}) must be a multiple of `{_GROUPS[0]}` ({groups}).",
            f"use {_GROUPS[0]}={', '.join(valid)}",
        )
    elif chosen > groups:
        yield Finding.error(
            (_GROUPS[1], _GROUPS[0]),
            f"`{_GROUPS[1]}` ({chosen}) must not be above `{_GROUPS[0]}` ({groups}).",
            f"use {_GROUPS[1]}={groups} or less",
        )
    elif topk > chosen * (experts // groups):
        yield Finding.error(
            (_GROUPS[1], "moe_router_topk", _GROUPS[0], _EXPERTS),
            f"`{_GROUPS[1]}` ({chosen}) of `{_GROUPS[0]}` ({groups}) have {chosen * (experts // groups)} experts, "
            f"fewer than `moe_router_topk` ({topk}).",
            f"use {_GROUPS[1]}={-(-topk * groups // experts)} or more",
        )
    elif chosen == groups:
        yield _no_effect(keys, _GROUPS[1], _GROUPS[0], f"if it equals `{_GROUPS[0]}`", f"use {_GROUPS[1]}=null")


# ---------------------------------------------------------------- load balancing and capacity


def forced_balance_is_for_benchmarks(keys: MoEKeys) -> Iterator[Finding]:
    """A router whose choices are random learns nothing from its gradients."""
    name = "moe_router_force_load_balancing"
    if getattr(keys, name):
        yield Finding.warning(
            (name,),
            f"`{name}` (True) sends tokens to random experts, for benchmarks only: the router learns nothing.",
            f"use {name}=false",
        )


def balancing_needs_a_coefficient(keys: MoEKeys) -> Iterator[Finding]:
    """A balancing loss needs a coefficient and vice versa.

    If every token goes to all experts, neither the loss nor the bias has anything to balance.
    """
    topk, balancing = routing_of(keys)
    everywhere = topk == keys.num_moe_experts
    if everywhere and balancing != "sinkhorn":
        where = f"where every token goes to all experts (`moe_router_topk` is `{_EXPERTS}`, {topk})"
        for name, off in ((_AUX, "0"), (_BIAS, "false")):
            if getattr(keys, name) and not (name == _AUX and balancing == "none"):
                yield _no_effect(keys, name, "moe_router_topk", where, f"use {name}={off}")
    if balancing == "none" and keys.moe_aux_loss_coeff:
        yield _no_effect(keys, _AUX, _BALANCING, f"with `{_BALANCING}` (none)", f"use {_BALANCING}=aux_loss")
    elif balancing == "aux_loss" and not (keys.moe_aux_loss_coeff or everywhere or keys.moe_router_enable_expert_bias):
        default_note = ", the default" if keys.moe_router_load_balancing_type is None else ""
        yield Finding.warning(
            (_AUX, _BALANCING, _EXPERTS),
            f"`{_BALANCING}` (aux_loss{default_note}) has no effect with `{_AUX}` (0): the load is not balanced.",
            f"use {_AUX}=0.01, or {_BALANCING}=none",
        )


def capacity_is_valid(keys: MoEKeys) -> Iterator[Finding]:
    """Padding and dropping need a capacity, which should be above 0 and below the number of tokens."""
    topk, balancing = routing_of(keys)
    if keys.num_moe_experts is None:
        return
    given, factor = keys.moe_expert_capacity_factor, capacity_factor_of(keys)
    if given is not None and given < 0:
        yield Finding.warning(
            (_FACTOR,),
            f"`{_FACTOR}` ({given:g}) is negative and treated as null, as in Megatron: no limit.",
            f"use {_FACTOR}=null",
        )
    if balancing == "sinkhorn":  # reported by `sinkhorn_balances_alone`
        return
    if given == 0:
        yield Finding.error(
            (_FACTOR,),
            f"`{_FACTOR}` (0) would drop every token.",
            f"use {_FACTOR}=1.0 for an even share per expert, or null for no limit",
        )
        return
    padded = False
    for name in (_PAD, _DROPPING):
        if not getattr(keys, name):
            continue
        padded = True
        if factor is None:
            yield Finding.error(
                (name, _FACTOR),
                f"`{name}` (True) needs a capacity: `{_FACTOR}` ({'null' if given is None else given}) sets no limit.",
                f"use {_FACTOR}=1.25, or {name}=false",
            )
    if keys.moe_token_dropping and not keys.moe_pad_expert_input_to_capacity and factor is not None:
        yield Finding.warning(
            (_DROPPING, _PAD),
            f"`{_DROPPING}` (True) is read as `{_PAD}` (True): drop beyond the capacity and pad up to it.",
            f"use {_PAD}=true",
        )
    if keys.moe_token_drop_policy != "probs" and factor is None:
        yield _no_effect(keys, "moe_token_drop_policy", _FACTOR, f"without `{_FACTOR}`", f"use {_FACTOR}=1.25")
    if factor is not None and not padded and factor * topk >= keys.num_moe_experts:
        enough = keys.num_moe_experts / topk
        yield _no_effect(
            keys,
            _FACTOR,
            _EXPERTS,
            f"from {enough:g} on (`{_EXPERTS}` / `moe_router_topk`), where the capacity is at least all tokens",
            f"use {_FACTOR}=null, or less than {enough:g}",
        )


# ---------------------------------------------------------------- implementation


def sequential_experts_are_slow(keys: MoEKeys) -> Iterator[Finding]:
    """`moe_grouped_gemm=False`, NeMo's default, is the slow reference implementation."""
    if keys.moe_grouped_gemm is None:
        return
    if keys.moe_pad_expert_input_to_capacity or keys.moe_token_dropping:
        if keys.moe_grouped_gemm is False:
            yield _no_effect(
                keys,
                "moe_grouped_gemm",
                _PAD if keys.moe_pad_expert_input_to_capacity else _DROPPING,
                "with experts padded to their capacity, which are computed by one batched matmul",
                "use moe_grouped_gemm=null",
            )
    elif keys.moe_grouped_gemm is False:
        yield Finding.info(
            ("moe_grouped_gemm",),
            "`moe_grouped_gemm` (False) loops over the experts, which is slower and gives the same results.",
            "use moe_grouped_gemm=null",
        )


MOE_RULES: tuple[Callable[[MoEKeys], Iterator[Finding]], ...] = (
    topk_is_within_experts,
    moe_layers_are_set_once,
    experts_have_no_inner_norm,
    ffn_dropout_needs_dense_layers,
    t5_defaults_differ_from_gpt,
    one_expert_needs_pre_softmax,
    sinkhorn_balances_alone,
    score_function_fits_other_keys,
    bias_update_rate_needs_bias,
    expert_groups_are_valid,
    forced_balance_is_for_benchmarks,
    balancing_needs_a_coefficient,
    capacity_is_valid,
    sequential_experts_are_slow,
)
