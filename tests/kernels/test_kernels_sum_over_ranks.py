"""The sum over ranks: in the Triton interpreter and on a GPU, rounded once, without reading its own row."""

import pytest
import torch

from stoker.kernels.sum_over_ranks import BLOCK, reference_sum_over_ranks, sum_over_ranks

WIDTHS = [(torch.float16, torch.float32), (torch.float16, torch.float16), (torch.float32, torch.float32)]
CASES = [("cpu", *dtypes) for dtypes in WIDTHS]  # interpreted, bfloat16 is cut instead of rounded
CASES += [
    pytest.param("cuda", torch.bfloat16, output, marks=pytest.mark.gpu) for output in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("device", "dtype", "output"), CASES, ids=str)
@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (2, 3)])
def test_it_is_the_sum(device, dtype, output, rank, ranks):
    size, generator = BLOCK + 7, torch.Generator().manual_seed(1)
    received = torch.randn(ranks, size + 9, generator=generator).to(device, dtype)
    received[rank] = float("nan")
    own = torch.randn(size, generator=generator).to(device, dtype)
    found, expected = (torch.empty(size, dtype=output, device=device) for _ in range(2))
    sum_over_ranks(own, received[:, :size], rank, found)
    reference_sum_over_ranks(own, received[:, :size], rank, expected)
    every = [own if each == rank else received[each, :size] for each in range(ranks)]
    assert torch.equal(found, expected)
    torch.testing.assert_close(found, torch.stack(every).double().sum(0).to(output), rtol=2e-7, atol=3e-7)
