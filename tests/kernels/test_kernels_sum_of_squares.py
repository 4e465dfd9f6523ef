"""The sum of squares of many tensors: any sizes and dtypes, the same bits every time, not finite if need be."""

import pytest
import torch
from cuda_sync import forbid_device_sync
from tiers import DEVICES, cases

from stoker.kernels.optim.sum_of_squares import reference_sum_of_squares, sum_of_squares
from stoker.trainer.optim import gradient_clipping

SIZES = [1, 3, 8191, 0, 8192, 8193, 20000, 1024]


def tensors(dtypes, device, *, offset=0):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size + offset, generator=generator) * 10 ** (i - 3) for i, size in enumerate(SIZES)]
    return [tensor.to(device, dtypes[i % len(dtypes)])[offset:] for i, tensor in enumerate(made)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", cases([0, 1], fast=1))
@pytest.mark.parametrize(
    "dtypes", [(torch.float32,), (torch.bfloat16,), (torch.float16, torch.float32, torch.bfloat16)], ids=str
)
def test_any_sizes_and_dtypes_give_the_sum_in_fp64(device, offset, dtypes):
    given = tensors(dtypes, device, offset=offset)
    total = sum_of_squares(given)
    assert total.dtype == torch.float32
    assert total.shape == ()
    torch.testing.assert_close(total.double(), reference_sum_of_squares(given), rtol=1e-6, atol=0)
    moved = [tensor.clone() for tensor in given]
    if offset == 0:
        assert torch.equal(sum_of_squares(moved), total)
    for tensor in given:
        one = sum_of_squares([tensor])
        torch.testing.assert_close(one.double(), reference_sum_of_squares([tensor]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_strides_do_not_matter_and_nothing_is_zero(device):
    wide = torch.arange(24.0, device=device).view(4, 6)
    assert sum_of_squares([wide.T, wide[:, 1::2]]) == wide.square().sum() + wide[:, 1::2].square().sum()
    assert sum_of_squares([wide[:0]]) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 4, 6])
def test_one_number_that_is_not_finite_is_seen(device, bad, place):
    given = tensors([torch.bfloat16], device)
    given[place][-1] = bad
    assert not sum_of_squares(given).isfinite()


@pytest.mark.parametrize("device", DEVICES)
def test_the_norm_of_gradients_is_the_root_of_it(device, monkeypatch):
    monkeypatch.setattr(gradient_clipping, "triton_runs_on", lambda tensor: tensor.dtype != torch.float64)
    called = []
    monkeypatch.setattr(
        gradient_clipping, "sum_of_squares", lambda given: called.append(len(given)) or sum_of_squares(given)
    )
    gradients = tensors([torch.float32], device)
    norm = gradient_clipping.global_norm(gradients)
    torch.testing.assert_close(norm.double(), reference_sum_of_squares(gradients).sqrt(), rtol=1e-6, atol=0)
    both = gradient_clipping.global_norm(gradients, lambda tensor: tensor.mul_(2))
    torch.testing.assert_close(both, norm * 2**0.5, rtol=1e-6, atol=0)
    assert called == [len(SIZES)] * 2
    exact = gradient_clipping.global_norm([gradient.double() for gradient in gradients])
    assert exact.dtype == torch.float64
    assert len(called) == 2


@pytest.mark.gpu
def test_a_tensor_of_more_elements_than_int32_counts():
    large = torch.zeros(2**31 + 16, dtype=torch.bfloat16, device="cuda")
    for place in (0, 2**31 - 1, 2**31, 2**31 + 15):
        large[place] = 2.0
    assert sum_of_squares([large[:5], large]) == 20.0


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_device():
    gradients = tensors([torch.bfloat16, torch.float32], "cuda")
    with forbid_device_sync():
        norm = gradient_clipping.global_norm(gradients)
    torch.testing.assert_close(norm.double(), reference_sum_of_squares(gradients).sqrt(), rtol=1e-6, atol=0)
