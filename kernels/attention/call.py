"""The facts of one kind of attention call, and of the software it would run on: all that the dispatcher looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DType = Literal["fp64", "fp32", "bf16", "fp16"]
Bias = Literal["none", "dense", "dense_with_gradient"]
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Versions that decide what a backend can do.

    Attributes:
        torch: (major, minor) of PyTorch.
        cudnn: version as cuDNN counts it (9.15.1 is 91501), None without cuDNN.
        deterministic_algorithms: `torch.use_deterministic_algorithms(True)` is in force.
    """

    torch: tuple[int, int]
    cudnn: int | None = None
    deterministic_algorithms: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One kind of call that a model will make.

    Attributes:
        device: kind of device, as in `torch.device.type`.
        capability: CUDA compute capability, None elsewhere.
        dtype: of query, key and value as they arrive (the autocast dtype where autocast is on).
        batch: sequences in a call.
        heads: query heads.
        groups: key and value heads; divides `heads`.
        head_dim: width of a head.
        queries: tokens that ask; the longest of them where `any_length`.
        keys: tokens that are asked; likewise.
        any_length: the call comes in every length from 2 tokens on, not in one.
        causal: a query sees no later key; both sequences end at the same token (bottom-right aligned).
        window: keys visible to the left and right of a query, inclusive, -1 for all of them; None for no window.
        packed: a row may hold several documents, which do not see each other.
        bias: an additive term of the scores, and whether it wants a gradient.
        dropout: probability of dropping an attention weight in this call.
        training: gradients are wanted.
        deterministic: two equal calls must give equal bits, gradients included.
    """

    device: str
    capability: tuple[int, int] | None = None
    dtype: DType
    batch: int
    heads: int
    groups: int
    head_dim: int
    queries: int
    keys: int
    any_length: bool = False
    causal: bool = True
    window: tuple[int, int] | None = None
    packed: bool = False
    bias: Bias = "none"
    dropout: float = 0.0
    training: bool = False
    deterministic: bool = False

    @property
    def score_bytes(self) -> int:
        """Bytes of one layer's matrix of attention weights, (batch, heads, queries, keys) in `dtype`."""
        return self.batch * self.heads * self.queries * self.keys * BYTES[self.dtype]

    @property
    def mask_bytes(self) -> int:
        """Bytes of the mask that keeps documents apart, (batch, 1, queries, keys) in `dtype`; 0 without them."""
        return self.batch * self.queries * self.keys * BYTES[self.dtype] if self.packed else 0

    def __str__(self) -> str:
        where = self.device if self.capability is None else f"{self.device} sm_{self.capability[0]}{self.capability[1]}"
        length = f"up to {self.keys}" if self.any_length else f"{self.queries} x {self.keys}"
        parts = [
            where,
            self.dtype,
            f"batch {self.batch}",
            f"{self.heads} heads" if self.groups == self.heads else f"{self.heads} heads in {self.groups} groups",
            f"head width {self.head_dim}",
            f"{length} tokens",
            "causal" if self.causal else "full",
        ]
        if self.window is not None:
            parts.append(f"window {list(self.window)}")
        if self.packed:
            parts.append("packed documents")
        if self.bias != "none":
            parts.append(f"{self.bias.replace('_', ' ')} bias")
        if self.dropout:
            parts.append(f"dropout {self.dropout:g}")
        if self.deterministic:
            parts.append("deterministic")
        return ", ".join(parts)
