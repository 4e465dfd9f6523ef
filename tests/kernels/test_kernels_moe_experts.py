"""The experts: every implementation against a written-out fp64 reference, values and all gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tiers import cases, extra, full_only, looped
from torch.utils.checkpoint import checkpoint

from stoker.kernels.activations import NONLINEARITIES
from stoker.kernels.moe.assignments import sorted_assignments
from stoker.kernels.moe.expert_mlps import expert_mlp
from stoker.kernels.moe.fused_experts import _experts
from stoker.kernels.moe.permute import reference_combine, triton_combine

FLOATS = ("hidden", "gates", "up", "down", "up_bias", "down_bias")


def make(
    tokens, experts, topk, width, inner, *, gated=True, bias=False, dropped=0.0, chosen=None, seed=0
) -> dict[str, Any]:
    """Arguments of `expert_mlp` in fp32; `chosen` overrides the experts of the tokens."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    rows = 2 * inner if gated else inner
    choice = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :topk].contiguous()
    return {
        "hidden": normal(tokens, width),
        "experts": choice if chosen is None else chosen,
        "gates": torch.rand(tokens, topk, generator=generator),
        "up": normal(experts, rows, width) / math.sqrt(width),
        "down": normal(experts, width, inner) / math.sqrt(inner),
        "up_bias": normal(experts, rows) if bias else None,
        "down_bias": normal(experts, width) if bias else None,
        "kept": torch.rand(tokens, topk, generator=generator) >= dropped if dropped else None,
    }


def written_out(case: dict[str, Any], nonlinearity: str, gated: bool) -> np.ndarray:
    """Token by token, slot by slot, in numpy fp64; the nonlinearity alone is torch's."""
    array: dict[str, Any] = {n: None if x is None else x.double().numpy() for n, x in case.items() if n in FLOATS}
    experts = case["experts"].numpy()
    out = np.zeros_like(array["hidden"])
    for token, slot in np.ndindex(*experts.shape):
        if case["kept"] is not None and not case["kept"][token, slot]:
            continue
        e = experts[token, slot]
        projected = array["up"][e] @ array["hidden"][token]
        if array["up_bias"] is not None:
            projected = projected + array["up_bias"][e]
        half = len(projected) // 2 if gated else len(projected)
        inner = NONLINEARITIES[nonlinearity](torch.from_numpy(projected[:half])).numpy()
        if gated:
            inner = inner * projected[half:]
        result = array["down"][e] @ inner
        if array["down_bias"] is not None:
            result = result + array["down_bias"][e]
        out[token] += array["gates"][token, slot] * result
    return out


def value_and_gradients(case, dtype, **options) -> dict[str, torch.Tensor]:
    """Return the output of `expert_mlp` and the gradients of all that has one."""
    case = dict(case)
    names = [name for name in FLOATS if case[name] is not None]
    for name in names:
        wide = torch.float32 if name == "gates" and dtype.itemsize == 2 else dtype
        case[name] = case[name].detach().to(wide).requires_grad_()
    out = expert_mlp(**case, **options)
    outer = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    gradients = torch.autograd.grad(out, [case[name] for name in names], outer)
    return {"out": out.detach(), **dict(zip(names, gradients, strict=True))}


def assert_close(got, expected, tolerance):
    assert got.keys() == expected.keys()
    for name, truth in expected.items():
        truth = truth.double()
        error = (got[name].double() - truth).norm() / truth.norm().clamp(min=1e-12)
        assert error <= tolerance, f"{name}: {error:.2e}"


# tokens, experts, k, width, inner; what is special
CASES = {
    "gated": (make(19, 4, 2, 24, 20), "silu", True),
    "gated_bias_dropped": (make(17, 3, 2, 24, 24, bias=True, dropped=0.3), "gelu", True),
    "plain_odd_bias": (make(21, 4, 1, 17, 33, gated=False, bias=True, dropped=0.3), "relu_squared", False),
    "one_expert": (make(9, 1, 1, 18, 19, gated=False), "gelu_sigmoid", False),
    "all_on_one": (make(21, 6, 1, 16, 24, chosen=torch.full((21, 1), 4)), "gelu_tanh", True),
    "most_empty": (make(3, 9, 2, 16, 16), "relu", True),
    "every_expert": (make(7, 4, 4, 16, 24, gated=False), "silu", False),
    "same_expert_dropped": (
        make(9, 2, 3, 16, 16, bias=True, chosen=torch.tensor([[0, 1, 1]]).repeat(9, 1))
        | {"kept": torch.tensor([[True, True, False], [False, False, True], [True, False, False]]).repeat(3, 1)},
        "silu",
        True,
    ),
    "all_dropped": (make(7, 3, 2, 16, 16, bias=True, dropped=1.1), "silu", True),
}


@looped("name", CASES)
def test_sequential_equals_the_written_out_sum(name):
    case, nonlinearity, gated = CASES[name]
    got = value_and_gradients(case, torch.float64, nonlinearity=nonlinearity, gated=gated, implementation="sequential")
    np.testing.assert_allclose(got["out"].numpy(), written_out(case, nonlinearity, gated), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gated", [True, False])
def test_sequential_gradients_are_those_of_its_value(gated):
    case = make(5, 3, 2, 4, 3, gated=gated, bias=True, dropped=0.2)
    tensors = [case.pop(name).double().requires_grad_() for name in FLOATS]

    def function(*values):
        arguments = dict(zip(FLOATS, values, strict=True))
        return expert_mlp(**case, **arguments, nonlinearity="silu", gated=gated, implementation="sequential")

    assert torch.autograd.gradcheck(function, tensors)


@looped("implementation", ["triton", "grouped_mm", "sequential"])
def test_experts_without_tokens_have_gradients_of_zero(implementation):
    """On a rank all of whose experts are left out."""
    case = make(0, 3, 2, 16, 8, bias=True)
    got = value_and_gradients(case, torch.float32, nonlinearity="silu", gated=True, implementation=implementation)
    assert got["out"].shape == (0, 16)
    assert all(not got[name].any() for name in FLOATS)


# those that share parts with others on fewer cases: the interpreter is slow
AGREE = [("triton", name) for name in CASES]
AGREE += [("padded", name) for name in ("gated_bias_dropped", "all_on_one", "all_dropped")]
REPEATED = ("triton", "same_expert_dropped")
AGREE += [("grouped_mm", name) for name in ("gated_bias_dropped", "one_expert")]


@pytest.mark.parametrize(("implementation", "name"), {**dict.fromkeys(cases(AGREE, fast=2)), REPEATED: None})
def test_implementations_agree_in_fp32(implementation, name):
    case, nonlinearity, gated = CASES[name]
    options: dict[str, Any] = {"nonlinearity": nonlinearity, "gated": gated}
    truth = value_and_gradients(case, torch.float64, implementation="sequential", **options)
    if implementation == "padded":
        options["capacity"] = len(case["hidden"])
    if (implementation, name) == ("grouped_mm", "one_expert"):  # its widths are odd
        with pytest.raises(ValueError, match="multiple of 16 bytes"):
            value_and_gradients(case, torch.float32, implementation=implementation, **options)
        return
    got = value_and_gradients(case, torch.float32, implementation=implementation, **options)
    assert_close(got, truth, 1e-6)


@pytest.mark.parametrize("gated", cases([False, True], fast=1))
@pytest.mark.parametrize("nonlinearity", cases(NONLINEARITIES, fast=2))
def test_triton_knows_every_nonlinearity(nonlinearity, gated):
    case = make(12, 3, 1, 16, 16, gated=gated)
    options = {"nonlinearity": nonlinearity, "gated": gated}
    truth = value_and_gradients(case, torch.float64, implementation="sequential", **options)
    assert_close(value_and_gradients(case, torch.float32, implementation="triton", **options), truth, 1e-6)


def test_triton_in_fp16_is_as_exact_as_torch():
    case = make(15, 3, 2, 32, 32)
    options = {"nonlinearity": "silu", "gated": True}
    truth = value_and_gradients(case, torch.float64, implementation="sequential", **options)
    plain = value_and_gradients(case, torch.float16, implementation="sequential", **options)
    got = value_and_gradients(case, torch.float16, implementation="triton", **options)
    for name, exact in truth.items():
        assert (got[name] - exact).norm() <= 1.5 * (plain[name] - exact).norm() + 1e-6, name


def cancelling_bias(**sizes) -> dict[str, Any]:
    """A case in bf16 whose first products are cancelled by their bias, so that rounding them first is much worse."""
    case = make(**sizes, bias=True)
    case["hidden"] = case["hidden"] + 4
    case["up_bias"] = case["up_bias"] - 4 * case["up"].sum(2)
    return case | {name: case[name].bfloat16().float() for name in FLOATS if name != "gates"}


def test_biases_are_added_before_rounding():
    case = cancelling_bias(tokens=40, experts=3, topk=2, width=32, inner=32)
    options = {"nonlinearity": "silu", "gated": True}
    truth = value_and_gradients(case, torch.float64, implementation="sequential", **options)
    plain = value_and_gradients(case, torch.bfloat16, implementation="sequential", **options)
    got = value_and_gradients(case, torch.bfloat16, implementation="grouped_mm", **options)
    for name, exact in truth.items():
        assert (got[name] - exact).norm() <= 1.2 * (plain[name] - exact).norm(), name


@pytest.mark.parametrize("implementation", ["triton", "padded"])
def test_dropped_tokens_reach_nothing(implementation):
    case = make(16, 3, 2, 16, 16, bias=True)
    case["kept"] = torch.ones(16, 2, dtype=torch.bool)
    case["kept"][5] = False
    case["hidden"][5] = math.nan
    options: dict[str, Any] = {"nonlinearity": "silu", "gated": True, "implementation": implementation}
    options |= {"capacity": 16} if implementation == "padded" else {}
    got = value_and_gradients(case, torch.float32, **options)
    for name, tensor in got.items():
        assert tensor.isfinite().all(), name
    assert not got["out"][5].any()
    assert not got["hidden"][5].any()
    assert not got["gates"][5].any()


@pytest.mark.parametrize("implementation", ["triton", "sequential", *extra("padded")])
def test_a_checkpoint_gives_the_same_gradients(implementation):
    """Backward reads its saved tensors once, as non-reentrant checkpoints want it."""
    case = make(8, 3, 2, 16, 16)
    options: dict[str, Any] = {"nonlinearity": "silu", "gated": True, "implementation": implementation}
    options |= {"capacity": 8} if implementation == "padded" else {}
    plain, again = (case | {"hidden": case["hidden"].clone().requires_grad_()} for _ in range(2))
    expert_mlp(**plain, **options).sum().backward()
    checkpoint(lambda: expert_mlp(**again, **options), use_reentrant=False).sum().backward()
    assert torch.equal(plain["hidden"].grad, again["hidden"].grad)


@pytest.mark.parametrize("implementation", ["triton", "padded"])
def test_dropout_is_the_same_in_every_implementation(implementation):
    case = make(19, 3, 2, 16, 16, dropped=0.2)
    options: dict[str, Any] = {"nonlinearity": "silu", "gated": True, "dropout": 0.4}
    torch.manual_seed(3)
    truth = value_and_gradients(case, torch.float32, implementation="sequential", **options)
    torch.manual_seed(3)
    more = {"capacity": 19} if implementation == "padded" else {}
    got = value_and_gradients(case, torch.float32, implementation=implementation, **options, **more)
    assert_close(got, truth, 1e-6)


def test_dropout_drops_its_share_and_keeps_the_mean():
    tokens, inner = 400, 64
    case = make(tokens, 2, 1, 8, inner, gated=False)
    case |= {"up": torch.zeros(2, inner, 8), "up_bias": torch.ones(2, inner), "gates": torch.ones(tokens, 1)}
    case |= {"down": torch.eye(inner)[:8].expand(2, 8, inner).contiguous()}
    torch.manual_seed(0)
    out = expert_mlp(**case, nonlinearity="relu", gated=False, dropout=0.25)
    torch.testing.assert_close(out, torch.where(out == 0, 0.0, 1 / 0.75))
    assert (out == 0).float().mean() == pytest.approx(0.25, abs=0.03)


def test_padded_drops_what_is_above_the_capacity():
    chosen = torch.tensor([[0], [1], [0], [0], [1]])
    case = make(5, 2, 1, 16, 16, chosen=chosen)
    options = {"nonlinearity": "silu", "gated": True}
    got = value_and_gradients(case, torch.float32, implementation="padded", capacity=2, **options)
    case["kept"] = torch.tensor([[True], [True], [True], [False], [True]])
    assert_close(got, value_and_gradients(case, torch.float32, implementation="sequential", **options), 1e-6)


@full_only
@pytest.mark.parametrize("implementation", ["sequential", "triton", "padded"])
def test_compiles_as_one_graph(implementation):
    case = make(13, 3, 2, 16, 16, bias=True, dropped=0.2)
    hidden, up = (case.pop(name).requires_grad_() for name in ("hidden", "up"))
    options: dict[str, Any] = {"nonlinearity": "silu", "gated": True, "implementation": implementation}
    options |= {"capacity": 13} if implementation == "padded" else {}

    def loss(hidden, up, dropout=0.0):
        return expert_mlp(hidden, up=up, **case, **options, dropout=dropout).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(hidden, up), (hidden, up))
    torch.testing.assert_close(got, torch.autograd.grad(loss(hidden, up), (hidden, up)))


@full_only
@pytest.mark.parametrize("implementation", ["sequential", "triton"])
def test_compiles_as_one_graph_with_dropout(implementation):
    case = make(13, 3, 2, 16, 16)
    up = case.pop("up").requires_grad_()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(up):
        options: Any = {"implementation": implementation, "dropout": 0.5}
        return expert_mlp(up=up, **case, **options, nonlinearity="silu", gated=True).square().sum()

    assert torch.autograd.grad(loss(up), up)[0].isfinite().all()


@pytest.mark.parametrize("implementation", ["triton", "sequential", *extra("padded")])
def test_adds_to_a_stream_as_a_sum_would(implementation):
    case = make(13, 3, 2, 18, 20, bias=True, dropped=0.3)
    options: dict[str, Any] = {"nonlinearity": "silu", "gated": True, "implementation": implementation}
    options |= {"capacity": 13} if implementation == "padded" else {}
    stream, outer = torch.randn(2, 13, 18, generator=torch.Generator().manual_seed(2)).unbind()
    leaves = [case[name].requires_grad_() for name in ("hidden", "gates", "down")] + [stream.requires_grad_()]
    alone = stream + expert_mlp(**case, **options)
    together = expert_mlp(**case, **options, residual=stream)
    torch.testing.assert_close(together, alone)
    got, expected = (torch.autograd.grad(out, leaves, outer) for out in (together, alone))
    torch.testing.assert_close(got, expected)
    assert torch.equal(got[-1], outer)
    frozen = expert_mlp(**case, **options, residual=stream.detach())
    torch.testing.assert_close(torch.autograd.grad(frozen, leaves[:1], outer)[0], expected[0])


def test_one_operation_sums_onto_a_stream():
    case = make(13, 3, 2, 18, 20)
    stream = torch.randn(13, 18)
    assignments = sorted_assignments(case["experts"], 3)
    shapes = ("hidden", "gates", "up", "down", "up_bias", "down_bias", "experts")
    given = *(case[name] for name in shapes), *assignments, "silu", True, "triton"
    alone, together = (_experts(*given, onto)[0] for onto in (None, stream))
    torch.testing.assert_close(together, stream + alone)
    # one rounding, of the sum, in the dtype of the stream
    rows, places = torch.randn(3, 18), torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
    gates, narrow = torch.rand(2, 2), torch.randn(2, 18).bfloat16()
    exact = narrow.double() + reference_combine(rows.double(), gates.double(), places)
    got = triton_combine(rows, gates, places, narrow)
    assert got.dtype == torch.bfloat16
    assert (got.double() - exact).norm() <= 1.001 * (exact.bfloat16().double() - exact).norm()
    wide = triton_combine(rows.bfloat16(), gates, places, narrow.float())
    assert wide.dtype == torch.float32


def test_the_custom_operation_is_well_formed():
    case = make(5, 3, 2, 16, 16)
    leaves = [case[name].requires_grad_() for name in ("hidden", "gates", "up", "down")]
    stream = torch.randn(5, 16, requires_grad=True)
    assignments = sorted_assignments(case["experts"], 3)
    given = *leaves, None, None, case["experts"], *assignments, "silu", True, "triton", stream
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_experts, given, test_utils=checks)


@pytest.mark.parametrize("onto", [None, torch.zeros(24, 16)])
def test_keeps_tokens_and_first_projection_only(onto):
    case = make(24, 3, 2, 16, 40) | {"residual": onto}
    for name in ("hidden", "gates", "up", "down"):
        case[name].requires_grad_()
    saved: list[torch.Tensor] = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        expert_mlp(**case, nonlinearity="silu", gated=True, implementation="triton")
    arguments = {x.data_ptr() for x in case.values() if x is not None}
    extra = [x for x in saved if x.data_ptr() not in arguments and x.is_floating_point()]
    assert [tuple(x.shape) for x in extra] == [(48, 80)]


def test_autocast_is_followed():
    case = make(6, 2, 1, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = expert_mlp(**case, nonlinearity="silu", gated=True)
    narrow = {name: x.bfloat16() if name in ("hidden", "up", "down") else x for name, x in case.items()}
    torch.testing.assert_close(out, expert_mlp(**narrow, nonlinearity="silu", gated=True), rtol=0, atol=0)


def test_auto_is_the_loop_without_a_gpu():
    case, options = make(6, 2, 1, 8, 8), {"nonlinearity": "silu", "gated": True}
    assert torch.equal(expert_mlp(**case, **options), expert_mlp(**case, **options, implementation="sequential"))


@looped(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(5, 0)}, r"`hidden` \(5, 0\)"),
        ({"experts": torch.zeros(5, 2, dtype=torch.int32)}, "`experts`.*int64"),
        ({"experts": torch.zeros(5, 4, dtype=torch.int64), "gates": torch.zeros(5, 4)}, "there are only 3"),
        ({"gates": torch.zeros(5, 1)}, "`gates`"),
        ({"kept": torch.ones(5, 2)}, "`kept`.*bool"),
        ({"up": torch.zeros(3, 8, 16)}, r"`up` \(3, 8, 16\) must be \(3, 16, 16\)"),
        ({"down": torch.zeros(3, 8, 8)}, "`down`"),
        ({"up_bias": torch.zeros(3, 8)}, "`up_bias`"),
        ({"down_bias": torch.zeros(2, 16)}, "`down_bias`"),
        ({"down": torch.zeros(3, 16, 8).double()}, "`down`.*dtype"),
        ({"nonlinearity": "swish"}, "`nonlinearity`.*relu_squared"),
        ({"dropout": 1.0}, "`dropout`"),
        ({"implementation": "fast"}, "`implementation`"),
        ({"implementation": "padded"}, "`capacity`"),
        ({"capacity": 4}, "`capacity`"),
        ({"capacity": 0, "implementation": "padded"}, "`capacity`"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments: dict[str, Any] = {**make(5, 3, 2, 16, 8), "nonlinearity": "silu", "gated": True, **change}
    with pytest.raises(ValueError, match=message):
        expert_mlp(**arguments)


def test_a_refused_implementation_says_why():
    case: dict[str, Any] = {
        n: x.double() if n in FLOATS and x is not None else x for n, x in make(5, 3, 2, 16, 8).items()
    }
    for implementation in ("triton", "grouped_mm"):
        with pytest.raises(ValueError, match=r"float64.*`sequential` runs everywhere"):
            expert_mlp(**case, nonlinearity="silu", gated=True, implementation=implementation)
