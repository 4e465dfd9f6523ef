"""Position embeddings and attention windows of a stack: keys, and what they resolve to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, get_args

from pydantic import Field

from ...kernels.relative_position_buckets import relative_buckets
from ...kernels.rope_scaling import Llama3Scaling, RotaryScaling, YarnScaling
from .extension_keys import ExtensionName
from .extensions import ExtensionError, load_extension
from .key_block import NonEmptyText, extension_field
from .sizes import SizeKeys, head_dim_of

PositionEmbedding = Literal[
    "learned_absolute",
    "learned_parameters",
    "rope",
    "xpos",
    "alibi",
    "kerple",
    "sandwich",
    "relative",
    "none",
]
Window = Annotated[list[Annotated[int, Field(ge=-1)]], Field(min_length=2, max_length=2)]
BOUNDED_POSITION_TYPES = ("learned_absolute", "learned_parameters", "rope", "xpos")
"""Position embedding types with a table, which bounds the sequence length."""
MAX_POSITIONS = 1 << 24
"""Longest sequence of a configuration: a table has a row for each position, and the file may be untrusted."""

SCALING_KEYS = ("rotary_scaling_factor", "rotary_original_length", "rotary_low_turns", "rotary_high_turns")
_ROTARY_KEYS = (
    "rotary_percentage",
    "rotary_base",
    "rotary_interleaved",
    "seq_len_interpolation_factor",
    "scale_positional_embedding",
    "rotary_scaling",
    *SCALING_KEYS,
)
KEYS_OF_KINDS = {
    "rope": _ROTARY_KEYS,
    "alibi": ("num_attention_heads_alibi",),
    "relative": ("relative_attention_num_buckets", "relative_attention_max_distance"),
}


class PositionKeys(SizeKeys):
    """Position embedding and attention window of one stack (nemo_semantics 1.5)."""

    position_embedding_type: PositionEmbedding | Annotated[NonEmptyText, ExtensionName("attention_bias")] = (
        "learned_absolute"
    )
    """Learned position embeddings (`learned_absolute`; `learned_parameters`: not restarted at documents within a
    sample), rotary embedding (`rope`; `xpos` decays with distance), a bias on the attention scores (`alibi`, `kerple`,
    `sandwich`, T5's `relative`, or an `attention_bias` of your own), or `none`."""
    rotary_percentage: float = Field(1.0, gt=0, le=1)
    """Fraction of each head's channels that is rotated."""
    rotary_base: float = Field(10000.0, gt=0)
    """Base of the rotary frequencies: base ** (-2i / d)."""
    rotary_interleaved: bool = False
    """Rotate pairs (2i, 2i+1) instead of the two halves of the head."""
    seq_len_interpolation_factor: float | None = Field(None, ge=1)
    """Divide positions by this factor before rotating; null is 1."""
    scale_positional_embedding: bool = False
    """NeMo's key for Llama 3.1's RoPE scaling, the same as `rotary_scaling: llama3`."""
    rotary_scaling: Literal["llama3", "yarn"] | None = extension_field(None)
    """RoPE frequency scaling for long contexts: Llama 3.1's or YaRN; null: none."""
    rotary_scaling_factor: float = extension_field(8.0, ge=1)
    """Factor by which `rotary_scaling` divides the lowest frequencies (Hugging Face: `factor`)."""
    rotary_original_length: int = extension_field(8192, ge=1)
    """Context length before `rotary_scaling` (Hugging Face: `original_max_position_embeddings`)."""
    rotary_low_turns: float | None = extension_field(None, gt=0)
    """Frequencies with fewer rotations in that length are scaled; null: 1 (`low_freq_factor`; YaRN: `beta_slow`)."""
    rotary_high_turns: float | None = extension_field(None, gt=0)
    """Frequencies with more rotations are kept; null: 4 for `llama3` (`high_freq_factor`), 32 for `yarn`
    (`beta_fast`)."""
    num_attention_heads_alibi: int | None = Field(None, ge=1)
    """Number of first heads with ALiBi slopes, the others have no position bias; null: all heads."""
    relative_attention_num_buckets: int = Field(32, ge=2)
    """Number of distance buckets of `relative`, including those of later keys."""
    relative_attention_max_distance: int = Field(128, ge=2)
    """Distances from this on share the last bucket of `relative`."""
    window_size: Window | None = None
    """Sliding window `[left, right]`: a token attends to this many tokens before and after it, -1 for all; Hugging
    Face's `sliding_window=4096` is `[4095, 0]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionBiasSlice:
    """Position bias: a term added to the attention scores depending on the distance of query and key.

    Attributes:
        kind: function of the distance.
        alibi_heads: number of first heads that have a slope (`alibi`).
        buckets: number of distance buckets (`relative`).
        max_distance: see `relative_buckets` (`relative`).
        name: the component of a user's own (`own`).
        heads: heads that it is made for (`own`), those of all tensor-parallel ranks.
        parameters: its number of parameters (`own`).
    """

    kind: Literal["alibi", "kerple", "sandwich", "relative", "own"]
    alibi_heads: int
    buckets: int
    max_distance: int
    name: str = ""
    heads: int = 0
    parameters: int = 0

    @property
    def learned(self) -> bool:
        """True if the bias has parameters."""
        return self.kind in ("kerple", "relative") or self.parameters > 0

    @property
    def key(self) -> str:
        """Value of `position_embedding_type`."""
        return self.name or self.kind

    def max_distinct_distance(self, tokens: int, *, causal: bool) -> int:
        """Return the largest distance with its own bias for this sequence length; 0 for ALiBi, without a vector."""
        match self.kind:
            case "alibi":
                return 0
            case "relative":
                return len(relative_buckets(self.buckets, self.max_distance, bidirectional=not causal)) // 2
            case _:
                return max(1, tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySlice:
    """Rotary embedding of the first `dim` channels of each head.

    Attributes:
        dim: rotated channels, even.
        base: base of the frequencies, base ** (-2i / dim).
        interleaved: rotate pairs (2i, 2i + 1); otherwise channel i with channel i + dim / 2.
        position_scale: factor of every position (1 / `seq_len_interpolation_factor`).
        scaling: frequency scaling for long contexts, or None.
        xpos: xPos: scores decay with distance.
        positions: rows of the tables, the longest sequence.
    """

    dim: int
    base: float
    interleaved: bool
    position_scale: float
    scaling: RotaryScaling | None
    xpos: bool
    positions: int


def rotary_dim_of(keys: PositionKeys) -> int:
    """Return the rotated channels of a head, int(width * rotary_percentage)."""
    return int(head_dim_of(keys) * keys.rotary_percentage)


def position_bias_slice(keys: PositionKeys) -> PositionBiasSlice | None:
    """Resolve the position bias; None for other position embedding types."""
    kind = keys.position_embedding_type
    if kind not in get_args(PositionEmbedding):
        kind = "own"
    elif kind not in ("alibi", "kerple", "sandwich", "relative"):
        return None
    own = (keys.position_embedding_type, keys.num_attention_heads) if kind == "own" else ("", 0)
    return PositionBiasSlice(
        kind=kind,
        alibi_heads=keys.num_attention_heads_alibi or keys.num_attention_heads,
        buckets=keys.relative_attention_num_buckets,
        max_distance=keys.relative_attention_max_distance,
        name=own[0],
        heads=own[1],
        parameters=_count_parameters(*own) if kind == "own" else 0,
    )


@cache
def _count_parameters(name: str, heads: int) -> int:
    """Count the parameters of an attention bias of a user's own.

    Raises:
        LookupError, ValueError: it is not registered, or cannot be imported or built.
    """
    component = load_extension("attention_bias", name)
    try:
        module = component(heads)
    except TypeError as error:
        raise ExtensionError(f"the attention bias {name} cannot be built with the number of heads: {error}") from error
    return sum(parameter.numel() for parameter in module.parameters())


def rotary_scaling(keys: PositionKeys) -> RotaryScaling | None:
    """Resolve the RoPE frequency scaling; None for none."""
    kind = "llama3" if keys.scale_positional_embedding else keys.rotary_scaling
    factor, length, low = keys.rotary_scaling_factor, keys.rotary_original_length, keys.rotary_low_turns or 1.0
    if kind == "llama3":
        high = keys.rotary_high_turns or 4.0
        return Llama3Scaling(
            factor=factor, original_max_position_embeddings=length, low_freq_factor=low, high_freq_factor=high
        )
    if kind == "yarn":
        return YarnScaling(
            factor=factor,
            original_max_position_embeddings=length,
            beta_slow=low,
            beta_fast=keys.rotary_high_turns or 32.0,
        )
    return None


def rotary_slice(keys: PositionKeys, *, positions: int) -> RotarySlice | None:
    """Resolve the rotary embedding; None for other position embedding types."""
    if keys.position_embedding_type == "xpos":
        return RotarySlice(
            dim=head_dim_of(keys),
            base=10000.0,
            interleaved=True,
            position_scale=1.0,
            scaling=None,
            xpos=True,
            positions=positions,
        )
    if keys.position_embedding_type != "rope":
        return None
    return RotarySlice(
        dim=rotary_dim_of(keys),
        base=keys.rotary_base,
        interleaved=keys.rotary_interleaved,
        position_scale=1 / (keys.seq_len_interpolation_factor or 1.0),
        scaling=rotary_scaling(keys),
        xpos=False,
        positions=positions,
    )


def resolve_window(keys: PositionKeys, *, causal: bool, max_length: int | None = None) -> tuple[int, int] | None:
    """Resolve the attention window; None if it masks nothing in sequences of up to `max_length` tokens (None: any)."""
    left, right = (
        -1 if max_length is not None and side >= max_length - 1 else side for side in keys.window_size or (-1, -1)
    )
    right = 0 if causal else right
    return None if left < 0 and (causal or right < 0) else (left, right)
