"""Greedy choice of the next token: the kernel against plain torch."""

from __future__ import annotations

import pytest
import torch

from stoker.kernels import greedy_token
from stoker.kernels.greedy_token import reference_greedy_token, triton_greedy_token
from stoker.kernels.launch import HAS_TRITON

DIVERGED = -1


def logits(vocab: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Rows of random logits with ties, and rows without a finite largest logit."""
    drawn = torch.randn(9, vocab, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device, dtype)
    drawn[1, [3, 7, vocab - 1]] = 9.0
    drawn[2] = 0.0
    drawn[3, 5] = float("nan")
    drawn[4, 5] = float("inf")
    drawn[5] = float("-inf")
    drawn[6, 1:] = float("-inf")
    drawn[7, 0], drawn[7, -1] = float("inf"), float("nan")
    return drawn


@pytest.mark.skipif(not HAS_TRITON, reason="Triton has no build for this platform")
@pytest.mark.parametrize("vocab", [40, 64])
def test_the_kernel_is_plain_torch(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy_token, "next_power_of_2", lambda _: 16)  # several tiles
    drawn = logits(vocab, torch.float32, "cpu")
    for each in (drawn, drawn.T.contiguous().T, drawn[:, : vocab - 3]):
        assert triton_greedy_token(each, DIVERGED).tolist() == reference_greedy_token(each, DIVERGED).tolist()
    assert triton_greedy_token(drawn, DIVERGED)[1:8].tolist() == [3, 0, -1, -1, -1, 0, -1]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [1000, 32000, 151936])
def test_on_a_gpu(vocab: int) -> None:
    drawn = logits(vocab, torch.bfloat16, "cuda")
    expected = reference_greedy_token(drawn.cpu(), DIVERGED)
    assert greedy_token.greedy_token(drawn, DIVERGED).tolist() == expected.tolist()
