"""What a mixture of experts needs to know, derived once from the keys of its stack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .moe import Balancing
from .stack import StackKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESlice:
    """The experts of a stack.

    Attributes:
        experts: experts in each layer that has them.
        topk: experts of a token.
        balancing: how tokens are spread over them.
        aux_loss: factor of the load-balancing loss; 0 for none.
        z_loss: factor of the z loss; 0 for none.
        jitter: noise of the router's input in training, 1 - jitter to 1 + jitter; None for none.
        capacity_factor: of what an expert takes at most; None for no limit.
        pad_to_capacity: every expert computes exactly as many rows as its capacity.
        drop_policy: which tokens an expert keeps beyond its capacity: those of the largest gates, or the first.
        implementation: all experts in one kernel, or one after the other.
        pre_softmax: softmax over all experts, before the choice.
        score: from logits to scores.
        topk_scaling: factor of the gates; None for none.
        num_groups: equal groups the experts form; None for no groups.
        group_topk: groups a token may use; None for no groups.
        bias_update_rate: step of the bias that balances without a loss; None for no such bias.
        router_dtype: arithmetic of the router.
        ffn_hidden_size: width of an expert.
        dropout: inside an expert, after the activation.
        shared_ffn_hidden_size: width of the MLP that every token passes besides; None for none.
        layers: for each layer of the stack, whether it has experts.
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
        """Whether the host reads how many tokens each expert has, and waits for the device to know."""
        return self.implementation == "sequential" and not self.pad_to_capacity


def has_experts(keys: StackKeys, *, of_t5: bool) -> bool:
    """Whether the keys ask for experts; NeMo's T5 says 1 for none."""
    return keys.num_moe_experts is not None and not (of_t5 and keys.num_moe_experts == 1)


def routing_of(keys: StackKeys, *, of_t5: bool) -> tuple[int, Balancing]:
    """Experts of a token and how they are balanced, where the keys may leave it to the family."""
    topk, balancing = keys.moe_router_topk, keys.moe_router_load_balancing_type
    if balancing is None:
        balancing = "sinkhorn" if of_t5 and topk is None else "aux_loss"
    if topk is None:
        topk = 1 if of_t5 and balancing == "sinkhorn" else 2
    return topk, balancing


def capacity_factor_of(keys: StackKeys) -> float | None:
    """The capacity factor; Megatron reads a negative one as none."""
    factor = keys.moe_expert_capacity_factor
    return None if factor is None or factor < 0 else factor


def layers_with_experts(keys: StackKeys) -> tuple[bool, ...]:
    """For each layer of the stack, whether it has experts; a list that is too short leaves out the rest."""
    every, pattern = keys.moe_frequency, keys.moe_layer_freq
    if isinstance(pattern, list):
        padded = [*pattern, *[0] * keys.num_layers]
        return tuple(padded[layer] == 1 for layer in range(keys.num_layers))
    return tuple(layer % pattern == 0 and (layer + 1) % every == 0 for layer in range(keys.num_layers))


def needs_pre_softmax(keys: StackKeys, *, of_t5: bool) -> bool:
    """Whether the chosen experts are one, of which a softmax is 1 and has no gradient (Megatron-LM #894)."""
    topk, balancing = routing_of(keys, of_t5=of_t5)
    return topk == 1 and balancing != "sinkhorn" and keys.moe_router_score_function == "softmax"


def moe_slice(keys: StackKeys, *, of_t5: bool = False) -> MoESlice | None:
    """The experts the keys describe, None for a dense stack.

    Args:
        keys: of the stack; the rules have found no error in them.
        of_t5: the stack is one of a T5, where one expert is a dense MLP and the router is `sinkhorn` with top-1 unless
            the keys say otherwise, as in NeMo.
    """
    if keys.num_moe_experts is None or not has_experts(keys, of_t5=of_t5):
        return None
    topk, balancing = routing_of(keys, of_t5=of_t5)
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
        pre_softmax=keys.moe_router_pre_softmax or needs_pre_softmax(keys, of_t5=of_t5),
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
