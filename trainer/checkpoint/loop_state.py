"""What the loop remembers from step to step besides weights and optimizer; it is part of every checkpoint.

With it a resumed run decides as the unbroken one would: the same figures, the same warnings, the same early stop.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ...models.config.key_block import Block

MAX_RECENT_LOSSES = 1024


class Patience(Block):
    """Where early stopping stands."""

    best: float | None = None
    """The best value of the metric so far; None before the first check."""
    last: float | None = None
    """The value at the last check; None before the first one, or where it was not finite."""
    waited: int = Field(0, ge=0)
    """Checks since the best value."""


class LoopState(Block):
    """The memory of `RunLoop` after a step."""

    loss_sum: float = 0.0
    """Sum of the finite training losses since the last regular report, nats per token."""
    loss_steps: int = Field(0, ge=0)
    """How many losses are in it."""
    skipped_steps: int = Field(0, ge=0)
    """Steps since the start of training whose gradients were not finite, so that they changed nothing."""
    skipped_in_a_row: int = Field(0, ge=0)
    """How many of them came last, without a good step in between."""
    recent_losses: Annotated[tuple[float, ...], Field(max_length=MAX_RECENT_LOSSES, strict=False)] = ()
    """The newest finite training losses, oldest first: what a loss spike is measured against."""
    in_spike: bool = False
    """Whether the loss stands out now, so that it has been warned of."""
    validation_due: bool = False
    """Whether a signal left no time for the validation of this step: it is the first thing that a process does which
    goes on from here."""
    expert_load: Annotated[tuple[Annotated[tuple[float, ...], Field(strict=False)], ...], Field(strict=False)] = ()
    """For each layer with experts what it counted since the last regular report; empty right after one."""
    patience: Patience = Patience.model_validate({})
    """Where early stopping stands."""
