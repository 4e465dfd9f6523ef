"""Every position encoding: flash and unfused attention equal the definition, forward and backward.

The definitions here are written from the papers, over all pairs of query and key; no code of the package is in them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from tiers import cases, extra, looped
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.kernels.attention.backends.registry import ATTENTION_FUNCTIONS, AttentionFunction
from stoker.kernels.attention.inputs import AttentionInputs
from stoker.kernels.attention.packed_sequences import PackedSequences
from stoker.kernels.launch import INTERPRETED
from stoker.kernels.relative_position_buckets import relative_buckets
from stoker.models.config.gpt import GPTKeys, gpt_slice
from stoker.models.dispatch.attention_calls import CallKind
from stoker.models.layers.attention import Backends
from stoker.models.layers.attention_bias import ALiBi, CrossRelativeBias, Kerple, RelativeBias, Sandwich, alibi_slopes
from stoker.models.layers.context import LayerContext
from stoker.models.layers.position_embeddings import RotaryEmbedding, XPosEmbedding
from stoker.models.layers.self_attention import SelfAttention

BATCH, TOKENS, HIDDEN, HEADS, GROUPS, WIDTH = 2, 9, 10, 3, 1, 16
BUCKETS, LARGEST = 8, 6  # less than TOKENS, so that the last bucket holds several distances
FP64 = torch.float64

GOLDEN_SLOPES = {
    8: [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625],
    12: [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625, 0.70710678, 0.35355339, 0.1767767,
         0.08838835],
}  # fmt: skip
GOLDEN_BUCKETS = {
    True: {-200: 15, -128: 15, -64: 14, -20: 10, -8: 8, -1: 1, 0: 0, 1: 17, 7: 23, 8: 24, 16: 26, 64: 30, 127: 31,
           128: 31, 500: 31},
    False: {3: 0, 0: 0, -1: 1, -15: 15, -16: 16, -20: 17, -32: 21, -64: 26, -127: 31, -128: 31, -500: 31},
}  # fmt: skip


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("heads", GOLDEN_SLOPES)
def test_golden_slopes(heads: int) -> None:
    assert [round(slope, 8) for slope in alibi_slopes(heads)] == GOLDEN_SLOPES[heads]


@pytest.mark.parametrize("bidirectional", [True, False])
def test_golden_buckets(bidirectional: bool) -> None:
    found = relative_buckets(32, 128, bidirectional=bidirectional)
    reach = len(found) // 2
    assert reach == (91 if bidirectional else 113)
    for distance, bucket in GOLDEN_BUCKETS[bidirectional].items():
        assert found[reach + max(-reach, min(reach, distance))] == bucket, distance


@looped(("buckets", "largest"), [(32, 128), (32, 20), (8, 6), (4, 3), (4, 100), (128, 2000)])
@looped("bidirectional", [True, False])
def test_buckets_end_where_the_last_begins(buckets: int, largest: int, bidirectional: bool) -> None:
    """Not one distance sooner, and what lies beyond has the same bucket to any distance."""
    found = relative_buckets(buckets, largest, bidirectional=bidirectional)
    reach = len(found) // 2
    assert 1 <= reach <= max(largest, buckets)
    for distance in range(-2 * largest - 2, 2 * largest + 3):
        expected = bucket_of(distance, buckets, largest, causal=not bidirectional)
        assert found[reach + max(-reach, min(reach, distance))] == expected, distance
    assert found[0] != found[1] or found[-1] != found[-2]


@pytest.mark.parametrize("causal", [True, False])
def test_the_table_is_read_up_to_its_last_bucket(causal: bool) -> None:
    """The vector of a layer is as short as it can be, whatever the length."""
    positions = RelativeBias(HEADS, buckets=32, max_distance=128, bidirectional=not causal)
    bias = positions(4096, 4096).distance_bias
    assert bias is not None
    assert bias.shape == (HEADS, 2 * (113 if causal else 91) + 1)
    across = CrossRelativeBias(HEADS, buckets=32, max_distance=128)(100, 40).distance_bias
    assert across is not None
    assert across.shape == (HEADS, 2 * (91 + 60) + 1)


# ---------------------------------------------------------------- definitions


class Case(NamedTuple):
    """Positions as the package has them, and the leaves whose gradients are compared."""

    score_positions: nn.Module | None
    rotary: nn.Module | None
    interleaved: bool
    leaves: Sequence[Tensor]


def distances() -> Tensor:
    """Key minus query, (queries, keys)."""
    return torch.arange(TOKENS) - torch.arange(TOKENS)[:, None]


def alibi_term(case: Case, causal: bool) -> Tensor:
    (slopes,) = case.leaves
    return -slopes[:, None, None] * distances().abs()


def kerple_term(case: Case, causal: bool) -> Tensor:
    log_a, raw_p, raw_b = (leaf[:, None, None] for leaf in case.leaves)
    a, p, b = log_a.exp(), (1 + raw_p.exp()).log(), (1 + raw_b.exp()).log()
    behind = distances().abs().to(FP64)
    away = torch.where(behind == 0, 1.0, behind)  # 0 ** p has no gradient by p
    return torch.where(behind == 0, 0.0, -b * (1 + a * away**p).log())


def sandwich_term(case: Case, causal: bool) -> Tensor:
    term = torch.empty(HEADS, TOKENS, TOKENS, dtype=FP64)
    for query in range(TOKENS):
        for key in range(TOKENS):
            waves = [math.cos((key - query) * 10000 ** (-2 * k / WIDTH)) for k in range(1, WIDTH // 2 + 1)]
            for head in range(HEADS):
                term[head, query, key] = (sum(waves) - WIDTH / 2) / (8 * (head + 1) / HEADS)
    return term


def bucket_of(relative: int, buckets: int, largest: int, *, causal: bool) -> int:
    of_direction = buckets if causal else buckets // 2
    exact = of_direction // 2
    first = of_direction if relative > 0 and not causal else 0
    behind = max(-relative, 0) if causal else abs(relative)
    if behind < exact:
        return first + behind
    log = math.log(behind / exact) / math.log(largest / exact) * (of_direction - exact)
    return first + min(of_direction - 1, exact + int(log))


def relative_term(case: Case, causal: bool) -> Tensor:
    (table,) = case.leaves
    place = torch.tensor([[bucket_of(int(d), BUCKETS, LARGEST, causal=causal) for d in row] for row in distances()])
    return table[place].permute(2, 0, 1)


def rotated_scores(query: Tensor, key: Tensor, dim: int, *, interleaved: bool, fading: bool, base: float) -> Tensor:
    """Scores (batch, heads, queries, keys) of pairs of channels as complex numbers, turned by their positions."""

    def pairs(x: Tensor) -> Tensor:
        turning = x[..., :dim]
        if interleaved:
            return torch.complex(turning[..., 0::2], turning[..., 1::2])
        return torch.complex(turning[..., : dim // 2], turning[..., dim // 2 :])

    k = torch.arange(dim // 2, dtype=FP64)
    behind = -distances()[..., None].to(FP64)  # query minus key
    turn = torch.polar(torch.ones(1, dtype=FP64), behind * base ** (-2 * k / dim))
    if fading:
        turn = turn * ((2 * k + 0.4 * dim) / (1.4 * dim)) ** (behind / 2048)
    turned = torch.einsum("bqhd,bkhd,qkd->bhqk", pairs(query), pairs(key).conj(), turn).real
    return turned + torch.einsum("bqhd,bkhd->bhqk", query[..., dim:], key[..., dim:])


TERMS = {"alibi": alibi_term, "alibi_some_heads": alibi_term, "kerple": kerple_term, "sandwich": sandwich_term,
         "relative": relative_term}  # fmt: skip
ROTATIONS: dict[str, dict[str, Any]] = {
    "rope": {"dim": WIDTH, "interleaved": False, "fading": False, "base": 10000.0},
    "rope_interleaved": {"dim": WIDTH, "interleaved": True, "fading": False, "base": 50.0},
    "rope_partial": {"dim": WIDTH // 2, "interleaved": False, "fading": False, "base": 10000.0},
    "xpos": {"dim": WIDTH, "interleaved": True, "fading": True, "base": 10000.0},
}
KINDS = [*TERMS, *ROTATIONS, "none"]


def case_of(kind: str, causal: bool, generator: torch.Generator) -> Case:
    if kind in ROTATIONS:
        facts = ROTATIONS[kind]
        rotary = (
            XPosEmbedding(WIDTH, TOKENS)
            if facts["fading"]
            else RotaryEmbedding(facts["dim"], TOKENS, base=facts["base"], position_scale=1.0)
        )
        return Case(None, rotary.double(), facts["interleaved"], [])
    if kind == "none":
        return Case(None, None, False, [])
    positions: nn.Module
    if kind.startswith("alibi"):
        positions = ALiBi(HEADS, HEADS if kind == "alibi" else 2).double()
        positions.slopes = positions.slopes.detach().requires_grad_()
        expected = alibi_slopes(HEADS) if kind == "alibi" else [*alibi_slopes(2), 0.0]
        assert positions.slopes.tolist() == expected
        return Case(positions, None, False, [positions.slopes])
    if kind == "sandwich":
        return Case(Sandwich(HEADS, WIDTH).double(), None, False, [])
    if kind == "kerple":
        positions = Kerple(HEADS).double()
    else:
        positions = RelativeBias(HEADS, buckets=BUCKETS, max_distance=LARGEST, bidirectional=not causal).double()
    leaves = list(positions.parameters())
    for leaf in leaves:
        leaf.data += torch.randn(leaf.shape, dtype=FP64, generator=generator)
    return Case(positions, None, False, leaves)


def visible(causal: bool, padding: Tensor | None, documents: Tensor | None) -> Tensor:
    """Which key each query sees, (batch, 1, queries, keys)."""
    seen = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool)
    if causal:
        seen &= distances() <= 0
    if padding is not None:
        seen &= padding[:, None, None]
    if documents is not None:
        seen &= (documents[:, :, None] == documents[:, None])[:, None]
    return seen


def defined(attention: SelfAttention, case: Case, kind: str, hidden: Tensor, seen: Tensor, causal: bool) -> Tensor:
    parts = (hidden @ attention.qkv.weight.t()).unflatten(-1, (HEADS + 2 * GROUPS, WIDTH))
    query, key, value = parts.split((HEADS, GROUPS, GROUPS), dim=2)
    key, value = (part.repeat_interleave(HEADS // GROUPS, dim=2) for part in (key, value))
    if kind in ROTATIONS:
        scores = rotated_scores(query, key, **ROTATIONS[kind])
    else:
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key)
    scores = scores * attention.scale
    if kind in TERMS:
        scores = scores + TERMS[kind](case, causal)
    empty = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(~seen & ~empty, -math.inf).softmax(-1).masked_fill(empty, 0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(2) @ attention.output.weight.t()


def gradients_of(output: Tensor, upstream: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(output, leaves, upstream))


class LargestTensor(TorchDispatchMode):
    """The entries of the largest tensor that any operation gives."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.entries = max(self.entries, tensor.numel())
        return result


def build_attention(backends: Backends, *, causal: bool = True, interleaved: bool = False) -> SelfAttention:
    """Build a self-attention in fp64 with scores scaled by 0.4."""
    sizes = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "kv_channels": WIDTH}
    keys = sizes | {"num_query_groups": GROUPS, "attention_dropout": 0.0, "bias": False}
    keys |= {"position_embedding_type": "rope", "rotary_interleaved": interleaved}
    stack = gpt_slice(GPTKeys.model_validate(keys), vocab_size=8).stack
    stack = replace(stack, attention=replace(stack.attention, scale=0.4, causal=causal))
    return SelfAttention(stack, backends).double()


@pytest.mark.parametrize("kind", ["alibi", "kerple", "sandwich", "relative"])
def test_what_a_backend_gets_does_not_grow_with_the_square(kind: str, generator: torch.Generator) -> None:
    """Forward and backward, at 40 times the length of the other tests; the backend stands in for `triton`."""
    tokens, given = 40 * TOKENS, []

    def backend(inputs: AttentionInputs) -> Tensor:
        (term,) = (term for term in (inputs.distance_bias, inputs.alibi_slopes) if term is not None)
        given.append(term)
        return inputs.q * term.mean()

    case = case_of(kind, True, generator)
    attention = build_attention({"training": backend})
    with LargestTensor() as largest:
        assert case.score_positions is not None
        terms = case.score_positions(tokens, tokens)
        attention(torch.randn(1, tokens, HIDDEN, dtype=FP64), LayerContext("training", terms=terms)).sum().backward()
    reach = LARGEST if kind == "relative" else tokens - 1
    assert [tuple(term.shape) for term in given] == [(HEADS,) if kind == "alibi" else (HEADS, 2 * reach + 1)]
    assert largest.entries <= 100 * tokens < tokens**2


@looped(("model_dtype", "dtype"), [(torch.bfloat16, torch.float32), (FP64, FP64)])
@looped("made", [
    lambda: ALiBi(6, 4), lambda: Sandwich(6, WIDTH), lambda: Kerple(6),
    lambda: RelativeBias(6, buckets=8, max_distance=6, bidirectional=True),
    lambda: CrossRelativeBias(6, buckets=8, max_distance=6),
]
)  # fmt: skip
def test_terms_are_as_wide_as_the_scores(made: Any, model_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """A cast of the model rounds what is learned, never what is computed."""
    plain, cast = made(), made()
    for one in (plain, cast):
        for parameter in one.parameters():
            parameter.data = torch.linspace(-1, 1, parameter.numel()).view_as(parameter).bfloat16().float()
    terms = [term for term in cast.to(model_dtype)(40, 30) if term is not None]
    expected = [term for term in plain(40, 30) if term is not None]
    assert [term.dtype for term in terms] == [dtype]
    torch.testing.assert_close(terms, expected, check_dtype=False, rtol=1e-5, atol=1e-6)


def test_slopes_cost_no_operation() -> None:
    """Nothing of the size of the keys is made for ALiBi: each layer gets the one vector of slopes."""
    positions = ALiBi(HEADS, HEADS)
    with LargestTensor() as largest:
        terms = positions(TOKENS, 10**9)
    assert terms.alibi_slopes is positions.slopes
    assert terms.distance_bias is None
    assert largest.entries == 0


LAYOUTS = ["whole", "padded", "packed"]
DIRECTIONS = {"causal": True, "full": False}


def combinations() -> list[tuple[str, str, str]]:
    """Every kind of positions, direction and layout; the fast tests take one or two of each kind."""
    found = []
    for number, kind in enumerate(KINDS):
        layouts = LAYOUTS[:2] if kind in ROTATIONS else LAYOUTS  # rotation does not know of documents
        every = [(kind, direction, layout) for direction in DIRECTIONS for layout in layouts]
        fast = {number % len(every), (number + 4) % 6 if kind in ("alibi", "kerple", "relative") else -1}
        for place, one in enumerate(every):
            if place in fast or extra(one):
                found.append(one)
    return found


@pytest.mark.skipif(not INTERPRETED, reason="on a CPU Triton needs its interpreter")
@pytest.mark.parametrize(("kind", "direction", "layout"), cases(combinations(), fast=3))
def test_flash_and_unfused_equal_the_definition(
    kind: str, direction: str, layout: str, generator: torch.Generator
) -> None:
    causal = DIRECTIONS[direction]
    case = case_of(kind, causal, generator)
    functions: dict[CallKind, AttentionFunction] = {
        "training": ATTENTION_FUNCTIONS["triton"],
        "evaluation": ATTENTION_FUNCTIONS["unfused"],
    }
    attention = build_attention(functions, causal=causal, interleaved=case.interleaved)
    for parameter in attention.parameters():
        parameter.data.normal_(generator=generator)
    hidden = torch.randn(BATCH, TOKENS, HIDDEN, dtype=FP64, generator=generator, requires_grad=True)
    padding = torch.rand(BATCH, TOKENS, generator=generator) < 0.7 if layout == "padded" else None
    if padding is not None and causal:  # which asks for padding at the end, that no real token sees
        padding = padding.sort(dim=1, descending=True).values
    documents = torch.tensor([[0] * 2 + [1] * 7, [0] * 2 + [1] + [2] * 6]).int() if layout == "packed" else None
    packed = None if documents is None else PackedSequences.from_documents(documents, dtype=FP64, causal=causal)
    upstream = torch.randn(BATCH, TOKENS, HIDDEN, dtype=FP64, generator=generator)
    leaves = [hidden, attention.qkv.weight, *case.leaves]
    counts = torch.ones(()) if padding is None or not causal else padding[..., None]  # tokens whose output is of use

    expected = counts * defined(attention, case, kind, hidden, visible(causal, padding, documents), causal)
    expected_gradients = gradients_of(expected, upstream, leaves)
    for name in functions:
        terms = None if case.score_positions is None else case.score_positions(TOKENS, TOKENS)
        rotary = None if case.rotary is None else case.rotary(TOKENS)
        output = counts * attention(hidden, LayerContext(name, rotary, terms, packed, padding))
        torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-11)
        for ours, theirs in zip(gradients_of(output, upstream, leaves), expected_gradients, strict=True):
            assert theirs.abs().max() > 0
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
