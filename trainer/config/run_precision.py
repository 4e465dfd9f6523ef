"""Dtypes of weights and arithmetic from `trainer.precision` and `model.megatron_amp_O2`, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...kernels.attention.call_spec import DType

_ITEMSIZES: dict[DType, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class RunPrecision:
    """The dtypes of a run.

    Attributes:
        name: description for the log.
        weights: dtype of the model's parameters.
        main_weights: the optimizer keeps and updates fp32 copies of lower-precision parameters.
        autocast: compute dtype (torch.autocast) if it differs from that of the weights, else None.
    """

    name: str
    weights: DType
    main_weights: bool = False
    autocast: DType | None = None

    @property
    def scales_loss(self) -> bool:
        """True if the loss is scaled, since small gradients underflow in fp16."""
        return self.compute == "fp16"

    @property
    def state_itemsize(self) -> int:
        """Bytes of a moment of a weight: fp32 with main weights, and for fp16 weights, or as the weight."""
        return 4 if self.main_weights or self.weights == "fp16" else self.weights_itemsize

    @property
    def compute(self) -> DType:
        """Dtype of arithmetic."""
        return self.autocast or self.weights

    @property
    def weights_itemsize(self) -> int:
        """Bytes of a weight."""
        return _ITEMSIZES[self.weights]

    @property
    def compute_itemsize(self) -> int:
        """Bytes of an activation."""
        return _ITEMSIZES[self.compute]

    @property
    def main_weight_bytes(self) -> int:
        """Bytes of the fp32 main copy of one weight; 0 without a copy."""
        return 4 if self.main_weights else 0


def resolve_precision(
    precision: Any,
    megatron_amp_O2: bool,  # noqa: N803
    capability: tuple[int, int] | None,
) -> RunPrecision:
    """Resolve the precision keys.

    Args:
        precision: `trainer.precision`; null is bf16 on a CUDA device with bf16 tensor cores (sm_80+), fp32 elsewhere.
        megatron_amp_O2: `model.megatron_amp_O2`.
        capability: CUDA compute capability of the device; None for other devices.
    """
    if precision is None:
        precision = "bf16" if capability is not None and capability >= (8, 0) else "32"
    match str(precision):
        case "bf16" if megatron_amp_O2:
            return RunPrecision("bf16 weights, fp32 main weights", "bf16", main_weights=True)
        case "bf16" | "bf16-mixed":
            return RunPrecision("fp32 weights, bf16 autocast", "fp32", autocast="bf16")
        case "bf16-true":
            return RunPrecision("bf16 weights and optimizer state", "bf16")
        case "16" if megatron_amp_O2:
            return RunPrecision("fp16 weights, fp32 main weights, dynamic loss scale", "fp16", main_weights=True)
        case "16" | "16-mixed":
            return RunPrecision("fp32 weights, fp16 autocast, dynamic loss scale", "fp32", autocast="fp16")
        case "16-true":
            return RunPrecision("fp16 weights, fp32 optimizer state, dynamic loss scale", "fp16")
        case "64" | "64-true":
            return RunPrecision("fp64", "fp64")
        case _:
            return RunPrecision("fp32", "fp32")
