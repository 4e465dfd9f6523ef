"""Fused AdamW (arXiv 1711.05101): one pass over weights, moments and gradients (`kernels.optim.adamw_kernel`).

With `scale_parameter`, the step of each weight is proportional to its RMS, as in Adafactor: nanoT5's AdamWScale (Nawrot
2023, arXiv 2309.02373), without which AdamW does not train T5 with the large learning rates of Adafactor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.optim.adamw_kernel import adamw_step
from ...models.parallel.partition import PartAxis, RankPart
from ..utils.local_shard import LocalShard
from .base_optimizer import Optimizer, ShardUpdate
from .update_arithmetic import arithmetic_dtype, zero_state

MIN_RMS = 1e-3
"""Lower bound of the RMS of a weight for `scale_parameter`, as in Adafactor, so that zero weights are updated."""


class AdamW(Optimizer):
    """AdamW over the named parameters of a model.

    Args:
        lr: learning rate until `set_lr` is called.
        betas: decay rates of the first and second moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        scale_parameter: multiply the learning rate of a weight, but not its weight decay, by its RMS, at least
            `MIN_RMS`.
        fused: rows of each projection of a fused weight, by suffix of the parameter name; `scale_parameter` takes the
            RMS of each projection separately.
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
        scale_parameter: bool = False,
        fused: Mapping[str, tuple[int, ...]] | None = None,
        **common: Any,
    ) -> None:
        self.scale_parameter = scale_parameter
        self.fused = dict(fused or {})
        super().__init__(named_parameters, {"lr": lr, "betas": betas, "eps": eps}, weight_decay=weight_decay, **common)

    def initial_state(self, name: str, main: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the first and second moments, zero."""
        return {"exp_avg": zero_state(main), "exp_avg_sq": zero_state(main)}

    def is_elementwise(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return True, unless `scale_parameter` needs the RMS of the weight."""
        return not self.scale_parameter

    def supports_part(self, name: str, shape: tuple[int, ...], part: RankPart) -> bool:
        """Return True."""
        return True

    def update(self, group: dict[str, Any], shards: list[ShardUpdate], scale: Tensor) -> None:
        """Update all weights with one fused kernel; see `Optimizer.update`."""
        tensors: list[_Tensors] = []
        counts: list[int] = []
        counted: list[Tensor] = []
        axes: list[PartAxis] = []
        for shard in shards:
            state, main, parameter = shard.state, shard.state["main"], shard.parameter
            target = main if main.dtype == shard.weight.dtype else shard.weight
            shard_tensors = _Tensors(target, main, shard.gradient, state["exp_avg"], state["exp_avg_sq"])
            if not self.scale_parameter:
                tensors.append(shard_tensors)
                continue
            position = self.sharding.placed_shard(shard.name, parameter)
            # The experts of a layer share one RMS.
            parts = self._parts(shard.name, position.num_rows) if parameter.ndim < 3 else [position.num_rows]
            for rows, first, part in _split(shard_tensors, position, parts):
                tensors.append(part)
                counts.append(math.prod(position.shape) * rows // position.num_rows)
                axes.append(self.sharding.axis_of(shard.name))
                own = self.sharding.counted(shard.name, parameter, part.main, first)
                counted.append(own[0] if len(own) == 1 else torch.cat([part.main[:0], *own]))
        if not tensors:
            return
        adamw_step(
            *(list(kind) for kind in zip(*tensors, strict=True)),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=self.updates,
            grad_scale=scale,
            lr_scales=self._rms(counted, counts, axes) if self.scale_parameter else None,
        )

    def _parts(self, name: str, rows: int) -> list[int]:
        """Return the rows of each projection of a weight."""
        for suffix, parts in self.fused.items():
            if name.endswith(suffix):
                return list(parts)
        return [rows]

    def _rms(self, mains: list[Tensor], counts: list[int], axes: list[PartAxis]) -> Tensor:
        """Return the RMS of each weight, at least `MIN_RMS`.

        Args:
            mains: what this rank counts of each weight.
            counts: elements of the full weight.
            axes: ranks with the other parts of it.
        """
        norms = torch._foreach_norm(mains, 2, dtype=arithmetic_dtype(mains[0]))
        shares = torch._foreach_div(norms, [math.sqrt(count) for count in counts])
        squares = torch.stack(shares).square()
        if len(set(axes)) == 1:
            return self.sharding.sum_over_ranks(squares, axes[0]).sqrt().clamp(min=MIN_RMS)
        chosen = list(squares)
        for axis in sorted(set(axes)):
            places = [place for place, each in enumerate(axes) if each == axis]
            total = self.sharding.sum_over_ranks(torch.stack([chosen[place] for place in places]), axis)
            for place, each in zip(places, total, strict=True):
                chosen[place] = each
        return torch.stack(chosen).sqrt().clamp(min=MIN_RMS)


class _Tensors(NamedTuple):
    """Tensors of one weight, or of some of its rows, all of one shape."""

    weight: Tensor
    main: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def _split(shard: _Tensors, position: LocalShard, parts: list[int]) -> Iterator[tuple[int, int, _Tensors]]:
    """Split a local shard into the projections of a fused weight, which have `parts` rows each.

    Yields the full number of rows of each, its first local row, and its local rows.
    """
    if len(parts) == 1:
        yield parts[0], 0, shard
        return
    begin = low = 0
    for rows in parts:
        begin += rows
        high = sum(min(max(begin - held.first, 0), held.size) for held in position.rows)
        yield rows, low, _Tensors(*(tensor[low:high] for tensor in shard))
        low = high
