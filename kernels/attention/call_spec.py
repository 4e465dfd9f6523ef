"""The facts of one kind of attention call, and of the software it would run on: all that the dispatcher looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DType = Literal["fp64", "fp32", "bf16", "fp16"]
Bias = Literal[
    "none", "dense", "dense_with_gradient", "distance", "distance_with_gradient", "slopes", "slopes_with_gradient"
]
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_BIAS_WORDS = {
    "dense": "dense bias",
    "dense_with_gradient": "dense bias with gradient",
    "distance": "distance bias",
    "distance_with_gradient": "distance bias with gradient",
    "slopes": "ALiBi slopes",
    "slopes_with_gradient": "ALiBi slopes with gradient",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Versions that decide what a backend can do.

    Attributes:
        torch: (major, minor) of PyTorch.
        cudnn: version as cuDNN counts it (9.15.1 is 91501), None without cuDNN.
        triton: (major, minor) of Triton, None without it.
        interpreted: Triton runs its kernels in its interpreter, on the CPU.
        te: (major, minor) of TransformerEngine, None without it.
        te_problem: why TransformerEngine cannot be used although it is there; empty when it can.
        flash_attn: version of the flash-attn package (FlashAttention 2), None without it.
        flash_attn_3: FlashAttention 3 is there, where TransformerEngine looks for it.
        flash_attn_4: FlashAttention 4 is there, where TransformerEngine looks for it.
        deterministic_algorithms: `torch.use_deterministic_algorithms(True)` is in force.
    """

    torch: tuple[int, int]
    cudnn: int | None = None
    triton: tuple[int, int] | None = None
    interpreted: bool = False
    te: tuple[int, int] | None = None
    te_problem: str = ""
    flash_attn: tuple[int, int, int] | None = None
    flash_attn_3: bool = False
    flash_attn_4: bool = False
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
        keys: tokens that are asked; likewise. Other than `queries` in cross attention, and in decoding, where one query
            asks all tokens before it.
        any_length: the call comes in every length from 2 tokens on, not in one.
        causal: a query sees no later key; both sequences end at the same token (bottom-right aligned).
        window: keys visible to the left and right of a query, inclusive, -1 for all of them; None for no window.
        packed: a row may hold several documents, which do not see each other.
        padding: some keys of a row are padding, which no query sees.
        bias: what is added to the scores: nothing, a tensor that broadcasts to the scores (`dense`), a vector per head
            indexed by the distance of key and query (`distance`), or that distance times a number per head (`slopes`);
            and whether it wants a gradient.
        reach: the largest distance that a distance bias tells apart.
        softcap: bound of the scores, cap * tanh(score / cap); 0 for none.
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
    padding: bool = False
    bias: Bias = "none"
    reach: int = 0
    softcap: float = 0.0
    dropout: float = 0.0
    training: bool = False
    deterministic: bool = False

    @property
    def bias_has_gradient(self) -> bool:
        """Whether the bias is trained."""
        return self.bias.endswith("_with_gradient")

    @property
    def bias_is_distance(self) -> bool:
        """Whether the bias is a vector indexed by distance."""
        return self.bias.startswith("distance")

    @property
    def bias_is_slopes(self) -> bool:
        """Whether the bias is a slope per head."""
        return self.bias.startswith("slopes")

    @property
    def bias_goes_by_distance(self) -> bool:
        """Whether the bias is either of them."""
        return self.bias_is_distance or self.bias_is_slopes

    @property
    def score_bytes(self) -> int:
        """Bytes of one layer's matrix of attention weights, (batch, heads, queries, keys) in `dtype`."""
        return self.batch * self.heads * self.queries * self.keys * BYTES[self.dtype]

    @property
    def mask_bytes(self) -> int:
        """Bytes of a mask that keeps documents or padding apart, (batch, 1, queries, keys) in `dtype`; 0 without."""
        return self.batch * self.queries * self.keys * BYTES[self.dtype] if self.packed or self.padding else 0

    @property
    def bias_bytes(self) -> int:
        """Bytes of a bias by distance written out, (heads, queries, keys) in `dtype`; 0 without one."""
        return self.heads * self.queries * self.keys * BYTES[self.dtype] if self.bias_goes_by_distance else 0

    def __str__(self) -> str:
        where = self.device if self.capability is None else f"{self.device} sm_{self.capability[0]}{self.capability[1]}"
        length = f"{self.queries} x {self.keys}"
        if self.any_length:
            length = f"up to {self.keys}" if self.queries == self.keys else f"{self.queries} x up to {self.keys}"
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
        if self.padding:
            parts.append("padding")
        if self.bias != "none":
            parts.append(_BIAS_WORDS[self.bias] + (f" (reach {self.reach})" if self.reach else ""))
        if self.softcap:
            parts.append(f"softcap {self.softcap:g}")
        if self.dropout:
            parts.append(f"dropout {self.dropout:g}")
        if self.deterministic:
            parts.append("deterministic")
        return ", ".join(parts)
