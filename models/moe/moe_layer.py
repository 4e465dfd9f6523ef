"""Mixture-of-experts layer: router, experts, optional shared expert, and router statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from ...kernels.fp8.expert_rows import expert_row_multiple
from ...kernels.moe.routing import expert_capacity
from ..config.moe import MoESlice
from ..config.stack import StackSlice
from ..layers.cost import Matrix, PartMemory, SavedTensors, StackInputs, Weights
from ..layers.dropout import ROUTER_NOISE, LayerDropout
from ..layers.mlp import MLP, build_mlp, mlp_memory, mlp_traffic, mlp_weights
from ..memory.recompute import RecomputableModule, run_with_recompute
from ..parallel.traffic import Collective, CommunicationAxis
from .experts import Experts, build_experts
from .router import STATISTIC_NAMES, Router, Routing, router_saved_bytes


class MoE(RecomputableModule):
    """Mixture of experts: each token is processed by its top-k experts and by the shared expert.

    Recomputed: router and experts.

    Router statistics, in training only, are added to buffers in place, which works in compiled layers and CUDA graphs.
    The buffers stay in fp32 whatever dtype the model is cast to.

    Args:
        router: chooses the experts.
        experts: all experts.
        shared: shared expert that processes every token; None without.
        expert_bias: keep a bias on the scores that select experts, updated in training for load balancing without an
            auxiliary loss (arXiv 2408.15664).

    Attributes:
        statistics: fp32 (experts + 6): sum of `Routing.statistics` since it was last zeroed; non-persistent.
        loss_share: fp32 scalar: share of a micro batch in its global batch, a factor of the gradients of the auxiliary
            losses; non-persistent.
        expert_bias: fp32 (experts,), persistent; None without.
        step_counts: fp32 (experts,): tokens per expert since the last optimizer step, non-persistent; None without
            `expert_bias`.
    """

    statistics: Tensor
    loss_share: Tensor
    expert_bias: Tensor | None
    step_counts: Tensor | None

    def __init__(self, router: Router, experts: Experts, *, shared: MLP | None, expert_bias: bool) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        number = len(router.weight)
        self.register_buffer("statistics", torch.zeros(number + len(STATISTIC_NAMES)), persistent=False)
        self.register_buffer("loss_share", torch.ones(()), persistent=False)
        self.register_buffer("expert_bias", torch.zeros(number) if expert_bias else None)
        self.register_buffer("step_counts", torch.zeros(number) if expert_bias else None, persistent=False)

    @property
    def updates_expert_bias(self) -> bool:
        """True if training updates the expert bias: it is frozen together with the router weight."""
        return self.expert_bias is not None and self.router.weight.requires_grad

    def forward(self, hidden: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return the output of `forward_with_statistics`, and `update_statistics` in training."""
        output, sums = self.forward_with_statistics(hidden, padding)
        if self.training:
            self.update_statistics(sums)
        return output

    def forward_with_statistics(
        self,
        hidden: Tensor,
        padding: Tensor | None = None,
        norm: Callable[[Tensor], Tensor] | None = None,
        *,
        batch: int | None = None,
        use_capacity: bool = True,
        residual: Tensor | None = None,
        dropout: LayerDropout | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the layer without updating its buffers, so that it can be recomputed.

        Args:
            hidden: (batch, tokens, hidden_size), already normed unless `norm` is given.
            padding: bool (batch, tokens of all ranks), True for real tokens; others are not routed, nor counted in
                losses or statistics. None: all are real.
            norm: norm to apply to `hidden`, recomputed together with the layer; None if it has been applied.
            batch: samples of `hidden`, if it is sharded over tokens; None if not.
            use_capacity: apply the capacity factor, if there is one. Off in generation, whose output must not depend on
                the other sequences of the batch.
            residual: residual stream to add the output to, shaped like `hidden`; None without.
            dropout: dropouts of the layer in this forward; None outside training or without dropout.

        Returns:
            (batch, tokens, hidden_size), and the router statistics for `update_statistics`.
        """
        real = None if padding is None else padding.flatten()
        samples = len(hidden) if batch is None else batch
        if self.is_recomputed:
            output, sums = run_with_recompute(
                self._run, self.preserve_rng_state, hidden, real, norm, samples, use_capacity, dropout=dropout
            )
            return (output if residual is None else residual + output), sums
        return self._run(hidden, real, norm, samples, use_capacity, residual, dropout)

    def update_statistics(self, statistics: Tensor) -> None:
        """Accumulate the router statistics of one training forward."""
        with torch.no_grad():
            self.statistics.add_(statistics)
            if self.step_counts is not None:
                self.step_counts.add_(statistics[: len(self.step_counts)])

    def _run(
        self,
        hidden: Tensor,
        real: Tensor | None,
        norm: Callable[[Tensor], Tensor] | None,
        batch: int,
        use_capacity: bool,
        residual: Tensor | None = None,
        dropout: LayerDropout | None = None,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden if norm is None else norm(hidden)
        routing = self.route(tokens, real, batch, dropout, use_capacity)
        return self.run_experts(tokens, routing, residual, dropout), routing.statistics

    def route(
        self, hidden: Tensor, real: Tensor | None, batch: int, dropout: LayerDropout | None, use_capacity: bool
    ) -> Routing:
        """Choose the experts of tokens (batch, tokens, hidden_size); others as in `forward_with_statistics`.

        Args:
            hidden: the tokens, normed.
            real: `padding`, flattened.
            batch: samples of the tokens.
            dropout: dropouts of the layer.
            use_capacity: apply the capacity factor, if there is one.
        """
        return self.router(
            hidden.flatten(0, 1),
            self.expert_bias,
            self.loss_share,
            real,
            batch=batch,
            noise=None if dropout is None else dropout.of_stream(ROUTER_NOISE),
            use_capacity=use_capacity,
        )

    def run_experts(
        self, hidden: Tensor, routing: Routing, residual: Tensor | None, dropout: LayerDropout | None
    ) -> Tensor:
        """Return the output of the experts chosen for normed tokens (batch, tokens, hidden_size), plus `residual`."""
        tokens, shared = hidden.flatten(0, 1), self.shared
        if residual is not None and shared is None:
            return self.experts.add_to_residual(residual.flatten(0, 1), tokens, routing, dropout).view_as(hidden)
        if shared is None:
            output = self.experts(tokens, routing, dropout=dropout)
        else:
            output = self.experts(
                tokens, routing, lambda: shared(tokens.view_as(hidden), dropout=dropout).flatten(0, 1), dropout
            )
        output = output.view_as(hidden)
        return output if residual is None else residual + output

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the module, keeping its buffers in fp32.

        Statistics are reset: a cast rounds them, and a move from the meta device leaves them uninitialized. The expert
        bias keeps its value.
        """
        bias = self.expert_bias
        super()._apply(fn, recurse)
        device, number = self.router.weight.device, len(self.router.weight)
        self.statistics = torch.zeros(number + len(STATISTIC_NAMES), device=device)
        self.loss_share = torch.ones((), device=device)
        if bias is not None:
            leaves_meta = bias.is_meta and device.type != "meta"
            self.expert_bias = torch.zeros(number, device=device) if leaves_meta else bias.to(device)
            self.step_counts = torch.zeros(number, device=device)
        return self


def find_moe_layers(model: nn.Module) -> dict[str, MoE]:
    """Return the MoE modules by name (`decoder.layers.3.mlp`), in forward order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def build_moe(stack: StackSlice, moe: MoESlice) -> MoE:
    """Build the mixture of experts of a layer."""
    shared = build_mlp(stack, moe.shared_ffn_hidden_size) if moe.shared_ffn_hidden_size else None
    router, experts = Router(stack.hidden_size, moe), build_experts(stack, moe)
    return MoE(router, experts, shared=shared, expert_bias=moe.bias_update_rate is not None)


# ---------------------------------------------------------------- cost


def moe_weights(stack: StackSlice, moe: MoESlice, *, active: bool = False, expert_ranks: int = 1) -> Weights:
    """Return the weights of router, experts and shared expert of one of `expert_ranks`; `active`: only those of `topk`
    experts.
    """
    router = Weights((Matrix("router", moe.experts * stack.hidden_size),))
    experts = mlp_weights(stack, moe.ffn_hidden_size, moe.topk if active else moe.experts // expert_ranks, experts=True)
    shared = moe.shared_ffn_hidden_size
    return router + experts + (mlp_weights(stack, shared) if shared else Weights())


def expert_rows(moe: MoESlice, tokens: int, routed: int) -> int:
    """Return the number of rows the experts of a layer compute for the `tokens` of a rank: N * K unless padded to the
    capacity for the `routed` tokens of the micro batch, which other ranks may share.
    """
    if moe.capacity_factor is not None and moe.pad_to_capacity:
        return moe.experts * min(tokens, expert_capacity(routed, moe.experts, moe.topk, moe.capacity_factor))
    return tokens * moe.topk


def moe_traffic(inputs: StackInputs, moe: MoESlice) -> tuple[Collective, ...]:
    """Return the traffic of a MoE layer: router, shared expert, and the tokens sent to experts of other ranks and back.

    Experts are assumed to be chosen evenly, and no assignment to be dropped unless experts are padded.
    """
    logits = inputs.tokens * moe.experts * (8 if moe.router_dtype == "fp64" else 4)
    routed: tuple[Collective, ...] = ()
    if inputs.residual_tokens < inputs.tokens:
        routed = (Collective("tensor", "all-gather", logits, "forward"),)
    if inputs.mesh.context > 1:
        routed = (*routed, Collective("context", "all-gather", logits * inputs.mesh.context, "forward"))
    shared = mlp_traffic(inputs) if moe.shared_ffn_hidden_size else ()
    routed = (*routed, *_expert_amax_traffic(inputs))
    return (*routed, *shared) if inputs.mesh.expert == 1 else (*routed, *shared, *_dispatch_traffic(inputs, moe))


def _expert_amax_traffic(inputs: StackInputs) -> tuple[Collective, ...]:
    """Return the traffic of the amaxes of experts in fp8: of rows and both weights; of the output's gradient, and of
    gradient and result of the activation together.
    """
    mesh = inputs.mesh
    if not inputs.experts_in_fp8 or not inputs.agrees_on_amaxes:
        return ()
    found, weights = list[Collective](), 0 if inputs.keeps_fp8_casts else 2
    axes: dict[CommunicationAxis, int] = {"tensor": 1, "context": 1, "expert": 1 + weights}
    sizes = mesh.tensor if mesh.sequence else 1, mesh.context, mesh.expert
    for (axis, number), size in zip(axes.items(), sizes, strict=True):
        if size == 1:
            continue
        found.append(Collective(axis, "all-reduce", 4 * number, "forward", number=number))
        found.append(Collective(axis, "all-reduce", 4 * 3, "backward", number=2))
    return tuple(found)


def _dispatch_traffic(inputs: StackInputs, moe: MoESlice) -> tuple[Collective, ...]:
    """Return the traffic of dispatching tokens with their gates, and of combining the outputs."""
    ranks, tokens, gate = inputs.mesh.expert, inputs.residual_tokens, 8 if moe.router_dtype == "fp64" else 4
    width = inputs.stack.hidden_size * inputs.widths.compute
    if moe.dispatcher == "allgather":
        rows, gates = tokens * ranks * width, tokens * ranks * moe.topk * gate
        chosen = tokens * ranks * moe.topk * 8
        return (
            Collective("expert", "all-gather", rows + gates + chosen, "forward", number=3),
            Collective("expert", "reduce-scatter", rows, "forward"),
            Collective("expert", "all-gather", rows, "backward"),
            Collective("expert", "reduce-scatter", rows + gates, "backward", number=2),
        )
    rows, counts = expert_rows(moe, tokens, inputs.routed_tokens), 0 if moe.pad_to_capacity else moe.experts * 8
    exchanged = Collective("expert", "all-to-all", rows * (2 * width + gate), "backward", number=3)
    number = exchanged.number + bool(counts)
    return exchanged._replace(during="forward", num_bytes=exchanged.num_bytes + counts, number=number), exchanged


def runs_eager_experts(inputs: StackInputs, moe: MoESlice) -> bool:
    """Return True if the experts run as separate operations, not as the fused one that saves less."""
    separate = inputs.lora_experts or bool(moe.dropout) or moe.pad_to_capacity or moe.implementation == "sequential"
    return separate or inputs.stack.mlp.is_own


def moe_memory(inputs: StackInputs, moe: MoESlice) -> PartMemory:
    """Return the memory of router, experts and shared expert."""
    stack, widths, tokens = inputs.stack, inputs.widths, inputs.residual_tokens
    e, hidden = widths.compute, stack.hidden_size
    ups = 2 if stack.mlp.gated else 1
    rows, width = expert_rows(moe, tokens, inputs.routed_tokens), moe.ffn_hidden_size
    fp8 = inputs.fp8 if inputs.experts_in_fp8 else None
    if fp8 is not None:  # the rows of each expert begin at a multiple
        experts = moe.experts // inputs.mesh.expert
        multiple = expert_row_multiple(fp8.inputs, rows, experts)
        rows = -(-(rows + experts * (multiple - 1)) // multiple) * multiple
    kept = [
        SavedTensors("experts", router_saved_bytes(inputs, moe), "moe"),
        SavedTensors("experts", rows * width * ups * e, "moe"),
    ]
    if fp8 is not None:  # the cast of gathered rows, and two maxima of each row of the activation
        cast = 0 if inputs.frozen_matrices else inputs.saved_input_bytes(rows, hidden)
        maxima = 8 * rows if fp8.inputs == "tensor" else 0
        kept.append(SavedTensors("experts", cast + maxima, "moe"))
    elif runs_eager_experts(inputs, moe):  # gathered rows, inputs of fc2, outputs of fc2
        kept.append(SavedTensors("experts", rows * (2 * hidden + width) * e, "moe"))
    if moe.dropout and not inputs.compiled:  # the scaled mask
        kept.append(SavedTensors("dropout", tokens * moe.topk * width * e, "moe"))
    elif not moe.dropout and inputs.mesh.expert > 1 and not inputs.experts_in_fp8:  # rows received from other ranks
        kept.append(SavedTensors("experts", rows * hidden * e, "moe"))
    activation_gradients = rows * width * e * (2 + ups)
    if fp8 is not None:  # the gradient of the activation's result, its backward in fp8 in both layouts, and the result
        activation_gradients = rows * width * (e + 2 * ups + 1)
    weights = moe_weights(stack, moe, expert_ranks=inputs.mesh.expert).numel * widths.weights
    weight_gradients = rows * width * ups * e + rows * hidden * e + weights
    working, recompute_inputs = max(activation_gradients, weight_gradients), 0
    if moe.shared_ffn_hidden_size:
        shared = mlp_memory(inputs, moe.shared_ffn_hidden_size)
        if inputs.saves_fp8:  # the cast of its input, beside that of router and experts
            kept.append(SavedTensors("mlp", inputs.saved_norm_bytes, "moe"))
        kept += [each._replace(module=each.module or "moe", alternative_module="moe") for each in shared.saved]
        recompute_inputs = shared.recompute_inputs
    return PartMemory(tuple(kept), working, recompute_inputs=recompute_inputs)
