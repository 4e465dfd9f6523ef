"""The metrics of one training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepReport:
    """Metrics of one log step; rates are None if they could not be measured.

    Attributes:
        step: completed optimizer steps.
        loss: training loss, mean over the finite steps since the last regular report, nats per token.
        grad_norm: gradient norm of the last step before clipping.
        lr: learning rate of the last step.
        consumed_samples: samples trained on since the start of training.
        skipped_steps: steps skipped since the start of training because gradients were not finite.
        loss_scale: loss scale of the last step; None except in fp16.
        step_seconds: mean step time since the last report, without validation and checkpoints.
        tokens_per_second: throughput over the same time.
        mfu: model FLOPs over the dense bf16 peak of all devices of the run.
        memory_gib: peak memory of the device, or of the process on a CPU.
        experts: expert load since the last regular report (`ExpertLoadMetrics.collect`); empty without experts.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    consumed_samples: int
    skipped_steps: int = 0
    loss_scale: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_gib: float | None = None
    experts: Mapping[str, float] = field(default_factory=dict)

    def to_metrics(self) -> dict[str, float]:
        """Return the measured metrics by name."""
        fields = ("loss", "grad_norm", "lr", "consumed_samples", "skipped_steps", "loss_scale", "step_seconds")
        values = {name: getattr(self, name) for name in (*fields, "tokens_per_second", "mfu", "memory_gib")}
        return {name: value for name, value in values.items() if value is not None} | dict(self.experts)
