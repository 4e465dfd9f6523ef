"""A tensor times a scalar of the device, in place: in the Triton interpreter and on a GPU."""

import pytest
import torch
from tiers import DEVICES

from stoker.kernels import scale_in_place
from stoker.kernels.scale_in_place import can_scale_in_place, reference_scale, triton_scale_

WIDTHS = [torch.float32, torch.float16, torch.bfloat16]
CASES = [("cpu", dtype) for dtype in WIDTHS[:2]]  # interpreted, bfloat16 is cut instead of rounded
CASES += [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in WIDTHS]


@pytest.mark.parametrize(("device", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.0, 1 / 3, float("nan")])
@pytest.mark.parametrize("shape", [(), (7,), (3, 2048), (5, 4099)], ids=str)
def test_it_is_the_product(monkeypatch, device, dtype, factor, shape):
    monkeypatch.setattr(scale_in_place, "MAX_PROGRAMS", 2)  # several rounds, the last of them not full
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    scalar = torch.tensor(factor, device=device)
    expected = reference_scale(tensor.float(), scalar).to(dtype)
    triton_scale_(tensor, scalar)
    torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_lie_in_any_order_or_not_at_all(device):
    tensor = torch.arange(12.0, device=device).view(3, 4).t()
    expected = tensor * 2
    factor = torch.tensor(2.0, device=device, dtype=torch.bfloat16)
    triton_scale_(tensor, factor)
    torch.testing.assert_close(tensor, expected)
    triton_scale_(torch.empty(0, device=device), factor)


@pytest.mark.gpu
def test_nothing_is_scaled_in_place_that_is_traced_or_differentiated_again():
    tensor = torch.ones(3, device="cuda")
    with torch.no_grad():
        assert can_scale_in_place(tensor)
        assert not can_scale_in_place(tensor.double())
        assert not can_scale_in_place(tensor.cpu())
        assert not can_scale_in_place(
            torch.nn.Parameter(tensor)
        )  # as any class of its own, those of tracing among them
    assert not can_scale_in_place(tensor)
