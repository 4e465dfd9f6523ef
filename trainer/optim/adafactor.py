"""Adafactor (arXiv 1804.04235): factored second moments (row and column means) and update clipping.

The learning rate is set from outside; the paper's relative step is a schedule (`lr_schedule.RelativeStep`). Defaults
are those of NeMo's and Hugging Face's Adafactor. A fused weight such as [q | k | v] is treated as one matrix: the
projections share the column means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...models.parallel.partition import PartAxis
from ..utils.local_shard import LocalShard
from .base_optimizer import Optimizer, ShardUpdate
from .update_arithmetic import arithmetic_dtype, copy_unless_skipped, write_weight


class Adafactor(Optimizer):
    """Adafactor over the named parameters of a model.

    The state of a matrix is two vectors (`exp_avg_sq_row`, `exp_avg_sq_col`), that of a vector is `exp_avg_sq`; both
    are fp32, or fp64 for fp64 weights. Tensors of more dimensions are batches of matrices.

    Args:
        lr: learning rate until `set_lr` is called; with `scale_parameter`, relative to the RMS of each weight.
        eps: term added to squared gradients, and lower bound of the RMS of a weight for `scale_parameter`.
        clip_threshold: d of the paper: maximal RMS of an update before the learning rate.
        decay_rate: the decay of the second moments at step t is 1 - t ** decay_rate; negative.
        beta1: decay of the first moment; None for no first moment, which saves its memory.
        scale_parameter: multiply the learning rate of a weight by its RMS.
        weight_decay: decoupled weight decay, times the learning rate of the weight.
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
        """Return the second moments, and with `beta1` the first moment, all zero."""
        dtype = arithmetic_dtype(main)
        state: dict[str, Tensor] = {}
        if main.ndim > 1:
            state["exp_avg_sq_row"] = main.new_zeros(main.shape[:-1], dtype=dtype)
            state["exp_avg_sq_col"] = main.new_zeros((*main.shape[:-2], shape[-1]), dtype=dtype)
        else:
            state["exp_avg_sq"] = torch.zeros_like(main, dtype=dtype)
        if self.beta1 is not None:
            state["exp_avg"] = torch.zeros_like(main, dtype=dtype)
        return state

    def is_replicated(self, key: str, shape: tuple[int, ...]) -> bool:
        """Return True for the column means of a matrix: all columns, over the rows of all ranks."""
        return key == "exp_avg_sq_col" and len(shape) == 2

    def update(self, group: dict[str, Any], shards: list[ShardUpdate], scale: Tensor) -> None:
        """Update all weights together, with two all-reduces over the ranks; see `Optimizer.update`.

        Another one over the parts sums the squares of rows of which each rank has some columns.
        """
        live = scale >= 0
        steps: list[Tensor] = []
        for shard in shards:
            dtype = arithmetic_dtype(shard.state["main"])
            steps.append(shard.gradient.to(dtype).mul_(scale.to(dtype)))

        places = [self.sharding.placed_shard(shard.name, shard.parameter) for shard in shards]
        row_squares = [_row_squares(step) for step in steps]
        split = [squares for squares, place in zip(row_squares, places, strict=True) if place.columns is not None]
        _sum(split, self.sharding.sum_over_parts)
        column_squares = [
            self._column_squares(s, step, place) for s, step, place in zip(shards, steps, places, strict=True)
        ]
        weight_squares = [
            self._squares(s, s.state["main"].to(step.dtype)) for s, step in zip(shards, steps, strict=True)
        ]
        # Columns of a matrix run over the rows of all ranks; batched matrices (experts) are not split by rows.
        sharded = [(s, squares) for squares, s in zip(column_squares, shards, strict=True) if s.parameter.ndim == 2]
        self._sum_over_ranks([*sharded, *zip(shards, weight_squares, strict=True)])

        for step, rows, columns, place, shard in zip(steps, row_squares, column_squares, places, shards, strict=True):
            self._normalize(step, rows, columns, place, shard.state, live)

        step_squares = [self._squares(shard, step) for shard, step in zip(shards, steps, strict=True)]
        self._sum_over_ranks([*zip(shards, step_squares, strict=True)])
        for shard, step, place, step_square, weight_square in zip(
            shards, steps, places, step_squares, weight_squares, strict=True
        ):
            state, elements = shard.state, math.prod(place.shape)
            rate: Any = group["lr"]
            if self.scale_parameter:
                rate = (weight_square / elements).sqrt().clamp(min=self.eps[1]) * rate
            step.div_(((step_square / elements).sqrt() / self.clip_threshold).clamp(min=1.0)).mul_(rate)
            if self.beta1 is not None:
                mean = torch.lerp(step, state["exp_avg"], self.beta1)
                copy_unless_skipped(state["exp_avg"], mean, live)
                step = mean
            new = state["main"].to(step.dtype) * (1 - group["weight_decay"] * rate) - step
            write_weight(shard.weight, state["main"], new, live)

    def _squares(self, shard: ShardUpdate, tensor: Tensor) -> Tensor:
        """Return the sum of squares of what this rank counts of a tensor shaped like the local shard."""
        counted = self.sharding.counted(shard.name, shard.parameter, tensor)
        squares = [torch.linalg.vector_norm(each).square() for each in counted]
        return torch.stack(squares).sum() if squares else tensor.new_zeros(())

    def _column_squares(self, shard: ShardUpdate, step: Tensor, place: LocalShard) -> Tensor:
        """Return the sum of squares of each column of the full matrix, over what this rank counts of it."""
        if step.ndim != 2:
            return step if step.ndim < 2 else torch.linalg.vector_norm(step, dim=-2).square()
        squares = step.new_zeros(place.shape[1])
        for rows in self.sharding.counted(shard.name, shard.parameter, step):
            _own_columns(squares, place, step).add_(torch.linalg.vector_norm(rows, dim=0).square())
        return squares

    def _normalize(
        self,
        step: Tensor,
        row_squares: Tensor,
        column_squares: Tensor,
        place: LocalShard,
        state: dict[str, Tensor],
        live: Tensor,
    ) -> None:
        """Update the second moments and divide the gradient `step` by their root, in place.

        Args:
            step: local shard of the gradient.
            row_squares: sum of squares of each local row; unused for a vector.
            column_squares: sum of squares of each column of the full matrix; unused for a vector.
            place: local shard of the parameter.
            state: second moments of the parameter.
            live: False leaves the state unchanged (a skipped step).
        """
        decay = (1 - self.updates**self.decay_rate).to(step.dtype)

        def update_moment(key: str, mean_squares: Tensor) -> Tensor:
            moment = torch.lerp(mean_squares + self.eps[0], state[key], decay)
            copy_unless_skipped(state[key], moment, live)
            return moment

        if step.ndim < 2:
            step.mul_(update_moment("exp_avg_sq", step.square()).rsqrt())
            return
        rows = update_moment("exp_avg_sq_row", row_squares / place.shape[-1])
        columns = update_moment("exp_avg_sq_col", column_squares / place.shape[-2])
        # The mean of the row means over all ranks equals the mean of the column means, which are replicated.
        step.mul_((rows / columns.mean(dim=-1, keepdim=True)).rsqrt().unsqueeze(-1))
        step.mul_(_own_columns(columns, place, step).rsqrt().unsqueeze(-2))

    def _sum_over_ranks(self, tensors: list[tuple[ShardUpdate, Tensor]]) -> None:
        """Sum tensors of parameters over all shards and parts in place."""
        axes: list[PartAxis] = [self.sharding.axis_of(shard.name) for shard, _ in tensors]
        for axis in sorted(set(axes)):
            own = [tensor for (_, tensor), each in zip(tensors, axes, strict=True) if each == axis]
            _sum(own, partial(self.sharding.sum_over_ranks, axis=axis))


def _sum(tensors: list[Tensor], reduce: Callable[[Tensor], Tensor]) -> None:
    """All-reduce tensors in place, in one message."""
    if not tensors:
        return
    flat = reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


def _row_squares(step: Tensor) -> Tensor:
    return torch.linalg.vector_norm(step, dim=-1).square() if step.ndim > 1 else step


def _own_columns(columns: Tensor, place: LocalShard, local: Tensor) -> Tensor:
    """Return the columns that this rank holds, of a vector of all of them."""
    return columns if place.columns is None else columns.narrow(0, place.columns.first, local.shape[1])
