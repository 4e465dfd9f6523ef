"""LoRA's gated MLP: kernels and function against plain torch, every gate, odd sizes, one A for both, autocast, bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiers import DEVICES, cases, full_only, looped, spread
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stoker.kernels.activations import NONLINEARITIES
from stoker.kernels.lora import lora_gated_mlp as module
from stoker.kernels.lora import lora_linear as linear_module
from stoker.kernels.lora.lora_gated_mlp import lora_gated_mlp, lora_gated_mlp_runs_on, reference_lora_gated_mlp
from stoker.kernels.lora.lora_grad import triton_lora_gradients
from stoker.models.layers.norm import RMSNorm

LEARNT = ("inputs", "up_a", "up_b", "down_a", "down_b")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels serve the CPU too, in the interpreter."""
    for one in (module, linear_module):
        monkeypatch.setattr(one, "triton_runs_on", lambda tensor: tensor.dtype != torch.float64)


def drawn(
    rows: int, hidden: int, width: int, rank: int, *, parts: int = 2, device: str = "cpu", dtype: Any = torch.float32
) -> dict[str, Tensor]:
    """Arguments of a size that the activations feel, in the order of the function."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 2 / shape[-1] ** 0.5).to(device, dtype)

    shapes = {
        "inputs": (rows, hidden), "up": (2 * width, hidden), "up_a": (parts * rank, hidden), "up_b": (2 * width, rank),
        "down": (hidden, width), "down_a": (rank, width), "down_b": (hidden, rank),
    }  # fmt: skip
    given = {name: draw(*shape) for name, shape in shapes.items()}
    given["inputs"] *= hidden**0.5
    return given


def results(function: Any, given: dict[str, Tensor], kind: str = "silu", scale: float = 0.7) -> dict[str, Tensor]:
    """The output, and the gradients of what is learnt."""
    given = {name: tensor.detach().requires_grad_(name in LEARNT) for name, tensor in given.items()}
    output = function(*given.values(), scale=scale, kind=kind)
    outer = torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output)
    found = torch.autograd.grad((output * outer.to(output.dtype)).sum(), [given[name] for name in LEARNT])
    return {"output": output.detach(), **dict(zip(LEARNT, found, strict=True))}


def wide(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in given.items()}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "size"),
    spread(
        cases(NONLINEARITIES, fast=2),
        [
            {"rows": 5, "hidden": 24, "width": 40, "rank": 3},
            {"rows": 70, "hidden": 32, "width": 144, "rank": 16, "parts": 1},
            {"rows": 67, "hidden": 16, "width": 130, "rank": 20},
        ],
    ),
    ids=lambda value: value if isinstance(value, str) else f"{value['rows']}-{value['width']}-{value['rank']}",
)
def test_function_equals_plain_torch_in_fp64(device: str, kind: str, size: dict[str, int]) -> None:
    given = drawn(**size, device=device)
    expected = results(reference_lora_gated_mlp, wide(given), kind)
    for name, one in results(lora_gated_mlp, given, kind).items():
        assert one.dtype == torch.float32
        assert (one.double() - expected[name]).norm() <= 2e-6 * expected[name].norm(), name


@full_only
@pytest.mark.usefixtures("interpreted")
def test_many_rows_are_summed_in_pieces() -> None:
    """More tiles than programs, so that a program has several tiles of rows and the sums several pieces."""
    generator = torch.Generator().manual_seed(0)
    rows, columns, rank = 32 * 300 + 1, 20, 5
    gradient, low = (torch.randn(rows, width, generator=generator) for width in (columns + 9, 2 * rank))
    up = torch.randn(columns, rank, generator=generator)
    found = triton_lora_gradients(gradient[:, 4 : 4 + columns], up, low[:, rank:], 0.5, [columns])
    wanted = 0.5 * gradient[:, 4 : 4 + columns] @ up, 0.5 * gradient[:, 4 : 4 + columns].t() @ low[:, rank:]
    for one, other in zip(found[:2], wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", cases([[300], [512, 130], [257, 3, 256], [8200, 130]], fast=2))
def test_parts_of_a_fused_projection_have_products_of_their_own(device: str, parts: list[int]) -> None:
    torch.manual_seed(0)
    rows, rank = 70, 4
    gradient, up = torch.randn(rows, sum(parts), device=device), torch.randn(sum(parts), rank, device=device)
    low = torch.randn(rows, len(parts) * rank, device=device)
    factors = torch.rand(rows, 1, device=device)
    found = triton_lora_gradients(gradient, up, low, 0.5, parts, factors)
    pieces = list(zip(gradient.split(parts, 1), up.split(parts), low.split(rank, 1), strict=True))
    of_low = torch.cat([0.5 * part @ matrix for part, matrix, _ in pieces], 1)
    of_up = torch.cat([0.5 * part.t() @ columns for part, _, columns in pieces])
    for one, other in zip(found, (of_low, of_up, of_low * factors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("interpreted")
def test_neither_the_product_nor_the_updated_projection_is_kept() -> None:
    given = {name: tensor.requires_grad_(name in LEARNT) for name, tensor in drawn(6, 8, 24, 2).items()}
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        lora_gated_mlp(*given.values(), scale=1.0, kind="silu")
    mine = {tensor.data_ptr() for tensor in given.values()}
    made = sorted(tuple(tensor.shape) for tensor in kept if tensor.data_ptr() not in mine)
    assert made == [(6, 2), (6, 4), (6, 48)]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("device", DEVICES)
def test_a_norm_before_it_is_not_kept(device: str) -> None:
    norm = RMSNorm(32, 1e-5).to(device)
    norm.weight = nn.Parameter(torch.linspace(0.5, 2, 32, device=device), requires_grad=False)
    given = drawn(67, 32, 130, 4, device=device)
    given["inputs"] *= torch.linspace(0.1, 9, 67, device=device)[:, None]
    kept: list[Tensor] = []

    def of_norm(inputs: Tensor, *matrices: Tensor, scale: float, kind: str) -> Tensor:
        normed = norm(inputs)
        with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
            output = lora_gated_mlp(normed, *matrices, scale=scale, kind=kind, norm=norm.factors(inputs))
        assert all(tensor.data_ptr() != normed.data_ptr() for tensor in kept)
        return output

    def reference(inputs: Tensor, *matrices: Tensor, scale: float, kind: str) -> Tensor:
        return reference_lora_gated_mlp(norm(inputs), *matrices, scale=scale, kind=kind)

    expected = results(reference, wide(given))
    for name, one in results(of_norm, given).items():
        assert (one.double() - expected[name]).norm() <= 2e-6 * expected[name].norm(), name
    assert len(kept) == 12


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wider", [False, True])
def test_what_it_is_added_to_gets_the_gradient(wider: bool, device: str) -> None:
    given = drawn(7, 16, 40, 3, device=device)
    dtype = torch.float64 if wider else torch.float32
    stream = torch.randn(7, 16, device=device, dtype=dtype, requires_grad=True)
    apart = lora_gated_mlp(*given.values(), scale=0.5, kind="silu")
    output = lora_gated_mlp(*given.values(), scale=0.5, kind="silu", residual=stream)
    assert output.dtype == dtype
    torch.testing.assert_close(output, stream + apart, rtol=1e-5, atol=1e-5)
    outer = torch.randn_like(output)
    assert torch.equal(torch.autograd.grad(output, stream, outer)[0], outer)


@pytest.mark.usefixtures("interpreted")
def test_inputs_that_need_no_gradient_get_none() -> None:
    given = {name: tensor.requires_grad_(name in LEARNT[1:]) for name, tensor in drawn(6, 8, 24, 2).items()}
    lora_gated_mlp(*given.values(), scale=1.0, kind="silu").sum().backward()
    assert {name for name, tensor in given.items() if tensor.grad is not None} == set(LEARNT[1:])


@full_only
@pytest.mark.usefixtures("interpreted")
def test_the_operation_is_well_formed_and_compiles_whole() -> None:
    given = drawn(6, 8, 24, 2)
    arguments = [tensor.requires_grad_(name in LEARNT) for name, tensor in given.items()]
    inputs, *matrices = arguments
    onto = torch.randn(6, 8, requires_grad=True)
    for more in ((None, None, None, onto), (torch.randn(6, 8), torch.rand(6, 1), torch.randn(8), None)):
        torch.library.opcheck(torch.ops.stoker.lora_gated_mlp.default, (inputs, *more, *matrices, 0.5, "silu"))
    compiled = torch.compile(lora_gated_mlp, fullgraph=True, backend="aot_eager")
    for one, other in zip(*(results(f, given).values() for f in (compiled, lora_gated_mlp)), strict=True):
        assert torch.equal(one, other)


@looped(
    ("changes", "said"),
    [
        ({"up_a": torch.zeros(3, 8)}, "`up_a`"),
        ({"up_b": torch.zeros(47, 2)}, "`up_b`"),
        ({"down": torch.zeros(8, 23)}, "`down`"),
        ({"down_a": torch.zeros(3, 24)}, "`down_a`"),
        ({"down_b": torch.zeros(7, 2)}, "`down_b`"),
        ({"kind": "swish"}, "one of gelu"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {**drawn(6, 8, 24, 2), "scale": 1.0, "kind": "silu", **changes}
    with pytest.raises(ValueError, match=said):
        lora_gated_mlp(**given)


def test_what_has_no_kernel() -> None:
    assert not lora_gated_mlp_runs_on(torch.zeros(1), 8)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [8, 16, 32])
@pytest.mark.parametrize("autocast", [False, True])
def test_gpu_bf16_is_as_near_to_the_truth_as_plain_torch(rank: int, autocast: bool) -> None:
    given = drawn(1000, 256, 704, rank, device="cuda", dtype=torch.bfloat16)
    truth = results(reference_lora_gated_mlp, wide(given))
    plain = results(reference_lora_gated_mlp, given)
    if autocast:  # the weights are the same numbers in fp32
        given = {name: tensor.float() for name, tensor in given.items()}
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        ours = results(lora_gated_mlp, given)
    for name, one in ours.items():
        assert one.dtype == (torch.bfloat16 if name == "output" else given[name].dtype)
        mine, theirs = ((found.double() - truth[name]).square().mean() for found in (one, plain[name]))
        assert mine <= 1.25**2 * theirs, name


@pytest.mark.gpu
def test_gpu_bits_are_the_same_every_time() -> None:
    given = drawn(3000, 256, 704, 16, device="cuda", dtype=torch.bfloat16)
    first = results(lora_gated_mlp, given)
    for _ in range(5):
        assert all(torch.equal(one, first[name]) for name, one in results(lora_gated_mlp, given).items())
