"""An exponential moving average of the weights (Polyak averaging; NeMo's `exp_manager.ema`).

After an update, average = decay * average + (1 - decay) * weight, starting from the weights at the start of training.
The average is fp32 (fp64 for fp64 weights), taken from the optimizer's fp32 main weights where there are some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ..utils.local_shard import Piece, local_tensor, piece_of


class EMA:
    """Averages of named parameters.

    Args:
        parameters: the weights by name, on their device.
        main_weights: fp32 copies of some of them on this rank, which are averaged instead.
        decay: weight of the old average at each update.
        every_n_steps: steps between two updates.
        cpu_offload: keep the averages in host memory.
        settle: called before the host reads weights that are in its memory: waits until they are complete there.
        piece_of: the rows of a weight that this rank averages.
        spread: called when this rank's rows of the weights have changed: brings them to the other ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        main_weights: Mapping[str, Tensor] | None = None,
        decay: float,
        every_n_steps: int = 1,
        cpu_offload: bool = False,
        piece_of: Callable[[Tensor], Piece] = piece_of,
        spread: Callable[[], None] = lambda: None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._decay = decay
        self._every_n_steps = every_n_steps
        self._spread = spread
        self._settle = settle if cpu_offload else lambda: None
        self._pieces = {name: piece_of(parameter) for name, parameter in parameters.items()}
        self._parameters = {name: piece.local for name, piece in self._pieces.items()}
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
        """Take in the weights after `step` completed steps, if an update is due then.

        Args:
            step: how many.
            grad_norm: of the last one; where it is not finite that step was skipped, and the average stays too.
        """
        if step % self._every_n_steps:
            return
        self._settle()
        is_taken = grad_norm.isfinite()  # read by the device, so that nobody waits for it
        weight = is_taken.to(next(iter(self._averages.values()))) * (1.0 - self._decay)
        if any(source.is_cpu != average.is_cpu or source.dtype != average.dtype for source, average in self._pairs()):
            for source, average in self._pairs():  # one at a time: copies of all would fill the memory
                average.lerp_(source.to(average, non_blocking=source.is_cpu), weight)
            return
        averages, sources = [self._averages[name] for name in self._sources], list(self._sources.values())
        torch._foreach_lerp_(averages, sources, [weight] * len(averages))  # pyright: ignore[reportPrivateImportUsage]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the parameters hold the averages, in their own dtype; after it their own bits again.

        Values are copied, not exchanged: compiled code and sharded parameters keep the addresses they know.
        """
        kept = {name: parameter.clone() for name, parameter in self._parameters.items()}
        self._fill(self._averages)
        try:
            yield
        finally:
            self._fill(kept)

    def pieces(self) -> dict[str, Piece]:
        """The averages by parameter name, as a checkpoint reads and writes them: this rank's rows."""
        return {name: self._pieces[name].of(average) for name, average in self._averages.items()}

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((source, self._averages[name]) for name, source in self._sources.items())

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])
        self._spread()
