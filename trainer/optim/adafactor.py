"""Adafactor (arXiv 1804.04235): second moments as the product of row and column means, steps clipped by their size.

The learning rate comes from outside; the paper's relative step is a schedule (`schedule.RelativeStep`). Numbers are
those of NeMo's and Hugging Face's Adafactor. A fused weight, as [q | k | v], is one matrix: its rows have their own
means, and its columns share theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .base_optimizer import Optimizer, arithmetic_dtype, overwrite, write_weight


class Adafactor(Optimizer):
    """Adafactor over the named parameters of a model.

    The state of a matrix is two vectors (`exp_avg_sq_row`, `exp_avg_sq_col`), that of a vector is `exp_avg_sq`; both
    are fp32, or fp64 for fp64 weights. Tensors of more dimensions are stacks of matrices.

    Args:
        named_parameters: name and parameter.
        lr: learning rate until `set_lr` is called; with `scale_parameter` relative to the size of each weight.
        eps: added to squared gradients; and the least size of a weight for `scale_parameter`.
        clip_threshold: d of the paper: the root mean square of a step, before the learning rate, is at most this.
        decay_rate: the decay of the running squares at step t is 1 - t ** decay_rate; negative.
        beta1: decay of a running mean of the steps; None keeps none, which saves its memory.
        scale_parameter: multiply the learning rate of a weight by its root mean square.
        weight_decay: decoupled; times the learning rate of the weight.
        common: the other arguments of `Optimizer`.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        lr: float,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        scale_parameter: bool = True,
        weight_decay: float = 0.0,
        **common: Any,
    ) -> None:
        self.eps = eps
        self.clip_threshold = clip_threshold
        self.decay_rate = decay_rate
        self.beta1 = beta1
        self.scale_parameter = scale_parameter
        super().__init__(named_parameters, {"lr": lr}, weight_decay=weight_decay, **common)

    def initial_state(self, name: str, main: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Running squares, and the running mean of steps with `beta1`, all zero."""
        dtype = arithmetic_dtype(main)
        state: dict[str, Tensor] = {}
        if main.ndim > 1:
            state["exp_avg_sq_row"] = main.new_zeros(main.shape[:-1], dtype=dtype)
            state["exp_avg_sq_col"] = main.new_zeros(main.shape[:-2] + main.shape[-1:], dtype=dtype)
        else:
            state["exp_avg_sq"] = torch.zeros_like(main, dtype=dtype)
        if self.beta1 is not None:
            state["exp_avg"] = torch.zeros_like(main, dtype=dtype)
        return state

    def is_whole(self, key: str, shape: tuple[int, ...]) -> bool:
        """The means of the columns of a matrix, which run over the rows of all ranks."""
        return key == "exp_avg_sq_col" and len(shape) == 2

    def update(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
        scale: Tensor,
    ) -> None:
        """All these weights together, with two sums over the ranks; see `Optimizer.update`."""
        live = scale >= 0
        parameters = group["params"]
        steps: list[Tensor] = []
        for gradient, state in zip(gradients, states, strict=True):
            dtype = arithmetic_dtype(state["main"])
            steps.append(gradient.to(dtype).mul_(scale.to(dtype)))

        column_squares = [_column_squares(step) for step in steps]
        weight_squares = [_squares(state["main"].to(step.dtype)) for state, step in zip(states, steps, strict=True)]
        crossing = [squares for squares, p in zip(column_squares, parameters, strict=True) if p.ndim == 2]
        self._sum([*crossing, *weight_squares])

        for step, squares, parameter, state in zip(steps, column_squares, parameters, states, strict=True):
            self._divide(step, squares, parameter.shape, state, live)

        step_squares = [_squares(step) for step in steps]
        self._sum(step_squares)
        for weight, parameter, step, state, of_step, of_weight in zip(
            weights, parameters, steps, states, step_squares, weight_squares, strict=True
        ):
            rate: Any = group["lr"]
            if self.scale_parameter:
                rate = (of_weight / parameter.numel()).sqrt().clamp(min=self.eps[1]) * rate
            step.div_(((of_step / parameter.numel()).sqrt() / self.clip_threshold).clamp(min=1.0)).mul_(rate)
            if self.beta1 is not None:
                mean = torch.lerp(step, state["exp_avg"], self.beta1)
                overwrite(state["exp_avg"], mean, live)
                step = mean
            new = state["main"].to(step.dtype) * (1 - group["weight_decay"] * rate) - step
            write_weight(weight, state["main"], new, live)

    def _divide(self, step: Tensor, squares: Tensor, shape: torch.Size, state: dict[str, Tensor], live: Tensor) -> None:
        """Bring the running squares up to date and divide the gradient in `step` by their root, in place.

        Args:
            step: this rank's rows of the gradient.
            squares: the sum of squares of each column of the whole matrix; unused for a vector.
            shape: of the whole parameter.
            state: its running squares.
            live: False leaves the state as it is.
        """
        decay = (1 - self.updates**self.decay_rate).to(step.dtype)

        def running(key: str, now: Tensor) -> Tensor:
            moved = torch.lerp(now + self.eps[0], state[key], decay)
            overwrite(state[key], moved, live)
            return moved

        if step.ndim < 2:
            step.mul_(running("exp_avg_sq", step.square()).rsqrt())
            return
        rows = running("exp_avg_sq_row", torch.linalg.vector_norm(step, dim=-1).square() / shape[-1])
        columns = running("exp_avg_sq_col", squares / shape[-2])
        # The mean over the rows of all ranks equals that over the columns, which every rank has.
        step.mul_((rows / columns.mean(dim=-1, keepdim=True)).rsqrt().unsqueeze(-1))
        step.mul_(columns.rsqrt().unsqueeze(-2))

    def _sum(self, tensors: list[Tensor]) -> None:
        """Add tensors up over the shards, all in one message."""
        together = self.sum_over_shards(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        for tensor, total in zip(tensors, together.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))


def _squares(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor).square()


def _column_squares(tensor: Tensor) -> Tensor:
    if tensor.ndim < 2:
        return tensor
    return torch.linalg.vector_norm(tensor, dim=-2).square()
