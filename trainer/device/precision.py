"""Dtypes of weights and arithmetic from `trainer.precision` and `model.megatron_amp_O2`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ..config.schema.trainer_and_data import TrainerBlock


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """The dtypes of a run.

    Attributes:
        name: description for the log.
        param_dtype: dtype of the model's parameters.
        main_weights: the optimizer keeps and updates fp32 copies of lower-precision parameters.
        autocast_dtype: compute dtype (torch.autocast) if it differs from that of the weights, else None.
    """

    name: str
    param_dtype: torch.dtype
    main_weights: bool = False
    autocast_dtype: torch.dtype | None = None

    def autocast_context(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the autocast context of the forward pass."""
        return torch.autocast(device.type, self.autocast_dtype) if self.autocast_dtype else nullcontext()


def plan_precision(trainer: TrainerBlock, megatron_amp_O2: bool, device: torch.device) -> PrecisionPlan:  # noqa: N803
    """Resolve the precision keys; null is bf16 on a CUDA device with bf16 tensor cores (sm_80+), fp32 elsewhere."""
    precision = trainer.precision
    if precision is None:
        has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        precision = "bf16" if has_bf16 else "32"
    match str(precision):
        case "bf16" if megatron_amp_O2:
            return PrecisionPlan("bf16 weights, fp32 main weights", torch.bfloat16, main_weights=True)
        case "bf16" | "bf16-mixed":
            return PrecisionPlan("fp32 weights, bf16 autocast", torch.float32, autocast_dtype=torch.bfloat16)
        case "bf16-true":
            return PrecisionPlan("bf16 weights and optimizer state", torch.bfloat16)
        case "64" | "64-true":
            return PrecisionPlan("fp64", torch.float64)
        case _:
            return PrecisionPlan("fp32", torch.float32)
