"""SGD with momentum, as torch.optim.SGD: weight decay is added to the gradient (L2)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .base_optimizer import Optimizer, ShardUpdate
from .update_arithmetic import arithmetic_dtype, copy_unless_skipped, write_weight, zero_state


class SGD(Optimizer):
    """SGD: g' = g + weight_decay * w; m = momentum * m + g'; w -= lr * m.

    With `nesterov` the step is g' + momentum * m (Sutskever et al. 2013); without momentum it is g'.

    Args:
        lr: learning rate until `set_lr` is called.
        momentum: decay of the running sum of gradients; 0 for no momentum.
        weight_decay: L2 penalty: times the weight, it is added to the clipped gradient.
        common: the other arguments of `Optimizer`.

    Raises:
        ValueError: `nesterov` without momentum.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        **common: Any,
    ) -> None:
        if nesterov and not momentum:
            raise ValueError(f"`momentum` ({momentum}) must be larger than 0 with `nesterov`; use 0.9")
        self.momentum = momentum
        self.nesterov = nesterov
        super().__init__(named_parameters, {"lr": lr}, weight_decay=weight_decay, **common)

    def initial_state(self, name: str, main: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the momentum buffer, zero; nothing without momentum."""
        return {"momentum_buffer": zero_state(main)} if self.momentum else {}

    def is_elementwise(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return True."""
        return True

    def update(self, group: dict[str, Any], shards: list[ShardUpdate], scale: Tensor) -> None:
        """Update one weight after the other; see `Optimizer.update`."""
        live = scale >= 0
        for shard in shards:
            state, main = shard.state, shard.state["main"]
            dtype = arithmetic_dtype(main)
            old = main.to(dtype)
            step = shard.gradient.to(dtype) * scale.to(dtype)
            if group["weight_decay"]:
                step.add_(old, alpha=group["weight_decay"])
            if self.momentum:
                total = state["momentum_buffer"].to(dtype) * self.momentum + step
                copy_unless_skipped(state["momentum_buffer"], total, live)
                step = step.add_(total, alpha=self.momentum) if self.nesterov else total
            write_weight(shard.weight, main, old - group["lr"] * step, live)
