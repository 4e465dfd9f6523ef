"""AdamW (arXiv 1711.05101) as a run uses it: one pass over weights, moments and gradients (`kernels.adamw`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.adamw import adamw_step
from .base import Optimizer


class AdamW(Optimizer):
    """AdamW over the named parameters of a model.

    Args:
        named_parameters: name and parameter.
        lr: learning rate until `set_lr` is called.
        betas: decay of the running mean and of the running square.
        eps: added to the root of the running square.
        weight_decay: decoupled weight decay.
        common: the other arguments of `Optimizer`.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **common: Any,
    ) -> None:
        super().__init__(named_parameters, {"lr": lr, "betas": betas, "eps": eps}, weight_decay=weight_decay, **common)

    def initial_state(self, name: str, main: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Both moments, zero."""
        return {"exp_avg": torch.zeros_like(main), "exp_avg_sq": torch.zeros_like(main)}

    def update(
        self, group: dict[str, Any], gradients: list[Tensor], states: list[dict[str, Tensor]], scale: Tensor
    ) -> None:
        """One fused pass; see `Optimizer.update`."""
        adamw_step(
            [
                state["main"] if state["main"].dtype == parameter.dtype else self.piece_of(parameter).local
                for parameter, state in zip(group["params"], states, strict=True)
            ],
            [state["main"] for state in states],
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=self.updates,
            grad_scale=scale,
        )
