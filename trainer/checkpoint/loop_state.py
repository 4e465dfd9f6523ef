"""Training loop state saved in every checkpoint besides weights and optimizer.

With it a resumed run logs the same metrics, warns at the same steps and stops early at the same step as an
uninterrupted one.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ...models.config.key_block import ConfigBlock

MAX_RECENT_LOSSES = 1024


class EarlyStoppingState(ConfigBlock):
    """State of early stopping."""

    best: float | None = None
    """The best value of the metric so far; None before the first check."""
    last: float | None = None
    """The value at the last check; None before the first one, or if it was not finite."""
    waited: int = Field(0, ge=0)
    """Checks since the best value."""


class LoopState(ConfigBlock):
    """State of `TrainLoopCallback` after a step."""

    loss_sum: float = 0.0
    """Sum of the finite training losses since the last regular report, nats per token."""
    loss_steps: int = Field(0, ge=0)
    """Number of losses in `loss_sum`."""
    skipped_steps: int = Field(0, ge=0)
    """Steps skipped since the start of training because gradients were not finite."""
    skipped_in_a_row: int = Field(0, ge=0)
    """Number of consecutive skipped steps up to this one."""
    recent_losses: Annotated[tuple[float, ...], Field(max_length=MAX_RECENT_LOSSES, strict=False)] = ()
    """The latest finite training losses, oldest first; the reference of the loss spike detection."""
    in_spike: bool = False
    """True during a loss spike that has already been warned of."""
    validation_due: bool = False
    """True if a signal interrupted the validation of this step; a resumed run starts with it."""
    expert_load: Annotated[tuple[Annotated[tuple[float, ...], Field(strict=False)], ...], Field(strict=False)] = ()
    """Sums of each MoE layer since the last regular report; empty right after one."""
    patience: EarlyStoppingState = EarlyStoppingState.model_validate({})
    """State of early stopping."""
    callbacks: dict[str, Any] = Field(default={})
    """State of the user's callbacks, by `state_key`."""
