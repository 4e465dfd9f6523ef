"""Per-step state of MoE layers outside the optimizer: scale of the router losses and update of the expert bias.

All updates are in place on the device, without synchronization, so that compiled layers and CUDA graphs see them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

import torch
from torch import Tensor

from ...models.build import LanguageModel
from ...models.config.families import keys_by_stack
from ...models.config.stack import StackKeys
from ...models.moe.moe_layer import MoE, find_moe_layers
from ..config.schema.root import AnyModelBlock
from ..distributed.process_group import DistributedContext


class ExpertBalancer:
    """Update the MoE layers around every optimizer step.

    Router losses are means over the tokens of a micro batch. Since gradients are summed over micro batches and ranks,
    their gradients are scaled by 1 / (micro batches of the global batch on all ranks), which gives the mean over micro
    batches however these are distributed.

    The expert bias (arXiv 2408.15664; Megatron's `moe_router_enable_expert_bias`) is updated after each step by
    rate * sign(mean(counts) - counts), where counts are the tokens per expert in the global batch.

    Args:
        layers: MoE layers by name.
        micro_batches: maps completed steps to the number of micro batches of the next step, on all ranks.
        bias_rates: update rates of the layers with an expert bias, by name.
        ranks: ranks with other samples.
    """

    def __init__(
        self,
        layers: Mapping[str, MoE],
        micro_batches: Callable[[int], int],
        *,
        bias_rates: Mapping[str, float],
        ranks: DistributedContext,
    ) -> None:
        self._layers = list(layers.values())
        self._micro_batches = micro_batches
        self._ranks = ranks
        # Layers of equal size and rate are updated together. Buffers are looked up each time, because moving a module
        # to another device replaces them.
        self._biased: dict[tuple[int, float], list[MoE]] = {}
        for name, rate in bias_rates.items():
            layer = layers[name]
            self._biased.setdefault((len(layer.router.weight), rate), []).append(layer)

    @torch.no_grad()
    def before_step(self, step: int, loss_scale: Tensor | None = None) -> None:
        """Set the router loss scale of the layers for the step after `step` completed ones, times `loss_scale`."""
        shares = _of("loss_share", self._layers)
        torch._foreach_zero_(shares)
        torch._foreach_add_(shares, 1.0 / self._micro_batches(step))
        if loss_scale is not None:
            torch._foreach_mul_(shares, loss_scale)

    @torch.no_grad()
    def after_update(self, grad_norm: Tensor) -> None:
        """Update the expert biases from the token counts of this step, and reset the counts.

        Args:
            grad_norm: gradient norm of the step; if not finite, the step was skipped and the biases are unchanged.
        """
        for (_, rate), layers in self._biased.items():
            step_counts = _of("step_counts", layers)
            counts = self._ranks.all_reduce_(torch.stack(step_counts))
            deltas = rate * (counts.mean(dim=1, keepdim=True) - counts).sign()
            deltas = torch.where(grad_norm.isfinite(), deltas, 0.0)
            torch._foreach_add_(_of("expert_bias", layers), list(deltas.unbind()))
            torch._foreach_zero_(step_counts)


def build_expert_balancer(
    keys: AnyModelBlock, model: LanguageModel, micro_batches: Callable[[int], int], ranks: DistributedContext
) -> ExpertBalancer | None:
    """Build the `ExpertBalancer` of a model, or None without MoE layers."""
    layers = find_moe_layers(model)
    if not layers:
        return None
    rates = {
        name: stack_keys_of(keys, name).moe_router_bias_update_rate
        for name, layer in layers.items()
        if layer.updates_expert_bias
    }
    return ExpertBalancer(layers, micro_batches, bias_rates=rates, ranks=ranks)


def stack_keys_of(keys: AnyModelBlock, layer: str) -> StackKeys:
    """Return the keys of the stack that contains a layer, given its name (`decoder.layers.3.mlp`)."""
    stacks = keys_by_stack(keys)
    return stacks.get(f"{layer.partition('.')[0]}.") or stacks[""]


def _of(name: str, layers: list[MoE]) -> list[Tensor]:
    return list(map(attrgetter(name), layers))
