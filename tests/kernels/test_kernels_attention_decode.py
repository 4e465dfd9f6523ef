"""Attention of one query over a cache: plain torch against the definition, and Triton against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fork_server import ForkServer
from offline_compile import SHARED_MEMORY
from tiers import full_only, looped
from torch import Tensor

from stoker.kernels.attention.decode import (
    DecodeInputs,
    decode_attention,
    num_splits,
    reference_decode_attention,
    triton_decode_attention,
)
from stoker.kernels.attention.reference import reference_attention
from stoker.kernels.launch import HAS_TRITON

ROWS, HEADS, GROUPS, WIDTH = 3, 6, 2, 24
interpreted = pytest.mark.skipif(not HAS_TRITON, reason="Triton has no build for this platform")


def reference_decode(*tensors: Any, **options: Any) -> Tensor:
    return reference_decode_attention(DecodeInputs(*tensors, **options))


def triton_decode(*tensors: Any, splits: int | None = None, **options: Any) -> Tensor:
    return triton_decode_attention(DecodeInputs(*tensors, **options), splits)


def decode(*tensors: Any, **options: Any) -> Tensor:
    return decode_attention(DecodeInputs(*tensors, **options))


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def ring(sequence: Tensor, length: int, slots: int) -> Tensor:
    """(tokens, groups, width) as a cache holds the first `length` of them; slots that hold none are NaN."""
    cached = torch.full((sequence.shape[1], slots, sequence.shape[2]), torch.nan, dtype=sequence.dtype)
    for position in range(length):
        cached[:, position % slots] = sequence[position]
    return cached


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 0.6, HEADS, dtype=torch.float64)},
    "distance": {"distance_bias": randn(HEADS, 2 * 9 + 1, seed=3)},
    "chunks": {"attention_chunk": 9},
    "sinks": {"sinks": torch.linspace(-1.0, 2.0, HEADS, dtype=torch.float64)},
    "all": {
        "softcap": 2.0,
        "alibi_slopes": torch.linspace(0.1, 0.6, HEADS, dtype=torch.float64),
        "distance_bias": randn(HEADS, 2 * 40 + 1, seed=4),
        "sinks": torch.linspace(1.0, -2.0, HEADS, dtype=torch.float64),
    },
}


OF_A_MEMORY = [option for option in OPTIONS if option != "chunks"]


@looped("option", OPTIONS)
@looped("left", [-1, 7])
def test_a_step_is_the_last_row_of_attention(option: str, left: int) -> None:
    """Rows of different lengths, a ring as small as the window allows, NaN where nothing was written."""
    lengths = torch.tensor([1, 13, 30])
    slots = 32 if left < 0 else left + 1
    query, key, value = (randn(ROWS, 30, heads, WIDTH, seed=heads) for heads in (HEADS, GROUPS, GROUPS))
    last = torch.stack([query[row, length - 1] for row, length in enumerate(lengths.tolist())])
    keys, values = (torch.stack([ring(t[r], n, slots) for r, n in enumerate(lengths.tolist())]) for t in (key, value))
    found = reference_decode(last, keys, values, lengths - 1, scale=0.3, left_window=left, **OPTIONS[option])
    for row, length in enumerate(lengths.tolist()):
        whole = reference_attention(
            *(t[row : row + 1, :length] for t in (query, key, value)), causal=True, window_size=(left, -1),
            softmax_scale=0.3, **OPTIONS[option],
        )  # fmt: skip
        assert isinstance(whole, Tensor)
        torch.testing.assert_close(found[row], whole[0, -1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("option", OF_A_MEMORY)
def test_a_memory_is_seen_whole_and_shared_by_rows(option: str) -> None:
    """Distances count from the first tokens of both texts, so later keys have biases of their own."""
    lengths, positions = torch.tensor([5, 19]), torch.tensor([0, 3, 11, 25])
    query, key, value = (
        randn(*shape, seed=n) for n, shape in enumerate([(4, HEADS, WIDTH), *[(2, GROUPS, 19, WIDTH)] * 2])
    )
    found = reference_decode(query, key, value, positions, lengths=lengths, scale=0.3, **OPTIONS[option])
    for row, position in enumerate(positions.tolist()):
        memory = row // 2
        length = int(lengths[memory])
        options = dict(OPTIONS[option])
        bias = options.pop("distance_bias", None)
        slopes = options.pop("alibi_slopes", None)
        distance = torch.arange(length) - position
        dense = torch.zeros(HEADS, length, dtype=torch.float64)
        if bias is not None:
            reach = bias.shape[1] // 2
            dense = dense + bias[:, distance.clamp(-reach, reach) + reach]
        if slopes is not None:
            dense = dense - slopes[:, None] * distance.abs()
        keys, values = (t[memory : memory + 1, :, :length].transpose(1, 2) for t in (key, value))
        whole = reference_attention(
            query[row : row + 1, None], keys, values, softmax_scale=0.3, bias=dense[None, :, None], **options
        )
        assert isinstance(whole, Tensor)
        torch.testing.assert_close(found[row], whole[0, 0], rtol=1e-12, atol=1e-13)


@interpreted
@pytest.mark.parametrize(
    ("option", "left", "splits"),
    [
        ("plain", -1, 4),
        ("softcap", 99, 1),
        ("alibi", 99, None),
        ("distance", -1, 4),
        ("all", 99, None),
        ("all", -1, 1),
        ("sinks", 99, 1),
        ("sinks", -1, 4),
        ("chunks", -1, 4),
        ("chunks", 99, 1),
        ("chunks", 4, 1),
    ],
)
def test_triton_is_plain_torch(option: str, left: int, splits: int | None) -> None:
    """Lengths from one key to more than all slots, so that some parts of a sequence hold no key."""
    slots = 200 if left < 0 else left + 1
    positions = torch.tensor([0, 70, slots + 37 if left >= 0 else slots - 1])
    query, key, value = (
        randn(*shape, seed=n) for n, shape in enumerate([(ROWS, HEADS, WIDTH), *[(ROWS, GROUPS, slots, WIDTH)] * 2])
    )
    key[1, :, 71:] = value[1, :, 71:] = torch.nan
    options: dict[str, Any] = {"scale": 0.3, "left_window": left} | OPTIONS[option]
    expected = reference_decode(query, key, value, positions, **options)
    found = triton_decode(query, key, value, positions, splits=splits, **options)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@interpreted
@pytest.mark.parametrize(("groups", "splits"), [(1, 2), (6, 1)])
def test_triton_over_a_memory(splits: int, groups: int) -> None:
    """One memory is empty: its rows give 0."""
    query, key, value = (
        randn(*shape, seed=n) for n, shape in enumerate([(4, HEADS, WIDTH), *[(2, groups, 70, WIDTH)] * 2])
    )
    lengths, positions = torch.tensor([0, 70]), torch.tensor([0, 1, 2, 90])
    options: dict[str, Any] = {"scale": 0.3, "lengths": lengths} | OPTIONS["distance"] | OPTIONS["sinks"]
    expected = reference_decode(query, key, value, positions, **options)
    found = triton_decode(query, key, value, positions, splits=splits, **options)
    assert not found[:2].any()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@interpreted
@pytest.mark.parametrize("splits", [1, 4])
def test_values_of_another_width(splits: int) -> None:
    """MLA: the output is as wide as the values."""
    query, key, value = (
        randn(*shape, seed=n)
        for n, shape in enumerate([(ROWS, HEADS, WIDTH), (ROWS, GROUPS, 200, WIDTH), (ROWS, GROUPS, 200, 40)])
    )
    positions = torch.tensor([0, 70, 199])
    expected = reference_decode(query, key, value, positions, scale=0.3)
    whole: Any = reference_attention(query[2:, None], *(t[2:].transpose(1, 2) for t in (key, value)), softmax_scale=0.3)
    torch.testing.assert_close(expected[2], whole[0, 0], rtol=1e-12, atol=1e-13)
    found = triton_decode(query, key, value, positions, splits=splits, scale=0.3)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_is_as_near_to_the_truth_as_torch(dtype: torch.dtype) -> None:
    """Of the same rounded inputs; plain torch computes in fp32 and rounds once."""
    query, key, value = (
        randn(*shape, seed=n, dtype=dtype) for n, shape in enumerate([(2, 8, 64), *[(2, 2, 300, 64)] * 2])
    )
    positions = torch.tensor([130, 299])
    truth = reference_decode(query.double(), key.double(), value.double(), positions, scale=0.125)
    errors = [
        (function(query, key, value, positions, scale=0.125).double() - truth).abs()
        for function in (triton_decode, reference_decode)
    ]
    assert errors[0].max() <= 2 * errors[1].max() + 1e-7


@interpreted
def test_bits_do_not_depend_on_other_rows() -> None:
    query, key, value = (
        randn(*shape, seed=n, dtype=torch.float32)
        for n, shape in enumerate([(3, HEADS, WIDTH), *[(3, GROUPS, 130, WIDTH)] * 2])
    )
    positions = torch.tensor([129, 3, 77])
    whole = triton_decode(query, key, value, positions, scale=0.2, splits=2)
    for row in range(3):
        one = slice(row, row + 1)
        alone = triton_decode(query[one], key[one], value[one], positions[one], scale=0.2, splits=2)
        assert torch.equal(whole[one], alone)


def test_parts_fill_the_gpu_and_are_not_smaller_than_a_tile() -> None:
    assert num_splits(4, 4096, 132) == 64
    assert num_splits(4, 512, 132) == 8
    assert num_splits(128, 4096, 132) == 2
    assert num_splits(256, 4096, 132) == 1
    assert num_splits(1, 10, 132) == 1
    for programs in (1, 3, 50, 1000):
        for slots in (1, 65, 700, 100_000):
            splits = num_splits(programs, slots, 132)
            assert splits & (splits - 1) == 0
            assert 1 <= splits <= 64


GOOD: dict[str, Any] = {
    "query": torch.zeros(4, 6, 8),
    "key": torch.zeros(2, 3, 5, 8),
    "value": torch.zeros(2, 3, 5, 8),
    "positions": torch.zeros(4, dtype=torch.int64),
    "scale": 1.0,
    "lengths": torch.zeros(2, dtype=torch.int64),
}


@looped(
    ("name", "value"),
    [
        ("query", torch.zeros(4, 6)),
        ("query", torch.zeros(4, 6, 8, dtype=torch.int64)),
        ("key", torch.zeros(2, 4, 5, 8)),
        ("key", torch.zeros(3, 3, 5, 8)),
        ("value", torch.zeros(2, 3, 4, 8)),
        ("value", torch.zeros(2, 3, 5, 8, dtype=torch.bfloat16)),
        ("value", torch.zeros(2, 5, 3, 8).transpose(1, 2)),
        ("positions", torch.zeros(2, dtype=torch.int64)),
        ("lengths", torch.zeros(2)),
        ("distance_bias", torch.zeros(5, 3)),
        ("alibi_slopes", torch.zeros(5)),
        ("sinks", torch.zeros(5)),
        ("left_window", 3),
        ("attention_chunk", 3),
        ("attention_chunk", -1),
    ],
)
def test_arguments_that_do_not_fit_are_named(name: str, value: Any) -> None:
    decode(**GOOD)
    with pytest.raises(ValueError, match=f"^`{name}`"):
        decode(**GOOD | {name: value})


# ---------------------------------------------------------------- GPUs that are not here

"""Bytes of shared memory a program may have."""
REGISTERS = {"split": 168, "sum": 80, "linear": 168}
"""At most; recorded with Triton 3.9.0 and 3.6.0."""


def assert_within_budget(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        programs = 1 if row["kind"] == "linear" else 2
        assert programs * row["shared"] <= SHARED_MEMORY[row["capability"]], f"programs on a processor: {row}"
        assert row["local"] == row["stack"] == 0, row
        assert row["registers"] <= REGISTERS[row["kind"]], row
        assert row["wide_loads"] >= (row["weight_loads"] or 8), f"16 bytes at a time: {row}"
        early = row["weight_loads"] if row["capability"] >= 90 else None
        assert row["before_wait"] == early, f"only the weight may be read before the wait: {row}"


@full_only
@interpreted
def test_a_few_kernels_compile_without_a_gpu(compilers: ForkServer) -> None:
    assert_within_budget(compilers.call("decode_compile", "compiled", "few"))


@full_only
@interpreted
def test_every_kernel_compiles_within_its_budget(compilers: ForkServer) -> None:
    rows = compilers.call("decode_compile", "compiled", "all")
    assert {row["capability"] for row in rows} == set(SHARED_MEMORY)
    assert_within_budget(rows)


# ---------------------------------------------------------------- a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize("groups", [1, 4, 8])
def test_on_a_gpu(dtype: torch.dtype, width: int, groups: int) -> None:
    shapes = [(5, 8, width), *[(5, groups, 1500, width)] * 2]
    query, key, value = (randn(*shape, seed=n, dtype=dtype).cuda() for n, shape in enumerate(shapes))
    positions = torch.tensor([0, 63, 64, 700, 1499], device="cuda")
    bias = randn(8, 2 * 100 + 1, seed=9, dtype=torch.float32).cuda()
    sinks = torch.linspace(-2.0, 4.0, 8, device="cuda")
    for more in (
        {},
        {"distance_bias": bias},
        {"softcap": 3.0, "left_window": 99},
        {"sinks": sinks},
        {"attention_chunk": 128},
    ):
        options: dict[str, Any] = {"scale": width**-0.5} | more
        truth = reference_decode(query.double(), key.double(), value.double(), positions, **options)
        found = decode(query, key, value, positions, **options)
        plain = reference_decode(query, key, value, positions, **options)
        assert torch.equal(found, decode(query, key, value, positions, **options))
        error, allowed = (found.double() - truth).abs().max(), (plain.double() - truth).abs().max()
        assert error <= 2 * allowed + 1e-6, options


@pytest.mark.gpu
def test_the_operation_is_one_torch_knows() -> None:
    query, key, value = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in [(2, 8, 64), *[(2, 2, 300, 64)] * 2]
    )
    positions = torch.tensor([3, 299], device="cuda")
    arguments = (query, key, value, positions, 0.125, None, None, None, None, -1, 0, 0.0)
    torch.library.opcheck(torch.ops.stoker.decode_attention.default, arguments)
