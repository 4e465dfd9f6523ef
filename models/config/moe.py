"""Mixture of experts of a stack: keys, and what they resolve to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .dense_stack import DenseStackKeys

Balancing = Literal["aux_loss", "sinkhorn", "none"]
LayerPattern = Annotated[list[Annotated[int, Field(ge=0, le=1)]], Field(min_length=1)]


class MoEKeys(DenseStackKeys):
    """Mixture of experts in place of the MLP (nemo_semantics 1.11 and 2).

    In a T5, a single expert is a dense MLP and the default router is top-1 `sinkhorn`, as in NeMo.
    """

    is_t5: ClassVar[bool] = False

    num_moe_experts: int | None = Field(None, ge=1)
    """Number of experts per MoE layer; null: dense MLPs. 1 is a single expert with a router; in a T5 it is a dense MLP,
    as in NeMo."""
    moe_router_topk: int | None = Field(None, ge=1)
    """Experts per token; null: 2, or 1 in a T5 with `sinkhorn`."""
    moe_router_load_balancing_type: Balancing | None = None
    """Load balancing: an auxiliary loss (`aux_loss`, arXiv 2101.03961), Sinkhorn routing in training (`sinkhorn`,
    arXiv 2202.01169) or `none`; null: `aux_loss`, or `sinkhorn` in a T5 without `moe_router_topk`, as in NeMo's T5."""
    moe_aux_loss_coeff: float = Field(0.0, ge=0)
    """Coefficient of the load-balancing loss, typically 0.01; 0: no balancing."""
    moe_z_loss_coeff: float | None = Field(None, ge=0)
    """Coefficient of the router z-loss, the mean squared log-sum-exp of the router logits, which keeps them small
    (arXiv 2202.08906), typically 0.001; null and 0: none."""
    moe_input_jitter_eps: float | None = Field(None, gt=0, lt=1)
    """Multiply the router's input by uniform noise between 1 - eps and 1 + eps, in training only; null: none."""
    moe_router_force_load_balancing: bool = False
    """For benchmarks only: random router logits in training, so that every expert gets about its share of the tokens
    and the router learns nothing; their gradient is given to the router's own logits."""
    moe_token_dropping: bool = False
    """True: drop and pad, the same as `moe_pad_expert_input_to_capacity`; needs a `moe_expert_capacity_factor`."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "alltoall_seq", "flex"] | None = None
    """How tokens are sent to experts on other ranks (`expert_model_parallel_size`): to these alone (`alltoall`,
    `alltoall_seq`), or to all ranks (`allgather`); null: `alltoall`. `flex`: in training to these alone, by a
    kernel that writes into their memory, on GPUs of one host that read each other's; not with padding to the
    capacity."""
    moe_per_layer_logging: bool = False
    """Log the losses and the load of each layer in addition to the means over layers."""
    moe_expert_capacity_factor: float | None = None
    """Capacity of an expert: ceil(tokens * top-k / experts * factor) tokens of a micro batch; tokens beyond it are
    dropped and only pass through the residual stream. null, or negative as in Megatron: no limit."""
    moe_pad_expert_input_to_capacity: bool = False
    """Pad the input of every expert to its capacity."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Tokens that an expert over capacity keeps: those with the largest gates (`probs`) or the first (`position`)."""
    moe_layer_recompute: bool = False
    """Recompute router and experts in the backward pass instead of saving their activations."""
    moe_grouped_gemm: bool | None = None
    """True and null: grouped GEMMs over all experts on a GPU. False: loop over the experts, the slow reference. The
    results are the same."""
    moe_router_pre_softmax: bool = False
    """True: softmax over all experts before top-k selection, so that gates sum to less than 1; False: softmax over the
    selected experts (Mixtral)."""
    moe_ffn_hidden_size: int | None = Field(None, ge=1)
    """FFN width of an expert; null: `ffn_hidden_size`."""
    moe_layer_freq: Annotated[int, Field(ge=1)] | LayerPattern = 1
    """Layers with experts: n for every n-th layer, starting with the first; or a list with 0 or 1 for each layer."""
    moe_frequency: int = Field(1, ge=1)
    """Every n-th layer has experts, counted from 1 as in NeMo's T5: 3 in a stack of 4 layers is the third only."""
    moe_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout inside the experts, after the activation; `ffn_dropout` applies to dense layers."""
    moe_shared_expert_intermediate_size: int | None = Field(None, ge=1)
    """FFN width of the shared expert, which processes every token; null: none."""
    moe_router_dtype: Literal["fp32", "fp64"] = "fp32"
    """Compute dtype of the router, independent of the precision of the run."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Score function of the router. `sigmoid`: gates are the selected scores divided by their sum (DeepSeek-V3)."""
    moe_router_enable_expert_bias: bool = False
    """Auxiliary-loss-free load balancing (arXiv 2408.15664): a bias on each expert's score, for selection only, is
    increased after each step in which the expert got less than its share, and decreased if it got more. Needs
    `sigmoid`. Biases of routers that are frozen in fine-tuning are not updated."""
    moe_router_bias_update_rate: float = Field(1e-3, gt=0)
    """Update of that bias per step."""
    moe_router_topk_scaling_factor: float | None = Field(None, gt=0)
    """Scaling factor of the gates; null: 1."""
    moe_router_num_groups: int | None = Field(None, ge=1)
    """Number of equal expert groups, of which a token may use `moe_router_group_topk`; null: no groups."""
    moe_router_group_topk: int | None = Field(None, ge=1)
    """Groups per token: those with the largest sums of their best scores (DeepSeek-V3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESlice:
    """Experts of a stack, as the keys of `MoEKeys` describe them; None and a coefficient of 0 stand for none.

    Attributes:
        jitter: the router's input is multiplied by uniform noise from 1 - jitter to 1 + jitter, in training.
        force_load_balancing: the logits of the router are random in training, for benchmarks.
        implementation: grouped GEMMs, or a loop over the experts.
        dispatcher: how tokens get to experts on other ranks.
        bias_update_rate: update rate of the expert bias; None without this bias.
        dropout: dropout probability inside an expert, after the activation.
        layers: True for each layer of the stack that has experts.
    """

    experts: int
    topk: int
    balancing: Balancing
    aux_loss: float
    z_loss: float
    jitter: float | None
    force_load_balancing: bool
    capacity_factor: float | None
    pad_to_capacity: bool
    drop_policy: Literal["probs", "position"]
    implementation: Literal["grouped", "sequential"]
    dispatcher: Literal["alltoall", "allgather", "flex"]
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


def has_experts(keys: MoEKeys) -> bool:
    """Return True if the stack has experts; in a T5 a single expert is a dense MLP, as in NeMo."""
    return keys.num_moe_experts is not None and not (keys.is_t5 and keys.num_moe_experts == 1)


def routing_of(keys: MoEKeys) -> tuple[int, Balancing]:
    """Return top-k and load balancing, with the defaults of the family."""
    topk, balancing = keys.moe_router_topk, keys.moe_router_load_balancing_type
    if balancing is None:
        balancing = "sinkhorn" if keys.is_t5 and topk is None else "aux_loss"
    if topk is None:
        topk = 1 if keys.is_t5 and balancing == "sinkhorn" else 2
    return topk, balancing


def capacity_factor_of(keys: MoEKeys) -> float | None:
    """Return the capacity factor; a negative one is None, as in Megatron."""
    factor = keys.moe_expert_capacity_factor
    return None if factor is None or factor < 0 else factor


def layers_with_experts(keys: MoEKeys) -> tuple[bool, ...]:
    """Return True for each layer of the stack that has experts; layers beyond a list that is too short have none."""
    every, pattern = keys.moe_frequency, keys.moe_layer_freq
    if isinstance(pattern, list):
        padded = [*pattern, *[0] * keys.num_layers]
        return tuple(padded[layer] == 1 for layer in range(keys.num_layers))
    return tuple(layer % pattern == 0 and (layer + 1) % every == 0 for layer in range(keys.num_layers))


def needs_pre_softmax(keys: MoEKeys) -> bool:
    """Return True if the softmax over the selected expert would be constant, without gradient (Megatron-LM #894)."""
    topk, balancing = routing_of(keys)
    return topk == 1 and balancing != "sinkhorn" and keys.moe_router_score_function == "softmax"


def moe_slice(keys: MoEKeys) -> MoESlice | None:
    """Resolve the experts of a stack; None for a dense stack.

    Args:
        keys: keys of the stack, already validated by the rules.
    """
    if keys.num_moe_experts is None or not has_experts(keys):
        return None
    topk, balancing = routing_of(keys)
    dispatcher = keys.moe_token_dispatcher_type
    grouped = keys.moe_router_num_groups is not None and keys.moe_router_group_topk is not None
    return MoESlice(
        experts=keys.num_moe_experts,
        topk=topk,
        balancing=balancing,
        aux_loss=keys.moe_aux_loss_coeff if balancing == "aux_loss" else 0.0,
        z_loss=keys.moe_z_loss_coeff or 0.0,
        jitter=keys.moe_input_jitter_eps,
        force_load_balancing=keys.moe_router_force_load_balancing,
        capacity_factor=capacity_factor_of(keys),
        pad_to_capacity=keys.moe_pad_expert_input_to_capacity or keys.moe_token_dropping,
        drop_policy=keys.moe_token_drop_policy,
        implementation="sequential" if keys.moe_grouped_gemm is False else "grouped",
        dispatcher="alltoall" if dispatcher in (None, "alltoall_seq") else dispatcher,
        pre_softmax=keys.moe_router_pre_softmax or needs_pre_softmax(keys),
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
