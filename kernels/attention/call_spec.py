"""Inputs of backend selection: the specification of an attention call, installed software and measured times."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import log2
from typing import Any, Literal

DType = Literal["fp64", "fp32", "bf16", "fp16"]
Bias = Literal[
    "none", "dense", "dense_with_gradient", "distance", "distance_with_gradient", "slopes", "slopes_with_gradient"
]
BYTES_PER_ELEMENT = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_BIAS_WORDS = {
    "dense": "dense bias",
    "dense_with_gradient": "dense bias with gradient",
    "distance": "distance bias",
    "distance_with_gradient": "distance bias with gradient",
    "slopes": "ALiBi slopes",
    "slopes_with_gradient": "ALiBi slopes with gradient",
}

MAX_OCTAVES = 1.0
"""Largest distance of a call's length, as log2 of the ratio, from a measured one; none beyond the longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledSoftware:
    """Installed versions and process settings that determine which calls a backend supports.

    Attributes:
        torch: (major, minor) of PyTorch.
        cudnn: version number as reported by cuDNN (9.15.1 is 91501), None without cuDNN.
        triton: (major, minor) of Triton, None without it.
        interpreted: Triton runs in interpreter mode, on the CPU.
        te: (major, minor) of TransformerEngine, None without it.
        te_problem: why an installed TransformerEngine cannot be used; empty if it can.
        flash_attn: version of the flash-attn package (FlashAttention 2), None without it.
        flash_attn_3: FlashAttention 3 is installed where TransformerEngine looks for it.
        flash_attn_4: FlashAttention 4 is installed where TransformerEngine looks for it.
        deterministic_algorithms: `torch.use_deterministic_algorithms(True)` is set.
        measured: times of the backends with this software on the card of the run, which decide within a family.
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
    measured: MeasuredTimes | None = field(default=None, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Specification of one kind of attention call of a model.

    Attributes:
        device: as `torch.device.type`.
        capability: CUDA compute capability, None on other devices.
        dtype: of query, key and value (the autocast dtype under autocast).
        batch: sequences per call.
        heads: query heads.
        groups: key and value heads; divides `heads`.
        head_dim: width of a head.
        value_dim: width of a value head; None for `head_dim`.
        queries: query length; the maximum if `any_length`.
        keys: key length; the maximum if `any_length`. Differs from `queries` in cross-attention and in decoding, where
            one query attends to all previous tokens.
        any_length: calls have varying lengths, from 2 tokens on, instead of one fixed length.
        causal: no query attends to a later key; both sequences end at the same token (bottom-right aligned).
        window: keys visible to the left and right of a query, inclusive, -1 for all of them; None for no window.
        attention_chunk: tokens of a chunk, of which a query sees its own only; 0 for one chunk.
        packed: a row may hold several documents, which do not attend to each other.
        padding: some keys of a row are padding and are masked.
        bias: added to the scores: none, a tensor broadcastable to the scores (`dense`), a vector per head indexed by
            the relative position of key and query (`distance`), or one slope per head times the distance (`slopes`,
            ALiBi); with or without a gradient.
        reach: R of a distance bias, the largest distance it distinguishes.
        sinks: attention sinks, a logit per head in the denominator of the softmax.
        softcap: scores become cap * tanh(score / cap); 0 for none.
        dropout: probability of dropping an attention weight.
        training: gradients are needed.
        deterministic: results and gradients must be bitwise reproducible.
        split: other ranks compute other heads or tokens of the same attention.
        fp8: multiplies in fp8, with scales of the caller's.
    """

    device: str
    capability: tuple[int, int] | None = None
    dtype: DType
    batch: int
    heads: int
    groups: int
    head_dim: int
    value_dim: int | None = None
    queries: int
    keys: int
    any_length: bool = False
    causal: bool = True
    window: tuple[int, int] | None = None
    attention_chunk: int = 0
    packed: bool = False
    padding: bool = False
    bias: Bias = "none"
    reach: int = 0
    sinks: bool = False
    softcap: float = 0.0
    dropout: float = 0.0
    training: bool = False
    deterministic: bool = False
    split: bool = False
    fp8: bool = False

    @property
    def bias_requires_grad(self) -> bool:
        """True if the bias requires a gradient."""
        return self.bias.endswith("_with_gradient")

    @property
    def bias_is_distance_table(self) -> bool:
        """True for a distance bias: a vector per head indexed by relative position."""
        return self.bias.startswith("distance")

    @property
    def bias_is_alibi(self) -> bool:
        """True for ALiBi slopes."""
        return self.bias.startswith("slopes")

    @property
    def bias_is_relative(self) -> bool:
        """True if the bias depends on relative position only: a distance bias or ALiBi slopes."""
        return self.bias_is_distance_table or self.bias_is_alibi

    @property
    def has_other_values(self) -> bool:
        """True if value heads are of another width than keys (MLA)."""
        return self.value_dim not in (None, self.head_dim)

    @property
    def score_bytes(self) -> int:
        """Size of one layer's attention weights, (batch, heads, queries, keys) in `dtype`."""
        return self.batch * self.heads * self.queries * self.keys * BYTES_PER_ELEMENT[self.dtype]

    @property
    def mask_bytes(self) -> int:
        """Size of the mask for documents or padding, (batch, 1, queries, keys) in `dtype`; 0 without either."""
        return (
            self.batch * self.queries * self.keys * BYTES_PER_ELEMENT[self.dtype] if self.packed or self.padding else 0
        )

    @property
    def dense_bias_bytes(self) -> int:
        """Size of a distance bias or ALiBi expanded to (heads, queries, keys) in `dtype`; 0 without one."""
        return self.heads * self.queries * self.keys * BYTES_PER_ELEMENT[self.dtype] if self.bias_is_relative else 0

    def __str__(self) -> str:
        device = self.device
        if self.capability is not None:
            device += f" sm_{self.capability[0]}{self.capability[1]}"
        length = f"{self.queries} x {self.keys}"
        if self.any_length:
            length = f"up to {self.keys}" if self.queries == self.keys else f"{self.queries} x up to {self.keys}"
        parts = [
            device,
            self.dtype,
            f"batch {self.batch}",
            f"{self.heads} heads" if self.groups == self.heads else f"{self.heads} heads in {self.groups} groups",
            f"head width {self.head_dim}" + (f", of values {self.value_dim}" if self.has_other_values else ""),
            f"{length} tokens",
            "causal" if self.causal else "full",
        ]
        if self.window is not None:
            parts.append(f"window {list(self.window)}")
        if self.attention_chunk:
            parts.append(f"chunks of {self.attention_chunk}")
        if self.packed:
            parts.append("packed documents")
        if self.padding:
            parts.append("padding")
        if self.bias != "none":
            parts.append(_BIAS_WORDS[self.bias] + (f" (reach {self.reach})" if self.reach else ""))
        if self.sinks:
            parts.append("attention sinks")
        if self.softcap:
            parts.append(f"softcap {self.softcap:g}")
        if self.dropout:
            parts.append(f"dropout {self.dropout:g}")
        if self.deterministic:
            parts.append("deterministic")
        if self.fp8:
            parts.append("in fp8")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCall:
    """A call of self-attention in training, and the time that each backend takes for it.

    Attributes:
        milliseconds: backend -> (forward, backward).
        refused: backend -> why it could not be measured, although its limits allow the call.
    """

    call: AttentionCall
    milliseconds: dict[str, tuple[float, float]]
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        """FLOPs of forward and backward, without masked pairs: 2 matmuls and 5."""
        call = self.call
        return 14 * call.head_dim * call.batch * call.heads * call.queries * call.keys / (2 if call.causal else 1)

    def __str__(self) -> str:
        call = self.call
        mask, bias = "causal" if call.causal else "full", "" if call.bias == "none" else f", {_BIAS_WORDS[call.bias]}"
        sizes = f"head width {call.head_dim}, group size {call.heads // call.groups}, {call.keys} tokens"
        return f"{sizes}, {mask}{bias}"

    def time(self, backend: str, *, training: bool) -> float | None:
        """Return the milliseconds of a backend, of forward and backward in training; None if not measured."""
        found = self.milliseconds.get(backend)
        return None if found is None else sum(found[: 1 + training])


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimes:
    """All measured calls of a card.

    Attributes:
        source: file and date of the measurement, for messages.
    """

    source: str
    calls: tuple[MeasuredCall, ...]

    def nearest(self, call: AttentionCall) -> tuple[MeasuredCall | None, str]:
        """Return the measured call that stands for a call; None and the reason if there is none.

        All options and the head width are equal, group size and length the nearest ones.
        """
        if call.queries != call.keys:
            return None, "not measured with other queries than keys"
        options = _options(call)
        differing = [
            [name for name, value in _options(one.call).items() if options[name] != value] for one in self.calls
        ]
        alike = [one for one, names in zip(self.calls, differing, strict=True) if not names]
        longest = max((one.call.keys for one in alike), default=0)

        def octaves(one: MeasuredCall) -> float:
            return abs(log2(min(call.keys, longest) / one.call.keys))

        near = [one for one in alike if octaves(one) <= MAX_OCTAVES]
        if not near:
            names = min(differing, key=len, default=[])
            return None, f"not measured with {names[0]} {options[names[0]]}" if names else "no measured length is near"
        groups = call.heads / call.groups
        return min(near, key=lambda one: (octaves(one), abs(log2(groups * one.call.groups / one.call.heads)))), ""


_SIZES = ("batch", "heads", "groups", "queries", "keys", "training", "split", "reach")
"""Properties that a measured call may differ in from those it stands for."""


def _options(call: AttentionCall) -> dict[str, Any]:
    """Return all other properties; with bf16 and fp16, and a bias with and without gradient, alike."""
    found = {each.name: getattr(call, each.name) for each in fields(call) if each.name not in _SIZES}
    dtype, width = "16 bits" if call.dtype in ("bf16", "fp16") else call.dtype, call.value_dim or call.head_dim
    return found | {"dtype": dtype, "bias": call.bias.removesuffix("_with_gradient"), "value_dim": width}
