"""The dtypes of a run (`config/run_precision.py`) as torch dtypes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ...models.build import TORCH_DTYPES
from ..config.run_precision import RunPrecision, resolve_precision
from ..config.schema.trainer_and_data import TrainerBlock
from .choose_device import compute_capability


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

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of arithmetic."""
        return self.autocast_dtype or self.param_dtype

    def autocast_context(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the autocast context of the forward pass."""
        return torch.autocast(device.type, self.autocast_dtype) if self.autocast_dtype else nullcontext()


def torch_precision(precision: RunPrecision) -> PrecisionPlan:
    """Return the dtypes of a run as torch dtypes."""
    autocast = None if precision.autocast is None else TORCH_DTYPES[precision.autocast]
    return PrecisionPlan(precision.name, TORCH_DTYPES[precision.weights], precision.main_weights, autocast)


def plan_precision(trainer: TrainerBlock, megatron_amp_O2: bool, device: torch.device) -> PrecisionPlan:  # noqa: N803
    """Resolve the precision keys for a device of this machine."""
    return torch_precision(resolve_precision(trainer.precision, megatron_amp_O2, compute_capability(device)))
