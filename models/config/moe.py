"""The keys of a mixture of experts: which layers have experts, how tokens are routed to them, how they compute."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .key_block import Block

Balancing = Literal["aux_loss", "sinkhorn", "none"]
LayerPattern = Annotated[list[Annotated[int, Field(ge=0, le=1)]], Field(min_length=1)]


class MoEKeys(Block):
    """A mixture of experts in place of the MLP (nemo_semantics 1.11 and 2)."""

    num_moe_experts: int | None = Field(None, ge=1)
    """Experts in each layer that has them; null: a dense MLP. 1 is one expert behind a router, in a T5 it is dense, as
    in NeMo."""
    moe_router_topk: int | None = Field(None, ge=1)
    """Experts of each token; null: 2, in a T5 with `sinkhorn` 1."""
    moe_router_load_balancing_type: Balancing | None = None
    """How tokens are spread evenly: a loss (`aux_loss`, arXiv 2101.03961), an assignment in training (`sinkhorn`,
    arXiv 2202.01169) or not at all (`none`); null: `aux_loss`, in a T5 without `moe_router_topk` `sinkhorn`, as NeMo's
    T5 had it."""
    moe_aux_loss_coeff: float = Field(0.0, ge=0)
    """Factor of the load-balancing loss; 0: nothing is balanced. 0.01 is usual."""
    moe_z_loss_coeff: float | None = Field(None, ge=0)
    """Factor of the mean squared log-sum-exp of the router's logits, which keeps them small (arXiv 2202.08906); 0.001
    is usual, null and 0: none."""
    moe_input_jitter_eps: float | None = Field(None, gt=0, lt=1)
    """What the router reads is multiplied with noise between 1 - eps and 1 + eps, in training only; null: none."""
    moe_token_dropping: bool = False
    """True: drop and pad, which is `moe_pad_expert_input_to_capacity` with a `moe_expert_capacity_factor`."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "alltoall_seq", "flex"] | None = None
    """How tokens reach experts on other devices. Every device has all experts here, so all of them are the same."""
    moe_per_layer_logging: bool = False
    """Log the losses and the load of each layer, besides the means over layers."""
    moe_expert_capacity_factor: float | None = None
    """An expert takes at most ceil(tokens * top-k / experts * factor) tokens of a micro batch and drops the rest, which
    pass by on the residual stream; null, or negative as in Megatron: no limit."""
    moe_pad_expert_input_to_capacity: bool = False
    """Every expert computes exactly as many rows as its capacity."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Beyond its capacity an expert keeps the tokens with the largest gates, or the first ones."""
    moe_layer_recompute: bool = False
    """Run the router and the experts again in the backward pass instead of keeping what they calculated."""
    moe_grouped_gemm: bool | None = None
    """True and null: the matrices of all experts in one kernel, on a GPU. False: one expert after the other, the slow
    reference. The results are the same."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the top-k are chosen, whose gates then add up to less than 1; False: softmax over
    the chosen ones (Mixtral)."""
    moe_ffn_hidden_size: int | None = Field(None, ge=1)
    """Width of an expert; null: `ffn_hidden_size`."""
    moe_layer_freq: Annotated[int, Field(ge=1)] | LayerPattern = 1
    """Which layers have experts: every so many, from the first one on; or a list with 0 or 1 for each layer."""
    moe_frequency: int = Field(1, ge=1)
    """The same counted from 1, as NeMo's T5 does: 3 in a stack of 4 layers is the third only."""
    moe_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout inside the experts, after the activation; `ffn_dropout` is that of dense layers."""
    moe_shared_expert_intermediate_size: int | None = Field(None, ge=1)
    """Width of an MLP that every token passes besides its experts; null: there is none."""
    moe_router_dtype: Literal["fp32", "fp64"] = "fp32"
    """The arithmetic of the router, whatever the precision of the run."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """From logits to scores. `sigmoid`: the gates are the chosen scores divided by their sum (DeepSeek-V3)."""
    moe_router_enable_expert_bias: bool = False
    """Balance without a loss (arXiv 2408.15664): a bias on each expert's score, for the choice only, goes up after each
    step where the expert got less than its share, and down where it got more. Needs `sigmoid`. Where fine-tuning
    freezes a router, its biases stay."""
    moe_router_bias_update_rate: float = Field(1e-3, gt=0)
    """How far that bias goes in a step."""
    moe_router_topk_scaling_factor: float | None = Field(None, gt=0)
    """Factor of the gates; null: 1."""
    moe_router_num_groups: int | None = Field(None, ge=1)
    """Experts form so many equal groups, of which a token may use `moe_router_group_topk`; null: no groups."""
    moe_router_group_topk: int | None = Field(None, ge=1)
    """Groups a token may use: those with the largest sums of their best scores (DeepSeek-V3)."""
