"""Dropout: kernel beside plain torch, slices of the mask, gradients, and the statistics of the masks."""

import math
from typing import Any

import pytest
import torch
from tiers import DEVICES, extra, full_only
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from stoker.kernels.dropout import draw_keys, dropout, keep_mask, launch_dropout, reference_dropout
from stoker.kernels.launch import HAS_TRITON

KEY = torch.tensor([5, -7])


@pytest.mark.skipif(not HAS_TRITON, reason="Triton has no build for this platform")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "channels", "first", "residual"),
    [
        (5, 24, None, False),
        (70, 300, 2**31 - 9, True),
        *extra((3, 768, 1, False), (9, 1536, None, True), (0, 8, 0, True)),
    ],
)
def test_the_kernel_equals_plain_torch(
    rows: int, channels: int, first: int | None, residual: bool, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    key = torch.tensor([2**40 + 3, -(2**31), *([] if first is None else [first])], device=device)
    values = torch.randn(rows, channels, device=device).to(dtype)
    stream = torch.randn(rows, channels, device=device) if residual else None
    places = (torch.arange(rows, device=device) * 2**31) - 4
    kept = keep_mask(key, places, channels, 0.3)
    found = launch_dropout(values, None, key, places, 0.3, dtype=dtype)
    assert torch.equal(found != 0, kept)
    torch.testing.assert_close(found, reference_dropout(values, None, key, places, 0.3))
    if stream is not None:
        found = launch_dropout(values, stream, key, places, 0.3, dtype=torch.float32)
        torch.testing.assert_close(found, reference_dropout(values, stream, key, places, 0.3), rtol=1e-2, atol=1e-2)


def test_a_rank_draws_its_slice() -> None:
    whole = keep_mask(KEY, torch.arange(40), 60, 0.4)
    rows = torch.tensor([3, 39, 4, 0])
    assert torch.equal(keep_mask(torch.cat([KEY, torch.tensor([20])]), rows, 30, 0.4), whole[rows, 20:50])


@pytest.mark.parametrize("with_residual", [False, True])
def test_gradients_have_the_mask_and_nothing_like_it_is_saved(with_residual: bool) -> None:
    values = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    residual = torch.randn_like(values, requires_grad=True) if with_residual else None
    places, saved = torch.arange(6), list[Tensor]()

    def run(*given: Any) -> Tensor:
        return dropout(given[0], 0.4, KEY, places, given[1] if with_residual else None)

    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        output = run(values, residual)
    assert sum(tensor.numel() for tensor in saved) == 8  # key and places
    kept = keep_mask(KEY, places, 8, 0.4).view_as(values)
    expected = torch.where(kept, values / 0.6, 0.0) + (0.0 if residual is None else residual)
    torch.testing.assert_close(output, expected)
    assert torch.autograd.gradcheck(run, [values] if residual is None else [values, residual])


def _sine(*given: Any) -> Tensor:
    return dropout(*given).sin()


@full_only
def test_compiled_layers_draw_the_same_mask() -> None:
    values, places = torch.randn(6, 8, requires_grad=True), torch.arange(6)
    run = torch.compile(_sine, backend="aot_eager", fullgraph=True)
    for key in (KEY, torch.cat([KEY, KEY[:1]])):
        found, wanted = run(values, 0.4, key, places, values), _sine(values, 0.4, key, places, values)
        assert torch.equal(found, wanted)
        gradients = [torch.autograd.grad(output.sum(), values)[0] for output in (found, wanted)]
        assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("change", "said"), [({"p": 1.0}, r"`p` \(1.0\)"), ({"rows": torch.arange(5)}, r"`rows` \(5\)")]
)
def test_wrong_arguments_are_named(change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"values": torch.zeros(2, 2, 3), "p": 0.1, "key": KEY, "rows": torch.arange(4)}
    with pytest.raises(ValueError, match=said):
        dropout(**given | change)


# ---------------------------------------------------------------- statistics

DRAWN, ROWS, CHANNELS = 4, 512, 1024


def masks(p: float, key_of: str) -> Tensor:
    """Return masks (keys, rows, channels) of keys that are drawn, or that follow each other."""
    keys = draw_keys(DRAWN, device=torch.device("cpu"))
    if key_of == "consecutive":
        keys = torch.stack([torch.arange(DRAWN), torch.zeros(DRAWN, dtype=torch.int64)], dim=1)
    return torch.stack([keep_mask(key, torch.arange(ROWS), CHANNELS, p) for key in keys])


@pytest.mark.parametrize("key_of", ["drawn", "consecutive"])
@pytest.mark.parametrize("p", [0.1, *extra(0.01, 0.5)])
def test_masks_are_like_independent_draws(p: float, key_of: str) -> None:
    """Five standard deviations; 2 million elements."""
    torch.manual_seed(0)
    kept = masks(p, key_of).double()
    assert abs(kept.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / kept.numel())
    normal = (kept - (1 - p)) / math.sqrt(p * (1 - p))
    shifts = [(k, r, c) for k in (0, 1) for r in (0, 1, 2, 256) for c in (0, 1, 2, 3, 4, 16, 32, 512)]
    for key, row, channel in shifts[1:]:  # products with other elements
        first = normal[key:, row:, channel:]
        other = normal[: DRAWN - key, : ROWS - row, : CHANNELS - channel]
        assert abs((first * other).mean()) < 5 / math.sqrt(first.numel()), (key, row, channel)
    for dims, count in (((0, 1), CHANNELS), ((0, 2), ROWS), ((1, 2), DRAWN)):  # chi-square of sums
        sums = normal.sum(dims) / math.sqrt(kept.numel() / count)
        assert abs(sums.square().sum() - count) < 5 * math.sqrt(2 * count), dims
    # eight elements in a row have each of 256 patterns as often as they should
    bits = (kept.view(-1, 8) * 2 ** torch.arange(8)).sum(1).long()
    ones = torch.tensor([number.bit_count() for number in range(256)]).double()
    expected = len(bits) * (1 - p) ** ones * p ** (8 - ones)
    often = expected > 20
    count = torch.bincount(bits, minlength=256).double()
    chi = ((count - expected).square() / expected)[often].sum()
    assert abs(chi - often.sum()) < 5 * math.sqrt(2 * often.sum())
