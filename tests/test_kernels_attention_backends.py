"""Every backend computes what the reference computes, forward and backward, and PyTorch agrees with the table."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.kernels.attention.backends import FUNCTIONS, installed
from stoker.kernels.attention.call import AttentionCall
from stoker.kernels.attention.dispatch import BACKENDS
from stoker.kernels.attention.reference import reference_attention, visible_keys

ON_CPU = ("sdpa_flash", "sdpa_math", "unfused")


def inputs(
    *, queries: int = 9, keys: int = 9, groups: int = 2, dim: int = 5, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Query of six heads, key and value."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, queries, 6, dim), (2, keys, groups, dim), (2, keys, groups, dim))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def run(name: str, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Output and gradients of a fixed random projection of it."""
    output = FUNCTIONS[name](*tensors[:3], **({"scale": 0.4, "causal": True} | options))
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, tensors, upstream)]


def assert_same(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert mine.shape == other.shape
        assert (mine - other).abs().max() <= tolerance * (1 + other.abs().max())


def by_hand(query: Tensor, key: Tensor, value: Tensor, *, scale: float, visible: Tensor, bias: Tensor) -> Tensor:
    """Attention one query at a time, straight from the definition."""
    output = torch.zeros_like(query)
    per_group = query.shape[2] // key.shape[2]
    for b, q, h in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:3])).tolist():
        seen = visible[q].nonzero()[:, 0]
        if len(seen):
            g = h // per_group
            scores = key[b, seen, g] @ query[b, q, h] * scale + bias[h, q, seen]
            output[b, q, h] = torch.softmax(scores, 0) @ value[b, seen, g]
    return output


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (2, 5), (5, 2), (1, 3)])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, (1, 0)), (False, (0, 1))])
def test_reference_is_the_definition(queries: int, keys: int, causal: bool, window: tuple[int, int] | None) -> None:
    query, key, value = inputs(queries=queries, keys=keys)
    bias = torch.randn(6, queries, keys, dtype=torch.float64)
    visible = torch.zeros(queries, keys, dtype=torch.bool)
    for i in range(queries):
        for j in range(keys):
            distance = j - (i + keys - queries)
            inside = window is None or -window[0] <= distance <= window[1]
            visible[i, j] = inside and not (causal and distance > 0)
    device = torch.device("cpu")
    assert torch.equal(visible_keys(queries, keys, causal=causal, window=window, device=device), visible)
    options = {"scale": 0.7, "causal": causal, "window": window, "bias": bias}
    for name in ("reference", "unfused"):
        output = FUNCTIONS[name](query, key, value, **options)
        expected = by_hand(query, key, value, scale=0.7, visible=visible, bias=bias)
        assert (output - expected).abs().max() < 1e-14


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("causal", [True, False])
def test_backends_equal_the_reference(name: str, groups: int, causal: bool) -> None:
    tensors = inputs(groups=groups)
    assert_same(run(name, tensors, causal=causal), run("reference", tensors, causal=causal), 1e-13)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("causal", [True, False])
def test_bias(name: str, causal: bool) -> None:
    bias = torch.randn(1, 6, 9, 9, dtype=torch.float64)
    tensors = inputs()
    assert_same(
        run(name, tensors, causal=causal, bias=bias), run("reference", tensors, causal=causal, bias=bias), 1e-13
    )
    if name != "sdpa_flash":
        tensors.append(bias.requires_grad_())
        ours, theirs = (run(backend, tensors, causal=causal, bias=bias) for backend in (name, "reference"))
        assert_same(ours, theirs, 1e-13)


@pytest.mark.parametrize("name", ON_CPU)
def test_bf16_is_as_good_as_bf16(name: str) -> None:
    tensors = inputs(dtype=torch.bfloat16, queries=33, keys=33, dim=16)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    truth = run("reference", wide)
    for ours, expected in zip(run(name, tensors), truth, strict=True):
        assert (ours - expected).abs().max() < 0.03 * expected.abs().max()


@pytest.mark.parametrize("name", ["reference", "unfused"])
def test_rows_without_keys_give_zero(name: str) -> None:
    tensors = inputs(queries=5, keys=2)
    output, *gradients = run(name, tensors, causal=True)
    assert not output[:, :3].any()
    assert not gradients[0][:, :3].any()
    assert all(gradient.isfinite().all() for gradient in gradients)
    hidden = torch.zeros(5, 2, dtype=torch.float64)
    hidden[1] = float("-inf")
    tensors.append(hidden.requires_grad_())
    output, *gradients = run(name, tensors, causal=False, bias=hidden)
    assert not output[:, 1].any()
    assert output[:, 0].any()
    assert all(gradient.isfinite().all() for gradient in gradients)
    none = run(name, inputs(queries=3, keys=0), causal=False)
    assert not any(tensor.any() for tensor in none)


@pytest.mark.parametrize("name", ["reference", "unfused", "sdpa_math"])
def test_dropout_keeps_the_mean(name: str) -> None:
    torch.manual_seed(0)
    query, key = torch.zeros(1, 64, 4, 8), torch.zeros(1, 64, 4, 8)
    value = torch.ones(1, 64, 4, 8)
    output = FUNCTIONS[name](query, key, value, scale=1.0, causal=False, dropout=0.25)
    weights = output[..., 0] * 64 * 0.75  # kept weights of each row
    assert weights.std() > 1
    assert abs(weights.mean() - 48) < 1
    again = FUNCTIONS[name](query, key, value, scale=1.0, causal=False)
    assert torch.allclose(again, torch.ones_like(again))


def test_unfused_does_not_trust_beta_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPS adds 0 times the first argument of baddbmm (pytorch #187521): what it holds must be finite."""

    def baddbmm_of_mps(start: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float) -> Tensor:
        return beta * start + alpha * torch.bmm(left, right)

    query, key, value = (torch.randn(1, 4, 2, 8) for _ in range(3))
    expected = FUNCTIONS["unfused"](query, key, value, scale=0.3, causal=True)
    monkeypatch.setattr(torch, "baddbmm", baddbmm_of_mps)
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
    try:
        context = FUNCTIONS["unfused"](query, key, value, scale=0.3, causal=True)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(context, expected)


def test_sdpa_refuses_what_it_would_get_wrong() -> None:
    query, key, value = inputs(queries=2, keys=5)
    with pytest.raises(ValueError, match="use `unfused`"):
        FUNCTIONS["sdpa_math"](query, key, value, scale=1.0, causal=True)
    with pytest.raises(ValueError, match="knows no window"):
        FUNCTIONS["sdpa_math"](query, key, value, scale=1.0, causal=False, window=(1, 0))


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("bias", ["none", "dense", "dense_with_gradient"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_pytorch_agrees_with_the_table_on_cpu(name: str, dropout: float, bias: Any, dtype: Any) -> None:
    """A forced backend runs where its row says so, and nowhere else."""
    call = AttentionCall(
        device="cpu", dtype=dtype, batch=2, heads=6, groups=2, head_dim=5, queries=9, keys=9, bias=bias,
        dropout=dropout, training=True,
    )  # fmt: skip
    (row,) = (backend for backend in BACKENDS if backend.name == name)
    torch_dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    tensors = inputs(dtype=torch_dtype)
    options: dict[str, Any] = {"dropout": dropout}
    if bias != "none":
        options["bias"] = torch.zeros(1, 6, 9, 9, dtype=torch_dtype)
    if bias == "dense_with_gradient":
        tensors.append(options["bias"].requires_grad_())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own reasons, before it raises
        if row.why_not(call, installed()) is None:
            assert all(tensor.isfinite().all() for tensor in run(name, tensors, **options))
        else:
            with pytest.raises(RuntimeError, match=r"No (available kernel|viable backend)"):
                run(name, tensors, **options)


@pytest.mark.parametrize("name", [*ON_CPU, "reference"])
def test_one_graph(name: str) -> None:
    tensors = inputs(dtype=torch.float32)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return FUNCTIONS[name](query, key, value, scale=0.4, causal=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(*tensors), reference_attention(*tensors, scale=0.4, causal=True), atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math", "unfused"])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_gpu_backends_equal_the_reference(name: str, groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 200, 8, 64), (2, 200, groups, 64), (2, 200, groups, 64))
    tensors = [torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for shape in shapes]
    wide = [tensor.double().requires_grad_() for tensor in tensors]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    upstream = torch.randn(2, 200, 8, 64, generator=generator).to("cuda")
    truth_output = FUNCTIONS["reference"](*wide, scale=0.125, causal=True)
    output = FUNCTIONS[name](*tensors, scale=0.125, causal=True)
    truth = [truth_output, *torch.autograd.grad(truth_output, wide, upstream.double())]
    ours = [output, *torch.autograd.grad(output, tensors, upstream.bfloat16())]
    for mine, expected in zip(ours, truth, strict=True):
        assert (mine - expected).abs().max() < 0.02 * expected.abs().max()
