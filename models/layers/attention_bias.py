"""Position modules that bias attention scores: a term per head for each distance between key and query.

One module per stack, shared by its layers. Nothing here is (queries, keys)-shaped: a layer gets one slope, or one
vector of terms by distance, per head, from which the backends compute the bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ...kernels.relative_position_buckets import relative_buckets
from ..config.dense_stack import AttentionSlice
from ..config.extensions import ExtensionError, load_extension
from .own_module import build_seeded, tensors_of
from .position_embeddings import ComputedTable


class ScoreBias(NamedTuple):
    """Position-dependent terms added to the attention scores of every layer of a stack.

    Attributes:
        distance_bias: (heads, 2 R + 1), fp32 (fp64 in an fp64 model); entry [h, R + d] is added to the score of a key d
            positions after its query (negative d: before it), with d clipped to [-R, R]. None for none. See
            `kernels.attention.reference.reference_attention`.
        alibi_slopes: (heads,), same dtype; -slope |d| is added. None for none.
    """

    distance_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None


# ---------------------------------------------------------------- numbers


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes of ALiBi (arXiv 2108.12409): 2^(-8 i / heads), i = 1..heads, for a power of two.

    For any other number of heads: the slopes of the largest power of two below it, then every second slope of twice
    that power.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2.0 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]


def inverse_softplus(value: float) -> float:
    """Return x such that log(1 + exp(x)) == value, for a positive value."""
    return value + math.log(-math.expm1(-value))


def _reach(queries: int, keys: int) -> int:
    """Return the largest possible distance, at least 1."""
    return max(1, queries - 1, keys - 1)


def _mirrored(behind: Tensor) -> Tensor:
    """Extend terms (heads, R) for distances 1..R symmetrically to (heads, 2 R + 1) for -R..R, with 0 at distance 0."""
    return torch.cat((behind.flip(1), behind.new_zeros(behind.shape[0], 1), behind), dim=1)


def _wide(tensor: Tensor) -> Tensor:
    """Convert to at least fp32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# ---------------------------------------------------------------- modules


class ALiBi(ComputedTable):
    """ALiBi: minus slope times distance (arXiv 2108.12409).

    Args:
        heads: query heads.
        sloped: number of leading heads with slopes, those of a model with so many heads; the others have no positions.
    """

    slopes: Tensor

    def __init__(self, heads: int, sloped: int) -> None:
        super().__init__()
        self.sloped = sloped
        self.values = (alibi_slopes(sloped) + [0.0] * (heads - sloped))[:heads]
        self.register_buffer("slopes", torch.empty(heads), persistent=False)
        self._fill()

    def select_heads(self, first: int, heads: int) -> None:
        """Take the slopes of this module's heads among `heads`, from `first` on (tensor parallelism)."""
        slopes = alibi_slopes(self.sloped) + [0.0] * (heads - self.sloped)
        self.values = slopes[first : first + len(self.slopes)]
        self._fill()

    def _fill(self) -> None:
        if not self.slopes.is_meta:
            self.slopes = torch.tensor(self.values, dtype=_wide(self.slopes).dtype, device=self.slopes.device)

    def forward(self, queries: int, keys: int) -> ScoreBias:
        """Return the slopes, for any number of queries and keys."""
        return ScoreBias(alibi_slopes=self.slopes)


class Kerple(nn.Module):
    """Kerple: -b log(1 + a |d|^p) with a, b, p > 0 learned per head (arXiv 2205.09921, the logarithmic kernel).

    The parameters are log(a) and the inverse softplus of b and p, so that optimizer steps keep a, b and p positive. The
    logarithm is computed as softplus(log(a) + p log|d|), which does not overflow. Initially a = p = 1 and b are the
    slopes of ALiBi; see `models.init`.

    Args:
        heads: query heads.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.log_a = nn.Parameter(torch.zeros(heads))
        self.raw_p = nn.Parameter(torch.full((heads,), inverse_softplus(1.0)))
        self.raw_b = nn.Parameter(torch.tensor([inverse_softplus(slope) for slope in alibi_slopes(heads)]))

    def select_heads(self, first: int, heads: int) -> None:
        """Be the bias of some of `heads` heads: their parameters say which."""

    def forward(self, queries: int, keys: int) -> ScoreBias:
        """Return the terms for the distances of `queries` and `keys` tokens."""
        log_a, raw_p, raw_b = _wide(self.log_a), _wide(self.raw_p), _wide(self.raw_b)
        behind = torch.arange(1, _reach(queries, keys) + 1, dtype=log_a.dtype, device=log_a.device)
        p, b = F.softplus(raw_p)[:, None], F.softplus(raw_b)[:, None]
        return ScoreBias(_mirrored(-b * F.softplus(log_a[:, None] + p * behind.log())))


class Sandwich(ComputedTable):
    """Sandwich (arXiv 2212.10356), with m = 1..heads and w the width of a head.

    (sum over k = 1..w/2 of cos(d 10000^(-2k/w)) - w/2) / (8 m / heads)

    Args:
        heads: query heads.
        width: width of a head, even.
    """

    sums: Tensor

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_head, self.all_heads = 0, heads
        self.width = width
        self.register_buffer("sums", torch.empty(1), persistent=False)  # grows with the longest sequence so far
        self._fill()

    def select_heads(self, first: int, heads: int) -> None:
        """Be the bias of this module's heads among `heads`, from `first` on (tensor parallelism)."""
        self.first_head, self.all_heads = first, heads

    def _fill(self) -> None:
        if not self.sums.is_meta:
            self._compute(self.sums.shape[0])

    def _compute(self, reach: int) -> None:
        """Compute the sums of distances 1..reach, minus width / 2; in fp64 on the CPU, since angles are large."""
        channel = torch.arange(2, self.width + 2, 2, dtype=torch.float64, device="cpu")
        behind = torch.arange(1, reach + 1, dtype=torch.float64, device="cpu")
        total = torch.outer(behind, 10000.0 ** (-channel / self.width)).cos_().sum(dim=1) - self.width / 2
        self.sums = total.to(_wide(self.sums).dtype).to(self.sums.device)

    def forward(self, queries: int, keys: int) -> ScoreBias:
        """Return the terms for the distances of `queries` and `keys` tokens."""
        reach = _reach(queries, keys)
        if reach > self.sums.shape[0]:
            self._compute(reach if self.training else 2 * reach)  # amortized: generation grows token by token
        head = torch.arange(1, self.heads + 1, dtype=self.sums.dtype, device=self.sums.device) + self.first_head
        return ScoreBias(_mirrored(self.sums[:reach] * (self.all_heads / (8 * head))[:, None]))


class RelativeBias(ComputedTable):
    """Relative position bias of T5: a learned term per head for each bucket of distances (arXiv 1910.10683).

    Args:
        heads: query heads.
        buckets: number of buckets, the rows of the table.
        max_distance: see `relative_buckets`.
        bidirectional: separate buckets for keys after the query.
    """

    places: Tensor

    def __init__(self, heads: int, *, buckets: int, max_distance: int, bidirectional: bool) -> None:
        super().__init__()
        self.values: Sequence[int] = relative_buckets(buckets, max_distance, bidirectional=bidirectional)
        self.table = nn.Parameter(torch.zeros(buckets, heads))
        self.register_buffer("places", torch.empty(len(self.values), dtype=torch.int64), persistent=False)
        self._fill()

    def select_heads(self, first: int, heads: int) -> None:
        """Be the bias of some of `heads` heads: the columns of the table say which."""

    def _fill(self) -> None:
        if not self.places.is_meta:
            self.places = torch.tensor(self.values, device=self.places.device)

    def forward(self, queries: int, keys: int) -> ScoreBias:
        """Return the terms for any number of queries and keys: distances beyond the last bucket are clipped."""
        # F.embedding, since its gradient sums equal buckets in a deterministic order, unlike that of indexing.
        return ScoreBias(F.embedding(self.places, _wide(self.table)).t().contiguous())


class CrossRelativeBias(RelativeBias):
    """Relative position bias for cross-attention: distances of positions in two sequences, always bidirectional.

    Args:
        heads: query heads.
        buckets: number of buckets, the rows of the table.
        max_distance: see `relative_buckets`.
    """

    def __init__(self, heads: int, *, buckets: int, max_distance: int) -> None:
        super().__init__(heads, buckets=buckets, max_distance=max_distance, bidirectional=True)

    def forward(self, queries: int, keys: int) -> ScoreBias:
        """Return the terms for the distances of `queries` and `keys` tokens.

        Attention aligns the ends of queries and keys; positions here are aligned at the start, hence the shift.
        """
        shift, farthest = keys - queries, self.places.shape[0] // 2
        reach = farthest + abs(shift)
        distance = torch.arange(-reach, reach + 1, device=self.places.device) + shift
        places = self.places[distance.clamp(-farthest, farthest) + farthest]
        return ScoreBias(F.embedding(places, _wide(self.table)).t().contiguous())


class OwnBias(nn.Module):
    """Position bias of a user's own, computed in at least fp32.

    On tensor-parallel ranks each computes the terms of all heads, and selects those of its own.

    Args:
        name: name of the component, a module class that is called with the number of heads. Its forward maps distances,
            key position minus query position, int64 (L,), to terms (heads, L); its parameters are initialized by it.
        all_heads: query heads of all tensor-parallel ranks.
        heads: those of this rank.
    """

    place: Tensor

    def __init__(self, name: str, all_heads: int, heads: int) -> None:
        super().__init__()
        self.rebuild: Callable[[], nn.Module] = partial(load_extension("attention_bias", name), all_heads)
        self.name, self.all_heads, self.heads, self.first_head = name, all_heads, heads, 0
        self.bias = self.rebuild()
        self.register_buffer("place", torch.empty(0), persistent=False)

    def select_heads(self, first: int, heads: int) -> None:
        """Be the bias of this rank's heads among `heads`, from `first` on (tensor parallelism)."""
        self.first_head = first

    def initial_tensors(self, seed: int) -> dict[str, Tensor]:
        """See `OwnModule`."""
        return {f"bias.{name}": tensor for name, tensor in tensors_of(build_seeded(self.rebuild, seed))}

    def forward(self, queries: int, keys: int) -> ScoreBias:
        """Return the terms for the distances of `queries` and `keys` tokens.

        Raises:
            ExtensionError: they have another shape.
        """
        reach = _reach(queries, keys)
        distances = torch.arange(-reach, reach + 1, device=self.place.device)
        parameters = {name: _wide(parameter) for name, parameter in self.bias.named_parameters()}
        terms = functional_call(self.bias, parameters, (distances,))
        if terms.shape != (self.all_heads, len(distances)):
            raise ExtensionError(
                f"`forward` of the attention bias {self.name} must return {(self.all_heads, len(distances))}, (heads, "
                f"distances), but returned {tuple(terms.shape)}."
            )
        return ScoreBias(_wide(terms[self.first_head : self.first_head + self.heads]).contiguous())


ScoreBiasModule = ALiBi | Kerple | Sandwich | RelativeBias | OwnBias


def build_score_bias(attention: AttentionSlice) -> ScoreBiasModule | None:
    """Build the position bias of the scores of an attention, or return None without one."""
    distance = attention.position_bias
    if distance is None:
        return None
    match distance.kind:
        case "alibi":
            return ALiBi(attention.heads, distance.alibi_heads)
        case "own":
            return OwnBias(distance.name, distance.heads, attention.heads)
        case "kerple":
            return Kerple(attention.heads)
        case "sandwich":
            return Sandwich(attention.heads, attention.head_dim)
        case "relative":
            return RelativeBias(
                attention.heads,
                buckets=distance.buckets,
                max_distance=distance.max_distance,
                bidirectional=not attention.causal,
            )


# ---------------------------------------------------------------- cost


def position_bias_parameters(attention: AttentionSlice) -> int:
    """Return the number of parameters of the position bias on the scores of an attention."""
    bias = attention.position_bias
    if bias is None or not bias.learned:
        return 0
    if bias.kind == "own":
        return bias.parameters
    return attention.heads * (bias.buckets if bias.kind == "relative" else 3)
