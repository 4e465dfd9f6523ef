"""How the operands of the matmuls are cast to fp8: formats and scaling granularity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scaling = Literal["tensorwise", "rowwise", "blockwise", "delayed"]
AmaxAlgorithm = Literal["max", "most_recent"]
Format = Literal["e4m3", "e5m2"]
Granularity = Literal["tensor", "row", "tile", "block"]
"""Elements with a common scale: all, those of a row, 128 of a row (1 x 128), or a block of 128 x 128."""

TILE = 128
"""Width of a tile and of a block."""
MAX_VALUE: dict[str, float] = {"e4m3": 448.0, "e5m2": 57344.0}
"""Largest finite values (Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433, table 1)."""


@dataclass(frozen=True)
class Fp8Recipe:
    """A recipe: each scale is the largest magnitude of what is cast, or was in former steps, over the format's largest.

    Attributes:
        scaling: `tensorwise`, one scale for each tensor; `rowwise`, one for each row along the contraction;
            `blockwise`, 1 x 128 tiles of activations and gradients and 128 x 128 blocks of weights, as in DeepSeek-V3
            (arXiv 2412.19437, section 3.3); `delayed`, one scale for each tensor, from its amaxes in former steps
            (`delayed_scaling`), through TransformerEngine only.
        forward: format of activations and weights.
        backward: format of the gradients of outputs.
        margin: scales are 2^margin times larger, which leaves so many powers of two of headroom.
        amax_history_len: delayed scaling: steps whose amaxes are kept.
        amax_compute_algo: delayed scaling: the amax of a scale is the largest of those, or the most recent.
        interval: delayed scaling: steps between new scales.
        wgrad: compute the gradients of weights in fp8; False: in the dtype of the activations, which are saved in it.
        fast_accumulation_backward: let the tensor cores of Hopper accumulate the products of the backward, as always
            those of the forward, without the intermediate sums in fp32 registers (DeepSeek-V3, section 3.3.2), which is
            faster. Blockwise scaling accumulates in fp32 registers always.
    """

    scaling: Scaling = "tensorwise"
    forward: Format = "e4m3"
    backward: Format = "e5m2"
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    interval: int = 1
    wgrad: bool = True
    fast_accumulation_backward: bool = False

    @property
    def inputs(self) -> Granularity:
        """Granularity of the scales of activations and gradients."""
        return _INPUTS[self.scaling]

    @property
    def weights(self) -> Granularity:
        """Granularity of the scales of weights."""
        return "block" if self.scaling == "blockwise" else _INPUTS[self.scaling]

    @property
    def transposes_weights(self) -> bool:
        """True if the transpose of a weight's cast is the cast of its transpose: its scales are those of blocks."""
        return self.scaling != "rowwise"


_INPUTS: dict[Scaling, Granularity] = {
    "tensorwise": "tensor",
    "rowwise": "row",
    "blockwise": "tile",
    "delayed": "tensor",
}
