"""AdamW (arXiv 1711.05101) as a run uses it: one pass over weights, moments and gradients (`kernels.adamw`).

With `scale_parameter` the step of each weight is in proportion to its size, as Adafactor's: nanoT5's AdamWScale (Nawrot
2023, arXiv 2309.02373), without which AdamW does not train T5 with learning rates as large as Adafactor's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.optim.adamw_kernel import adamw_step
from .base_optimizer import Optimizer, arithmetic_dtype

LEAST_SIZE = 1e-3
"""Of a weight, for `scale_parameter`: Adafactor's, so that weights that begin at zero can move."""


class AdamW(Optimizer):
    """AdamW over the named parameters of a model.

    Args:
        named_parameters: name and parameter.
        lr: learning rate until `set_lr` is called.
        betas: decay of the running mean and of the running square.
        eps: added to the root of the running square.
        weight_decay: decoupled weight decay.
        scale_parameter: multiply the learning rate of a weight by its root mean square, at least `LEAST_SIZE`; not its
            weight decay.
        fused: end of a parameter's name to the rows of its parts, each of which has a size of its own: weights that
            hold several projections one below the other.
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
        """Both moments, zero."""
        return {"exp_avg": torch.zeros_like(main), "exp_avg_sq": torch.zeros_like(main)}

    def is_elementwise(self, name: str, shape: tuple[int, ...]) -> bool:
        """Yes, but for the size of the weight that `scale_parameter` takes."""
        return not self.scale_parameter

    def update(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
        scale: Tensor,
    ) -> None:
        """One fused pass; see `Optimizer.update`."""
        tensors: list[_Tensors] = []
        counts: list[int] = []
        for name, parameter, weight, gradient, state in zip(
            group["names"], group["params"], weights, gradients, states, strict=True
        ):
            main = state["main"]
            one = main if main.dtype == weight.dtype else weight
            whole = _Tensors(one, main, gradient, state["exp_avg"], state["exp_avg_sq"])
            if not self.scale_parameter:
                tensors.append(whole)
                continue
            piece = self.piece_of(parameter)
            # the experts of a layer have one size together
            parts = self._parts(name, piece.rows) if parameter.ndim < 3 else [piece.rows]
            for rows, part in _cut(whole, piece.start, parts):
                tensors.append(part)
                counts.append(parameter.numel() * rows // piece.rows)
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
            rates=self._sizes([part.main for part in tensors], counts) if self.scale_parameter else None,
        )

    def _parts(self, name: str, rows: int) -> list[int]:
        """Rows of the projections that a weight holds."""
        for end, parts in self.fused.items():
            if name.endswith(end):
                return list(parts)
        return [rows]

    def _sizes(self, mains: list[Tensor], counts: list[int]) -> Tensor:
        """Root mean square of each weight, at least `LEAST_SIZE`: from its rows here, and its numbers on all ranks."""
        norms = torch._foreach_norm(mains, 2, dtype=arithmetic_dtype(mains[0]))  # pyright: ignore[reportPrivateImportUsage]
        shares = torch._foreach_div(norms, [math.sqrt(count) for count in counts])  # pyright: ignore[reportPrivateImportUsage]
        return self.sum_over_shards(torch.stack(shares).square()).sqrt().clamp(min=LEAST_SIZE)


class _Tensors(NamedTuple):
    """What belongs to one weight, or to some rows of it: all of one shape."""

    weight: Tensor
    main: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def _cut(whole: _Tensors, start: int, parts: list[int]) -> Iterator[tuple[int, _Tensors]]:
    """The rows of each part of a weight, and how many rows that part has on all ranks.

    Args:
        whole: this rank's rows.
        start: the first of them.
        parts: rows of each part.
    """
    if len(parts) == 1:
        yield parts[0], whole
        return
    begin = -start
    for rows in parts:
        low, high = max(begin, 0), max(begin + rows, 0)
        yield rows, _Tensors(*(tensor[low:high] for tensor in whole))
        begin += rows
