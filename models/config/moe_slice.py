"""Resolved configuration of the experts of a stack, derived once from its keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .moe import Balancing
from .stack import StackKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESlice:
    """Experts of a stack.

    Attributes:
        experts: number of experts per MoE layer.
        topk: experts per token.
        balancing: load balancing.
        aux_loss: coefficient of the load-balancing loss; 0 for none.
        z_loss: coefficient of the router z-loss; 0 for none.
        jitter: multiplicative noise of the router's input in training, 1 - jitter to 1 + jitter; None for none.
        capacity_factor: capacity factor of an expert; None for no limit.
        pad_to_capacity: pad the input of every expert to its capacity.
        drop_policy: tokens that an expert over capacity keeps: those with the largest gates, or the first.
        implementation: grouped GEMMs, or a loop over the experts.
        pre_softmax: softmax over all experts, before the selection.
        score: score function of the router.
        topk_scaling: scaling factor of the gates; None for none.
        num_groups: number of equal expert groups; None for no groups.
        group_topk: groups per token; None for no groups.
        bias_update_rate: update rate of the expert bias (auxiliary-loss-free balancing); None without this bias.
        router_dtype: compute dtype of the router.
        ffn_hidden_size: FFN width of an expert.
        dropout: dropout probability inside an expert, after the activation.
        shared_ffn_hidden_size: FFN width of the shared expert; None for none.
        layers: True for each layer of the stack that has experts.
    """

    experts: int
    topk: int
    balancing: Balancing
    aux_loss: float
    z_loss: float
    jitter: float | None
    capacity_factor: float | None
    pad_to_capacity: bool
    drop_policy: Literal["probs", "position"]
    implementation: Literal["grouped", "sequential"]
    pre_softmax: bool
    score: Literal["softmax", "sigmoid"]
    topk_scaling: float | None
    num_groups: int | None
    group_topk: int | None
    bias_update_rate: float | None
    router_dtype: Literal["fp32", "fp64"]
    ffn_hidden_size: int
    dropout: float
    shared_ffn_hidden_size: int | None
    layers: tuple[bool, ...]

    @property
    def reads_counts(self) -> bool:
        """True if token counts per expert are read on the host, which synchronizes with the device."""
        return self.implementation == "sequential" and not self.pad_to_capacity


def has_experts(keys: StackKeys, *, is_t5: bool) -> bool:
    """Return True if the stack has experts; in a T5 a single expert is a dense MLP, as in NeMo."""
    return keys.num_moe_experts is not None and not (is_t5 and keys.num_moe_experts == 1)


def routing_of(keys: StackKeys, *, is_t5: bool) -> tuple[int, Balancing]:
    """Return top-k and load balancing, with the defaults of the family."""
    topk, balancing = keys.moe_router_topk, keys.moe_router_load_balancing_type
    if balancing is None:
        balancing = "sinkhorn" if is_t5 and topk is None else "aux_loss"
    if topk is None:
        topk = 1 if is_t5 and balancing == "sinkhorn" else 2
    return topk, balancing


def capacity_factor_of(keys: StackKeys) -> float | None:
    """Return the capacity factor; a negative one is None, as in Megatron."""
    factor = keys.moe_expert_capacity_factor
    return None if factor is None or factor < 0 else factor


def layers_with_experts(keys: StackKeys) -> tuple[bool, ...]:
    """Return True for each layer of the stack that has experts; layers beyond a list that is too short have none."""
    every, pattern = keys.moe_frequency, keys.moe_layer_freq
    if isinstance(pattern, list):
        padded = [*pattern, *[0] * keys.num_layers]
        return tuple(padded[layer] == 1 for layer in range(keys.num_layers))
    return tuple(layer % pattern == 0 and (layer + 1) % every == 0 for layer in range(keys.num_layers))


def needs_pre_softmax(keys: StackKeys, *, is_t5: bool) -> bool:
    """Return True if the softmax over the selected expert would be constant, without gradient (Megatron-LM #894)."""
    topk, balancing = routing_of(keys, is_t5=is_t5)
    return topk == 1 and balancing != "sinkhorn" and keys.moe_router_score_function == "softmax"


def moe_slice(keys: StackKeys, *, is_t5: bool = False) -> MoESlice | None:
    """Resolve the experts of a stack; None for a dense stack.

    Args:
        keys: keys of the stack, already validated by the rules.
        is_t5: the stack belongs to a T5, where a single expert is a dense MLP and the default router is top-1
            `sinkhorn`, as in NeMo.
    """
    if keys.num_moe_experts is None or not has_experts(keys, is_t5=is_t5):
        return None
    topk, balancing = routing_of(keys, is_t5=is_t5)
    grouped = keys.moe_router_num_groups is not None and keys.moe_router_group_topk is not None
    return MoESlice(
        experts=keys.num_moe_experts,
        topk=topk,
        balancing=balancing,
        aux_loss=keys.moe_aux_loss_coeff if balancing == "aux_loss" else 0.0,
        z_loss=keys.moe_z_loss_coeff or 0.0,
        jitter=keys.moe_input_jitter_eps,
        capacity_factor=capacity_factor_of(keys),
        pad_to_capacity=keys.moe_pad_expert_input_to_capacity or keys.moe_token_dropping,
        drop_policy=keys.moe_token_drop_policy,
        implementation="sequential" if keys.moe_grouped_gemm is False else "grouped",
        pre_softmax=keys.moe_router_pre_softmax or needs_pre_softmax(keys, is_t5=is_t5),
        score=keys.moe_router_score_function,
        topk_scaling=keys.moe_router_topk_scaling_factor,
        num_groups=keys.moe_router_num_groups if grouped else None,
        group_topk=keys.moe_router_group_topk if grouped else None,
        bias_update_rate=keys.moe_router_bias_update_rate if keys.moe_router_enable_expert_bias else None,
        router_dtype=keys.moe_router_dtype,
        ffn_hidden_size=keys.moe_ffn_hidden_size or keys.ffn_hidden_size,
        dropout=keys.moe_dropout,
        shared_ffn_hidden_size=keys.moe_shared_expert_intermediate_size,
        layers=layers_with_experts(keys),
    )
