"""The experts on a GPU in bf16: as exact as torch's loop, the same bits every time, nothing waits for the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cuda_sync import forbid_device_sync

from stoker.kernels.moe.assignments import sorted_assignments
from stoker.kernels.moe.expert_mlps import expert_mlp
from stoker.kernels.moe.grouped_matmul import grouped_matmul, unsupported_reason

pytestmark = [
    pytest.mark.gpu,
]

FLOATS = ("hidden", "gates", "up", "down", "up_bias", "down_bias")
HOW = ("triton", "grouped_mm", "padded")


def make(tokens, experts, topk, width, inner, *, gated=True, bias=False, dropped=False, skewed=False) -> dict[str, Any]:
    """Arguments of `expert_mlp` in bf16 on the device; `skewed`: half of the tokens choose one expert, one has none."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    scores = torch.rand(tokens, experts, device="cuda", generator=generator)
    if skewed:
        scores[: tokens // 2, 1] = 2.0
        scores[:, 2] = -1.0
    rows = 2 * inner if gated else inner
    kept = torch.rand(tokens, topk, device="cuda", generator=generator) > 0.2
    return {
        "hidden": normal(tokens, width).bfloat16(),
        "experts": scores.argsort(1, descending=True)[:, :topk].contiguous(),
        "gates": torch.rand(tokens, topk, device="cuda", generator=generator),
        "up": (normal(experts, rows, width) / math.sqrt(width)).bfloat16(),
        "down": (normal(experts, width, inner) / math.sqrt(inner)).bfloat16(),
        "up_bias": normal(experts, rows).bfloat16() if bias else None,
        "down_bias": normal(experts, width).bfloat16() if bias else None,
        "kept": kept if dropped else None,
    }


def value_and_gradients(case: dict[str, Any], dtype: torch.dtype | None = None, **options: Any) -> dict:
    case = dict(case)
    names = [name for name in FLOATS if case[name] is not None]
    for name in names:
        case[name] = case[name].detach().to(dtype or case[name].dtype).requires_grad_()
    out = expert_mlp(**case, **options)
    outer = torch.randn(out.shape, device="cuda", generator=torch.Generator(device="cuda").manual_seed(5))
    gradients = torch.autograd.grad(out, [case[name] for name in names], outer.bfloat16().to(out.dtype))
    return {"out": out.detach(), **dict(zip(names, gradients, strict=True))}


def options_of(implementation: str, case: dict[str, Any], **more: Any) -> dict[str, Any]:
    if implementation == "grouped_mm" and (
        reason := unsupported_reason("torch", case["hidden"], case["down"].shape[2])
    ):
        pytest.skip(f"torch's grouped matmul {reason}")
    capacity = {"capacity": len(case["hidden"])} if implementation == "padded" else {}
    return {"implementation": implementation, **capacity, **more}


CASES = {
    "balanced": ({"tokens": 777, "experts": 8, "topk": 2, "width": 256, "inner": 384}, "silu", True),
    "many_small": ({"tokens": 300, "experts": 64, "topk": 8, "width": 512, "inner": 128}, "silu", True),
    "skewed": ({"tokens": 1500, "experts": 16, "topk": 2, "width": 256, "inner": 256, "skewed": True}, "gelu", True),
    "bias_dropped": (
        {"tokens": 513, "experts": 8, "topk": 2, "width": 384, "inner": 256, "bias": True, "dropped": True},
        "gelu_tanh",
        True,
    ),
    "plain": (
        {"tokens": 700, "experts": 8, "topk": 1, "width": 256, "inner": 512, "gated": False, "bias": True},
        "gelu",
        False,
    ),
    "uneven": ({"tokens": 333, "experts": 5, "topk": 3, "width": 208, "inner": 336}, "relu", True),
}


@pytest.mark.parametrize("implementation", HOW)
@pytest.mark.parametrize("name", CASES)
def test_bf16_error_is_that_of_the_loop(name, implementation):
    shape, nonlinearity, gated = CASES[name]
    case = make(**shape)
    options = {"nonlinearity": nonlinearity, "gated": gated}
    truth = value_and_gradients(case, torch.float64, implementation="sequential", **options)
    loop = value_and_gradients(case, implementation="sequential", **options)
    got = value_and_gradients(case, **options_of(implementation, case, **options))
    for key, exact in truth.items():
        allowed = 1.3 * (loop[key] - exact).norm() + 1e-5 * exact.norm()
        assert (got[key] - exact).norm() <= allowed, key
        assert got[key].isfinite().all(), key


@pytest.mark.parametrize("implementation", ["auto", "triton", "grouped_mm"])
def test_biases_are_added_before_rounding(implementation):
    """Of products that cancel with their biases, rounding first would leave few correct bits."""
    case = make(513, 8, 2, 384, 256, bias=True)
    case["hidden"] = case["hidden"] + 4
    case["up_bias"] = (case["up_bias"] - 4 * case["up"].float().sum(2)).bfloat16()
    options = {"nonlinearity": "silu", "gated": True}
    truth = value_and_gradients(case, torch.float64, implementation="sequential", **options)
    loop = value_and_gradients(case, implementation="sequential", **options)
    got = value_and_gradients(case, **options_of(implementation, case, **options))
    for key, exact in truth.items():
        assert (got[key] - exact).norm() <= 1.3 * (loop[key] - exact).norm(), key


def test_odd_widths_in_bf16():
    case = make(130, 4, 2, 100, 75)
    options = {"nonlinearity": "silu", "gated": True}
    truth = value_and_gradients(case, torch.float64, implementation="sequential", **options)
    loop = value_and_gradients(case, implementation="sequential", **options)
    got = value_and_gradients(case, implementation="triton", **options)
    for key, exact in truth.items():
        assert (got[key] - exact).norm() <= 1.3 * (loop[key] - exact).norm() + 1e-5 * exact.norm(), key


def test_fp32_is_exact_by_default():
    case = make(200, 4, 2, 128, 96)
    options = {"nonlinearity": "silu", "gated": True}
    truth = value_and_gradients(case, torch.float64, implementation="sequential", **options)
    got = value_and_gradients(case, torch.float32, implementation="triton", **options)
    for key, exact in truth.items():
        assert (got[key] - exact).norm() <= 2e-6 * exact.norm(), key


@pytest.mark.parametrize("implementation", HOW)
def test_the_same_bits_every_time(implementation):
    case = make(2048, 16, 4, 256, 256, skewed=True, dropped=True)
    options = options_of(implementation, case, nonlinearity="silu", gated=True)
    first = value_and_gradients(case, **options)
    for _ in range(3):
        again = value_and_gradients(case, **options)
        assert all(torch.equal(first[key], again[key]) for key in first)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("implementation", HOW)
def test_nothing_waits_for_the_device(implementation, dropout):
    case = make(512, 8, 2, 256, 256, bias=True, dropped=True)
    options = options_of(implementation, case, nonlinearity="silu", gated=True, dropout=dropout)
    value_and_gradients(case, **options)  # compile
    with forbid_device_sync():
        value_and_gradients(case, **options)


@pytest.mark.parametrize("implementation", HOW)
def test_a_cuda_graph_follows_new_routing(implementation):
    case = make(512, 8, 2, 256, 256)
    options = options_of(implementation, case, nonlinearity="silu", gated=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which makes the case
    with torch.cuda.stream(stream):
        for _ in range(2):
            value_and_gradients(case, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    outer = torch.randn(512, 256, device="cuda").bfloat16()
    hidden = case["hidden"].requires_grad_()
    with torch.cuda.graph(graph, stream=stream):
        out = expert_mlp(**case, **options)
        gradient = torch.autograd.grad(out, hidden, outer)[0]
    case["experts"].copy_(torch.zeros_like(case["experts"]) + torch.arange(2, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    case["hidden"] = hidden = hidden.detach().requires_grad_()  # the old one is bound to the recording's stream
    expected = expert_mlp(**case, **options)
    assert torch.equal(out, expected)
    assert torch.equal(gradient, torch.autograd.grad(expected, hidden, outer)[0])


@pytest.mark.parametrize("implementation", HOW)
def test_compiled_as_one_graph(implementation):
    case = make(512, 8, 2, 256, 256)
    options = options_of(implementation, case, nonlinearity="silu", gated=True)
    names = ("hidden", "gates", "up", "down")
    leaves = [case.pop(name).requires_grad_() for name in names]

    def loss(*values: torch.Tensor) -> torch.Tensor:
        return expert_mlp(**case, **dict[str, Any](zip(names, values, strict=True)), **options).float().square().sum()

    torch.compiler.reset()
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    for mine, expected in zip(got, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        torch.testing.assert_close(mine, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_garbage_after_the_last_row_is_not_read(backend):
    if reason := unsupported_reason(backend, torch.empty(0, device="cuda", dtype=torch.bfloat16)):
        pytest.skip(reason)
    ends = torch.tensor([100, 100, 300], device="cuda", dtype=torch.int32)
    left = torch.randn(400, 128, device="cuda").bfloat16()
    left[300:] = math.nan
    left.requires_grad_()
    weight = torch.randn(3, 256, 128, device="cuda").bfloat16().requires_grad_()
    out = grouped_matmul(left, weight.transpose(1, 2), ends, backend=backend)
    outer = torch.randn_like(out)
    outer[300:] = math.nan
    gradients = torch.autograd.grad(out, (left, weight), outer)
    assert all(x.isfinite().all() for x in (out, *gradients))
    assert not out[300:].any()
    assert not gradients[0][300:].any()
    assert not gradients[1][1].any()


def test_assignments_of_a_large_batch():
    experts = torch.rand(20000, 64, device="cuda").argsort(1)[:, :8]
    order, ends, places = sorted_assignments(experts, 64)
    keys = experts.flatten()
    assert torch.equal(order, keys.argsort(stable=True).int())
    assert torch.equal(ends, keys.bincount(minlength=64).cumsum(0).int())
    assert torch.equal(order[places.flatten().long()], torch.arange(len(keys), device="cuda").int())


def test_memory_kept_for_the_backward_pass():
    tokens, topk, width, inner = 4096, 4, 512, 256
    case = make(tokens, 8, topk, width, inner)
    for name in ("hidden", "gates", "up", "down"):
        case[name].requires_grad_()
    expert_mlp(**case, nonlinearity="silu", gated=True, implementation="triton")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = expert_mlp(**case, nonlinearity="silu", gated=True, implementation="triton")
    kept = torch.cuda.memory_allocated() - before - out.nbytes
    projected = tokens * topk * 2 * inner * 2
    assert kept <= 1.05 * projected


@pytest.mark.parametrize(
    ("dtype", "widths"), [(torch.bfloat16, (64, 32)), (torch.float16, (64, 32)), (torch.bfloat16, (60, 36))]
)
def test_auto_takes_torchs_matmul_where_it_can(dtype, widths):
    case = make(100, 4, 2, *widths)
    case = {name: x.to(dtype) if name in ("hidden", "up", "down") else x for name, x in case.items()}
    best = "triton" if unsupported_reason("torch", case["hidden"], *widths, 2 * widths[1]) else "grouped_mm"
    options = {"nonlinearity": "silu", "gated": True}
    assert torch.equal(expert_mlp(**case, **options), expert_mlp(**case, **options, implementation=best))
