"""Rotary embedding and KV cache append of a new token, alone and in the kernel of its attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiers import looped, spread
from torch import Tensor

from stoker.kernels.attention.decode import (
    Append,
    DecodeInputs,
    reference_decode_attention,
    triton_decode_attention,
)
from stoker.kernels.attention.kv_append import (
    RotaryTables,
    apply_rotary_and_append_kv,
)
from stoker.kernels.launch import HAS_TRITON
from stoker.kernels.rope import apply_rotary, rotary_table, xpos_table

ROWS, HEADS, GROUPS, WIDTH, SLOTS = 3, 6, 2, 24, 7
LENGTHS = torch.tensor([1, 7, 12])
interpreted = pytest.mark.skipif(not HAS_TRITON, reason="Triton has no build for this platform")


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)


def caches(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    key, value = (torch.full((ROWS, GROUPS, SLOTS, WIDTH), number, dtype=dtype) for number in (7.0, 8.0))
    return key, value


def angles(kind: str, dtype: torch.dtype = torch.float64) -> RotaryTables | None:
    if kind == "none":
        return None
    if kind == "xpos":
        tables = xpos_table(20, WIDTH, dtype=dtype)
    else:
        tables = rotary_table(20, WIDTH if kind == "whole" else 10, dtype=dtype) * 2
    first, second, third, fourth = (table[LENGTHS - 1] for table in tables)
    return first, second, third, fourth


@looped("kind", ["none", "whole", "part", "xpos"])
@looped("interleaved", [False, True])
def test_keys_and_values_go_where_they_belong(kind: str, interleaved: bool) -> None:
    """Everything else in the cache stays; heads turn as the whole text turns."""
    projected, made = randn(ROWS, HEADS + 2 * GROUPS, WIDTH), angles(kind)
    key_cache, value_cache = caches()
    query = apply_rotary_and_append_kv(projected, key_cache, value_cache, LENGTHS, made, interleaved=interleaved)
    expected_query, key, value = projected[:, :HEADS], projected[:, HEADS:-GROUPS], projected[:, -GROUPS:]
    for row, length in enumerate(LENGTHS.tolist()):
        slot = (length - 1) % SLOTS
        wanted_query, wanted_key = expected_query[row : row + 1, None], key[row : row + 1, None]
        if made is not None:
            one = [table[row : row + 1] for table in made]
            wanted_query = apply_rotary(wanted_query, one[0], one[1], interleaved=interleaved)
            wanted_key = apply_rotary(wanted_key, one[2], one[3], interleaved=interleaved)
        assert torch.equal(query[row], wanted_query[0, 0])
        assert torch.equal(key_cache[row, :, slot], wanted_key[0, 0])
        assert torch.equal(value_cache[row, :, slot], value[row])
        others = [other for other in range(SLOTS) if other != slot]
        assert (key_cache[row, :, others] == 7).all()
        assert (value_cache[row, :, others] == 8).all()


def appended(kind: str, interleaved: bool, dtype: torch.dtype, splits: int | None, device: str = "cpu") -> None:
    """Compare a decode attention that appends the token itself with the plain version of both."""
    projected, made = randn(ROWS, HEADS + 2 * GROUPS, WIDTH, dtype=dtype).to(device), angles(kind, torch.float32)
    wide = torch.promote_types(dtype, torch.float32)
    on_device: Any = None if made is None else tuple(table.to(device, wide) for table in made)
    lengths, results = LENGTHS.to(device), []
    for fused in (True, False):
        key, value = (cache.to(device) for cache in caches(dtype))
        key[0, :, 1:] = value[0, :, 1:] = torch.nan  # never written
        inputs = DecodeInputs(projected, key, value, lengths - 1, 0.3, left_window=SLOTS - 1)
        if fused:
            out = triton_decode_attention(inputs, splits, Append(on_device, interleaved))
        else:
            query = apply_rotary_and_append_kv(projected, key, value, lengths, on_device, interleaved=interleaved)
            out = reference_decode_attention(inputs._replace(query=query))
        results.append((out, key, value))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


@interpreted
@pytest.mark.parametrize(
    ("kind", "interleaved", "dtype", "splits"),
    spread(
        ("none", "whole", "part", "xpos"),
        [(False, torch.float64), (True, torch.float32), (False, torch.bfloat16)],
        (1, 2),
    ),
)
def test_attention_appends_the_token(kind: str, interleaved: bool, dtype: torch.dtype, splits: int) -> None:
    appended(kind, interleaved, dtype, splits)


GOOD: dict[str, Any] = {
    "projected": torch.zeros(3, 10, 8),
    "key_cache": torch.zeros(3, 2, 5, 8),
    "value_cache": torch.zeros(3, 2, 5, 8),
    "lengths": torch.ones(3, dtype=torch.int64),
    "cos_sin": (torch.zeros(3, 4),) * 4,
}


@looped(
    ("name", "value"),
    [
        ("key_cache", torch.zeros(3, 5, 5, 8)),
        ("key_cache", torch.zeros(2, 2, 5, 8)),
        ("value_cache", torch.zeros(3, 2, 4, 8)),
        ("value_cache", torch.zeros(3, 2, 5, 8, dtype=torch.bfloat16)),
        ("lengths", torch.ones(3)),
        ("cos_sin", (torch.zeros(3, 5),) * 4),
    ],
)
def test_arguments_that_do_not_fit_are_named(name: str, value: Any) -> None:
    apply_rotary_and_append_kv(**GOOD)
    with pytest.raises(ValueError, match=f"^`{name}`"):
        apply_rotary_and_append_kv(**GOOD | {name: value})


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["none", "whole", "part", "xpos"])
@pytest.mark.parametrize("splits", [None, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_appends_the_token_on_a_gpu(kind: str, dtype: torch.dtype, splits: int | None) -> None:
    appended(kind, kind == "part", dtype, splits, "cuda")


@pytest.mark.gpu
@torch.no_grad()
def test_a_norm_in_one_kernel_is_as_near_to_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """In generation RMS normalisation is PyTorch's kernel, which must round once, as what is written out does."""
    from stoker.kernels import norm_functions

    for dtype in (torch.bfloat16, torch.float32):
        inputs, weight = torch.randn(33, 2048, device="cuda").to(dtype), torch.randn(2048, device="cuda").to(dtype)
        truth = norm_functions.rms_norm(inputs.double(), weight.double(), epsilon=1e-5)
        errors = []
        for one_kernel in (True, False):
            monkeypatch.setattr(norm_functions, "_use_fused_kernel", lambda *_, one_kernel=one_kernel: one_kernel)
            errors.append(
                (norm_functions.rms_norm(inputs, weight, epsilon=1e-5, training=False).double() - truth).abs().max()
            )
        assert errors[0] <= 1.25 * errors[1]
