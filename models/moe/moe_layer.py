"""The feed-forward part of a layer with experts: router, experts, a shared expert, and the sums they are watched by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from ..layers.mlp import MLP
from ..memory.activation_checkpoint import recomputes, run_again
from .experts import Experts
from .router import SUMS, Router


class MoE(nn.Module):
    """Each token goes through `topk` of the experts, and through the shared one.

    What is counted, in training alone, is added to buffers in place, which compiled layers and CUDA graphs can do.
    Buffers stay in fp32 whatever the model is cast to.

    Args:
        router: chooses the experts.
        experts: all of them.
        shared: every token goes through it too; None without.
        expert_bias: keep a bias on the choice of experts, which training moves (arXiv 2408.15664).

    Attributes:
        recompute: in training keep only the input, and run the layer again in the backward.
        recompute_draws: and random numbers are drawn in it, which shall be the same again.
        statistics: fp32 (experts + 6): sums of `Routed.sums` since somebody zeroed them; not saved.
        loss_share: fp32 scalar: the share of a micro batch in its global batch, which the gradients of the losses are
            multiplied with; not saved.
        expert_bias: fp32 (experts,), saved; None without.
        step_counts: fp32 (experts,): tokens of each expert since the last optimizer step; None without `expert_bias`.
    """

    recompute: bool = False
    recompute_draws: bool = False
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
        self.register_buffer("statistics", torch.zeros(number + len(SUMS)), persistent=False)
        self.register_buffer("loss_share", torch.ones(()), persistent=False)
        self.register_buffer("expert_bias", torch.zeros(number) if expert_bias else None)
        self.register_buffer("step_counts", torch.zeros(number) if expert_bias else None, persistent=False)

    @property
    def moves_bias(self) -> bool:
        """Whether training moves the expert bias: it goes with the router, and a frozen one keeps its choice."""
        return self.expert_bias is not None and self.router.weight.requires_grad

    def forward(self, hidden: Tensor, padding: Tensor | None = None) -> Tensor:
        """`run` and `count`."""
        output, sums = self.run(hidden, padding)
        if self.training:
            self.count(sums)
        return output

    def run(
        self,
        hidden: Tensor,
        padding: Tensor | None = None,
        norm: Callable[[Tensor], Tensor] | None = None,
        *,
        limited: bool = True,
        again: Tensor | None = None,
        onto: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The layer without an effect on its buffers, so that it may run twice.

        Args:
            hidden: (batch, tokens, hidden_size), normed, but for `norm`.
            padding: bool (batch, tokens), True for real tokens; others go to no expert and count nowhere.
            norm: a norm of `hidden` that the backward runs again with the layer; None without.
            limited: experts have a capacity, where they have one in training; a text that is generated must not depend
                on what else is in the call.
            again: `hidden` once more, which the router reads, so that its gradient comes apart; None without.
            onto: a stream like `hidden` that the result is added to; None without.

        Returns:
            (batch, tokens, hidden_size), and what `count` takes.
        """
        real = None if padding is None else padding.flatten()
        if self.recompute and recomputes(self):
            output, sums = run_again(self._run, self.recompute_draws, hidden, real, norm, limited)
            return (output if onto is None else onto + output), sums
        return self._run(hidden, real, norm, limited, again, onto)

    def count(self, sums: Tensor) -> None:
        """Add the sums of a run in training."""
        with torch.no_grad():
            self.statistics.add_(sums)
            if self.step_counts is not None:
                self.step_counts.add_(sums[: len(self.step_counts)])

    def _run(
        self,
        hidden: Tensor,
        real: Tensor | None,
        norm: Callable[[Tensor], Tensor] | None,
        limited: bool,
        again: Tensor | None = None,
        onto: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        tokens = (hidden if norm is None else norm(hidden)).flatten(0, 1)
        seen = tokens if again is None else again.flatten(0, 1)
        routed = self.router(seen, self.expert_bias, self.loss_share, real, limited=limited)
        if onto is not None and self.shared is None:
            return self.experts.added_to(onto.flatten(0, 1), tokens, routed).view_as(hidden), routed.sums
        output = self.experts(tokens, routed)
        if self.shared is not None:
            output = output + self.shared(tokens)
        output = output.view_as(hidden)
        return (output if onto is None else onto + output), routed.sums

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Counts begin anew: a cast loses some, and a move from the meta device leaves them empty. The bias is kept."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        device, number = self.router.weight.device, len(self.router.weight)
        self.statistics = torch.zeros(number + len(SUMS), device=device)
        self.loss_share = torch.ones((), device=device)
        if bias is not None:
            was_empty = bias.is_meta and device.type != "meta"
            self.expert_bias = torch.zeros(number, device=device) if was_empty else bias.to(device)
            self.step_counts = torch.zeros(number, device=device)
        return self
