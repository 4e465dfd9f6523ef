"""Gradient of an embedding against sums in fp64: tokens that are rare, frequent, absent, and all the same."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tiers import DEVICES, full_only, spread
from torch import Tensor

from stoker.kernels import embedding as module
from stoker.kernels.embedding import _Embedding, _embedding_gradient, embedding

ROWS = 50
DISTRIBUTIONS = {
    "one place each": lambda count: torch.randperm(count),
    "some absent, some frequent": lambda count: (torch.randn(count).abs() * 6).long().clamp(max=ROWS - 1),
    "all the same": lambda count: torch.full((count,), 7),
    "two, in turn": lambda count: torch.arange(count) % 2 * (ROWS - 1),
}


def exact(gradient: Tensor, tokens: Tensor, rows: int) -> Tensor:
    table = torch.zeros(rows, gradient.shape[-1], dtype=torch.float64, device=gradient.device)
    return table.index_add(0, tokens.flatten(), gradient.double().flatten(0, -2))


SPAN, SPANS = 4, 2
PLACES = [3, 2 * SPAN, SPAN * (2 * SPANS + 1) + 3]
"""Less than a span, a whole number of them, more than are added at once, with some left over."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("width", "places", "dtype", "distribution"),
    spread(product((24, 1100), PLACES), (torch.float32, torch.bfloat16), DISTRIBUTIONS),
)
def test_gradient_is_that_of_fp64_and_repeats(
    places: int, width: int, dtype: torch.dtype, distribution: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SPAN", SPAN)
    monkeypatch.setattr(module, "SPANS", SPANS)
    torch.manual_seed(places)
    tokens = DISTRIBUTIONS[distribution](places).to(device)[None]
    gradient = torch.randn(1, places, width).to(device, dtype)
    rows = max(ROWS, places)
    found = _embedding_gradient(gradient, tokens, rows)
    truth = exact(gradient, tokens, rows)
    assert found.dtype == dtype
    bound = 1e-6 if dtype == torch.float32 else 1.02 * (truth.to(dtype).double() - truth).norm() / truth.norm()
    assert (found.double() - truth).norm() <= bound * truth.norm()
    assert torch.equal(found, _embedding_gradient(gradient, tokens, rows))


def test_without_tokens_there_is_no_gradient() -> None:
    assert not _embedding_gradient(torch.empty(2, 0, 8), torch.empty(2, 0, dtype=torch.int64), ROWS).any()


@pytest.mark.parametrize("device", DEVICES)
def test_embedding_is_that_of_torch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(0, ROWS, (2, 40), device=device)
    weight = torch.randn(ROWS, 24, device=device, requires_grad=True)
    plain = torch.nn.functional.embedding(tokens, weight)
    outer = torch.randn_like(plain)
    (expected,) = torch.autograd.grad(plain, weight, outer)
    monkeypatch.setattr(module, "triton_runs_on", lambda tensor: True)
    found = embedding(tokens, weight)
    assert found.grad_fn is not None
    assert type(found.grad_fn).__name__ == f"{_Embedding.__name__}Backward"
    assert torch.equal(found, plain)
    torch.testing.assert_close(torch.autograd.grad(found, weight, outer)[0], expected)
    with torch.no_grad():
        assert torch.equal(embedding(tokens, weight), plain)


@full_only
def test_the_custom_operation_is_well_formed() -> None:
    torch.library.opcheck(_embedding_gradient, (torch.randn(2, 40, 24), torch.randint(0, ROWS, (2, 40)), ROWS))
