"""What training does to the experts of a model besides its optimizer: the share of a micro batch, the expert bias.

Everything is in place and on the device, without a wait, so that compiled layers and CUDA graphs read what is new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

import torch
from torch import Tensor

from ...models.build import LanguageModel
from ...models.config.family_rules import stacks_of_keys
from ...models.config.stack import StackKeys
from ...models.moe.find_moe_layers import moe_layers
from ...models.moe.moe_layer import MoE
from ..config.schema.root import AnyModelBlock, RootBlock
from ..distributed.process_group import Ranks


class ExpertBalance:
    """Goes with every step of a model with experts.

    The losses of the router are means over the tokens of a micro batch. Their gradients get the factor 1 / micro
    batches of the global batch on all ranks, whose gradients are summed: so they count once, as the mean over micro
    batches, however these are spread.

    The expert bias (arXiv 2408.15664; Megatron's `moe_router_enable_expert_bias`) moves after each step by
    rate * sign(mean of the counts - counts), where the counts are the tokens of each expert in the global batch.

    Args:
        layers: the layers with experts by name.
        micro_batches: completed steps to the micro batches of the step that follows, on all ranks.
        bias_rates: of the layers whose expert bias moves, by name.
        ranks: the processes of the run.
    """

    def __init__(
        self,
        layers: Mapping[str, MoE],
        micro_batches: Callable[[int], int],
        *,
        bias_rates: Mapping[str, float],
        ranks: Ranks,
    ) -> None:
        self._layers = list(layers.values())
        self._micro_batches = micro_batches
        self._ranks = ranks
        # Layers of one size and rate move together. The buffers themselves are looked up every time: moving a module
        # to a device replaces them.
        self._biased: dict[tuple[int, float], list[MoE]] = {}
        for name, rate in bias_rates.items():
            layer = layers[name]
            self._biased.setdefault((len(layer.router.weight), rate), []).append(layer)

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Tell the layers the share of a micro batch in the step that follows `step` completed ones."""
        shares = _of("loss_share", self._layers)
        torch._foreach_zero_(shares)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_add_(shares, 1.0 / self._micro_batches(step))  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def after_update(self, grad_norm: Tensor) -> None:
        """Move the biases by what the experts had to do since the last step, and begin to count anew.

        Args:
            grad_norm: of the step; where it is not finite the step was skipped, and the biases stay too.
        """
        for (_, rate), layers in self._biased.items():
            step_counts = _of("step_counts", layers)
            counts = self._ranks.sum_(torch.stack(step_counts))
            moves = rate * (counts.mean(dim=1, keepdim=True) - counts).sign()
            moves = torch.where(grad_norm.isfinite(), moves, 0.0)
            torch._foreach_add_(_of("expert_bias", layers), list(moves.unbind()))  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_zero_(step_counts)  # pyright: ignore[reportPrivateImportUsage]


def build_expert_balance(
    root: RootBlock, model: LanguageModel, micro_batches: Callable[[int], int], ranks: Ranks
) -> ExpertBalance | None:
    """What goes with the steps of a model, or None for one without experts; arguments as in `ExpertBalance`."""
    layers = moe_layers(model)
    if not layers:
        return None
    rates = {
        name: stack_keys_of(root.model, name).moe_router_bias_update_rate
        for name, layer in layers.items()
        if layer.moves_bias
    }
    return ExpertBalance(layers, micro_batches, bias_rates=rates, ranks=ranks)


def stack_keys_of(keys: AnyModelBlock, layer: str) -> StackKeys:
    """The keys of the stack that a layer belongs to, by its name (`decoder.layers.3.mlp`)."""
    stacks = stacks_of_keys(keys)
    return stacks.get(f"{layer.partition('.')[0]}.") or stacks[""]


def _of(name: str, layers: list[MoE]) -> list[Tensor]:
    return list(map(attrgetter(name), layers))
