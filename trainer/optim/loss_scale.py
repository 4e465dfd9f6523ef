"""Dynamic loss scale of fp16 training, on the device, without host synchronization.

Small gradients underflow in fp16 (below 6e-8), so the loss is multiplied by a scale, and the optimizer divides by it.
A step whose gradients overflow is skipped; the scale falls when that has happened often enough, and grows again after
many steps without overflow. Source: Micikevicius et al. 2018, arXiv 1710.03740; the rule is that of Megatron-LM's
`DynamicGradScaler`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...models.config.key_block import ConfigBlock

GROWTH = 2.0
BACKOFF = 0.5
MIN_SCALE = 1.0


class LossScaleState(ConfigBlock):
    """State of a `LossScale`, for checkpoints."""

    scale: float
    """Loss scale of the next step."""
    finite_steps: int
    """Steps without overflow since the scale last grew or a step overflowed."""
    tolerated: int
    """Overflows until the scale falls; at 0 every one lowers it."""


class LossScale:
    """Loss scale that adapts to overflows; the scale is a tensor, its state is updated without a host sync.

    Args:
        initial: first scale.
        growth_interval: consecutive steps without overflow after which the scale doubles, and the tolerance is renewed.
        hysteresis: overflows from which on each one halves the scale, down to 1.
        device: device of the gradients.

    Attributes:
        scale: fp32 scalar, replaced rather than overwritten by `update`.
    """

    def __init__(self, initial: float, growth_interval: int, hysteresis: int, device: torch.device) -> None:
        self._interval = growth_interval
        self._hysteresis = hysteresis
        self._device = device
        self.load(LossScaleState(scale=initial, finite_steps=0, tolerated=hysteresis))

    def load(self, state: LossScaleState) -> None:
        """Continue from a state."""
        self.scale = torch.tensor(state.scale, dtype=torch.float32, device=self._device)
        self._finite_steps = torch.tensor(state.finite_steps, dtype=torch.int32, device=self._device)
        self._tolerated = torch.tensor(state.tolerated, dtype=torch.int32, device=self._device)

    def state(self) -> LossScaleState:
        """Return the state; synchronizes with the device."""
        return LossScaleState(
            scale=self.scale.item(), finite_steps=int(self._finite_steps), tolerated=int(self._tolerated)
        )

    @torch.no_grad()
    def update(self, is_finite: Tensor) -> None:
        """Adapt the scale after a step, given a bool scalar that is the same on all ranks."""
        finite_steps = (self._finite_steps + 1) * is_finite
        tolerated = (self._tolerated - (~is_finite).int()).clamp(min=0)
        grows = finite_steps == self._interval
        falls = ~is_finite & (tolerated == 0)
        lower = (self.scale * BACKOFF).clamp(min=MIN_SCALE)
        self.scale = torch.where(falls, lower, torch.where(grows, self.scale * GROWTH, self.scale))
        self._finite_steps = finite_steps * ~grows
        self._tolerated = torch.where(grows, self._hysteresis, tolerated)
