"""An exponential moving average of the weights (Polyak averaging; NeMo's `exp_manager.ema`).

Update rule: average = decay * average + (1 - decay) * weight, initialized with the weights at the start of training.
The average is fp32 (fp64 for fp64 weights), computed from the optimizer's fp32 main weights if it has any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ...models.parallel.partition import RankPart
from ..utils.local_shard import LocalShard, ShardOf, local_shard, local_tensor
from .fp8_weights import Fp8Weights


class EMA:
    """Exponential moving average of the parameters.

    Args:
        parameters: weights by name, on their device.
        main_weights: local shards of the optimizer's fp32 main weights by name, averaged instead of the weights.
        decay: decay per update.
        every_n_steps: steps between updates.
        cpu_offload: keep the averages in host memory.
        wait_for_copies: synchronize with pending copies of weights to host memory; called before the host reads them.
        local_shard: returns the local shard of a weight that this rank averages.
        parts: this rank's part of each weight under tensor or expert parallelism, by name.
        fp8_weights: weights that are cast from the main weights; None without.
        all_gather_weights: all-gather the weights; called after this rank's shards have changed.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        main_weights: Mapping[str, Tensor] | None = None,
        decay: float,
        every_n_steps: int = 1,
        cpu_offload: bool = False,
        local_shard: ShardOf = local_shard,
        parts: Mapping[str, RankPart] | None = None,
        fp8_weights: Fp8Weights | None = None,
        all_gather_weights: Callable[[], None] = lambda: None,
        wait_for_copies: Callable[[], None] = lambda: None,
    ) -> None:
        self._decay = decay
        self._every_n_steps = every_n_steps
        self._fp8_weights = fp8_weights
        self._all_gather_weights = all_gather_weights
        self._wait_for_copies = wait_for_copies if cpu_offload else lambda: None
        self._shards = {name: local_shard(parameter, (parts or {}).get(name)) for name, parameter in parameters.items()}
        self._parameters = {name: shard.local for name, shard in self._shards.items()}
        self._sources = self._parameters | {name: local_tensor(weight) for name, weight in (main_weights or {}).items()}
        self._averages = {
            name: source.to(
                device="cpu" if cpu_offload else self._parameters[name].device,  # main weights may be on the host
                dtype=torch.promote_types(source.dtype, torch.float32),
                copy=True,
            )
            for name, source in self._sources.items()
        }

    @torch.no_grad()
    def update(self, step: int, grad_norm: Tensor) -> None:
        """Update the average after `step` completed steps, if an update is due.

        Args:
            step: completed steps.
            grad_norm: gradient norm of the last step; if not finite, the step was skipped and so is the update.
        """
        if step % self._every_n_steps:
            return
        self._wait_for_copies()
        is_finite = grad_norm.isfinite()  # stays on the device: no synchronization
        weight = is_finite.to(next(iter(self._averages.values()))) * (1.0 - self._decay)
        if any(source.is_cpu != average.is_cpu or source.dtype != average.dtype for source, average in self._pairs()):
            for source, average in self._pairs():  # one tensor at a time: casting all at once needs too much memory
                average.lerp_(source.to(average, non_blocking=source.is_cpu), weight)
            return
        averages, sources = [self._averages[name] for name in self._sources], list(self._sources.values())
        torch._foreach_lerp_(averages, sources, [weight] * len(averages))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the parameters hold the averages, cast to their dtype; on exit they are restored bitwise.

        Values are copied in place, because compiled code and sharded parameters rely on their addresses.
        """
        originals = {name: parameter.clone() for name, parameter in self._own_weights()}
        self._fill(self._averages)
        try:
            yield
        finally:
            self._fill(originals)

    def local_shards(self) -> dict[str, LocalShard]:
        """Return the local shards of the averages by parameter name, for checkpoints."""
        return {name: self._shards[name].with_local(average) for name, average in self._averages.items()}

    def _own_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that have values besides the main weights."""
        kept = () if self._fp8_weights is None else self._fp8_weights.main_weights
        return ((name, parameter) for name, parameter in self._parameters.items() if name not in kept)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((source, self._averages[name]) for name, source in self._sources.items())

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._own_weights():
            parameter.copy_(values[name])
        if self._fp8_weights is not None:
            self._fp8_weights.cast({**self._sources, **values})
        self._all_gather_weights()
