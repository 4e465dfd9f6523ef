"""Relations that hold without a reference, and life inside torch: compiled, differentiated, recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import (
    CASES_BY_FEATURE,
    ON_DEVICES,
    Case,
    Problem,
    assert_equal,
    build,
    close,
    mostly_full,
    run,
)
from compiled_graphs import CompiledGraphs
from tiers import extra, full_only
from torch.utils.flop_counter import FlopCounterMode

from stoker import kernels
from stoker.kernels.attention.argument_checks import check_arguments
from stoker.kernels.attention.flash.kernel_arguments import FlashAttentionParams
from stoker.kernels.attention.inputs import AttentionInputs

flash_attention: Any = kernels.flash_attention  # a tensor, or two with `return_lse`
reference_attention: Any = kernels.reference_attention
BOTH = pytest.mark.parametrize(
    "attention", [reference_attention, *extra(flash_attention)], ids=lambda attention: attention.__name__
)


@BOTH
def test_a_constant_per_row_changes_only_the_log_sum_exp(attention: Callable[..., Any]) -> None:
    problem = build(Case(bias="q"), torch.float64)
    without = Problem({n: problem.tensors[n] for n in "qkv"}, problem.options)
    out, lse = attention(**problem.tensors, **problem.options, return_lse=True)
    expected, expected_lse = attention(**without.tensors, **without.options, return_lse=True)
    assert close(out, expected)
    assert close(lse, expected_lse + problem.tensors["bias"][..., 0])


@BOTH
def test_order_of_the_keys_does_not_matter(attention: Callable[..., Any]) -> None:
    problem = build(Case(keys=50), torch.float64)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    turned = problem.with_tensors(**{n: problem.tensors[n][:, order] for n in "kv"})
    assert close(attention(**turned.tensors, **turned.options), attention(**problem.tensors, **problem.options))


@BOTH
def test_output_is_linear_in_the_values(attention: Callable[..., Any]) -> None:
    problem = build(Case(causal=True, dropout=0.2), torch.float64)
    value = problem.tensors["v"]
    other = torch.randn(value.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    parts = [attention(**problem.with_tensors(v=v).tensors, **problem.options) for v in (value, other)]
    whole = attention(**problem.with_tensors(v=2 * value - 3 * other).tensors, **problem.options)
    assert close(whole, 2 * parts[0] - 3 * parts[1])


@BOTH
def test_parts_of_the_keys_merge_by_their_log_sum_exp(attention: Callable[..., Any]) -> None:
    problem = build(Case(keys=70), torch.float64)
    whole, whole_lse = attention(**problem.tensors, **problem.options, return_lse=True)
    outs, lses = [], []
    for part in (slice(0, 23), slice(23, 70)):
        some = problem.with_tensors(**{n: problem.tensors[n][:, part] for n in "kv"})
        out, lse = attention(**some.tensors, **some.options, return_lse=True)
        outs.append(out)
        lses.append(lse)
    both = torch.stack(lses)
    assert close(both.logsumexp(0), whole_lse)
    weights = both.softmax(0).transpose(2, 3)[..., None]
    assert close((torch.stack(outs) * weights).sum(0), whole)


@BOTH
def test_gradients_of_biases_sum_to_zero(attention: Callable[..., Any]) -> None:
    """Adding one number to every score of a head changes no output, with dropout too."""
    problem = build(Case(bias="hqk", reach=5, dropout=0.2, causal=True), torch.float64)
    results = run(attention, problem, lse_gradient=False)
    for name in ("dbias", "ddistance_bias"):
        rest = results[name].flatten(-2).sum(-1) if name == "dbias" else results[name].sum(-1)
        assert rest.abs().max() < 1e-12 * results[name].abs().sum()


@BOTH
def test_log_sum_exp_differentiates_to_the_softmax(attention: Callable[..., Any]) -> None:
    problem = build(Case(bias="bhqk"), torch.float64)
    _, lse = attention(**problem.tensors, **problem.options, return_lse=True)
    (gradient,) = torch.autograd.grad(lse.sum(), problem.tensors["bias"])
    assert close(gradient.sum(-1), torch.ones_like(lse))
    assert (gradient > 0).all()


@full_only
@ON_DEVICES
def test_windows_that_hide_nothing_are_none(device: str) -> None:
    problem = build(Case(queries=33, keys=40, causal=True), torch.float16, device)
    expected = run(flash_attention, problem)
    for window in ((39, 0), (1000, 1000), (-1, 0), (39, 7)):
        assert_equal(run(flash_attention, problem.with_options(window_size=window)), expected)
    assert_equal(run(flash_attention, problem.with_options(causal=False, window_size=(-1, 0))), expected)


@BOTH
def test_biases_of_zeros_are_none(attention: Callable[..., Any]) -> None:
    problem = build(Case(queries=33, keys=40, causal=True), torch.float64)
    expected = attention(**problem.tensors, **problem.options)
    nothing = {"bias": torch.zeros(1, 1, 1, 1, dtype=torch.float64), "distance_bias": torch.zeros(2, 5).double()}
    assert close(attention(**problem.tensors, **problem.options, **nothing), expected)


@BOTH
@pytest.mark.parametrize("reach", [1, 7, 200])
def test_distance_bias_is_a_dense_bias(attention: Callable[..., Any], reach: int) -> None:
    """Gradients too: those of the vector are sums over diagonals, its ends over all that is farther."""
    problem = build(Case(queries=30, keys=45, reach=reach), torch.float64)
    vector = problem.tensors["distance_bias"]
    distance = torch.arange(45) - (torch.arange(30)[:, None] + 15)
    dense = vector[:, distance.clamp(-reach, reach) + reach]
    tensors = {n: problem.tensors[n] for n in "qkv"}
    ours = attention(**problem.tensors, **problem.options)
    theirs = reference_attention(**tensors, bias=dense, **problem.options)
    assert close(ours, theirs)
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradient, expected = (torch.autograd.grad(out, vector, upstream)[0] for out in (ours, theirs))
    assert close(gradient, expected)


@BOTH
@pytest.mark.parametrize("causal", [False, True])
def test_slopes_are_a_distance_bias(attention: Callable[..., Any], causal: bool) -> None:
    """The gradient of a slope is that of its line of biases."""
    problem = build(Case(queries=40, keys=70, slopes=True, causal=causal), torch.float64)
    slopes = problem.tensors["alibi_slopes"]
    line = -slopes[:, None] * torch.arange(-69, 70).abs()
    tensors = {n: problem.tensors[n] for n in "qkv"}
    ours, ours_lse = attention(**problem.tensors, **problem.options, return_lse=True)
    theirs, theirs_lse = reference_attention(**tensors, distance_bias=line, **problem.options, return_lse=True)
    assert close(ours, theirs)
    assert close(ours_lse, theirs_lse)
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradient, expected = (torch.autograd.grad(out, slopes, upstream)[0] for out in (ours, theirs))
    assert close(gradient, expected, 1e-10)


@BOTH
def test_dropout_keeps_its_share(attention: Callable[..., Any]) -> None:
    """With equal scores and values of one, the outputs count the kept weights."""
    zero, one = torch.zeros(2, 64, 2, 16), torch.ones(2, 64, 2, 16)
    options: dict[str, Any] = {"dropout_p": 0.25}
    out = attention(zero, zero, one, rng=torch.tensor([1, 0]), **options)[..., 0]
    assert abs(out.mean() - 1) < 0.02
    assert 0.05 < out.std() < 0.1  # sqrt(p / (1 - p) / 64) is 0.072
    for rng in ([2, 0], [1, 1]):
        assert not torch.equal(attention(zero, zero, one, rng=torch.tensor(rng), **options)[..., 0], out)
    assert torch.equal(attention(zero, zero, one, rng=torch.tensor([1, 0]), **options)[..., 0], out)


# ---------------------------------------------------------------- inside torch


COMPILED = ("causal", "softcap", "both_biases", "packed", "padding", "dropout", "slopes", "sinks", "values", "chunks")


@full_only
@mostly_full("name", {name: name for name in COMPILED}, ["causal"], gpu=True)
def test_one_graph(name: str, device: str) -> None:
    torch.compiler.reset()  # the cases are more than the recompilations of a function that torch allows
    problem = build(CASES_BY_FEATURE[name], torch.float32, device)
    compiled = torch.compile(flash_attention, fullgraph=True, backend="aot_eager")
    assert_equal(run(compiled, problem), run(flash_attention, problem))


@full_only
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("length", "head_dim", "joins"),
    [(40, 16, True), (24, 16, False), (40, 128, False)],
    ids=["slices", "other keys", "wide heads"],
)
def test_slices_of_a_projection_have_one_gradient(length: int, head_dim: int, joins: bool) -> None:
    """The pass that inductor runs over a compiled graph removes split and concatenation; the bits are the same."""
    from torch._inductor.fx_passes.post_grad import post_grad_passes

    projected = torch.randn(2, 40, 8, head_dim, generator=torch.Generator().manual_seed(0)).requires_grad_()
    bias = torch.randn(4, 11, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def attend(projected: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = projected.split((4, 2, 2), dim=2)
        return flash_attention(q, k[:, :length], v[:, :length], distance_bias=bias)

    graphs = CompiledGraphs()
    out = torch.compile(attend, backend=graphs.backend, fullgraph=True, dynamic=False)(projected, bias)
    ours = torch.autograd.grad(out.square().sum(), (projected, bias))
    plain = torch.autograd.grad(attend(projected, bias).square().sum(), (projected, bias))
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    (graph,) = graphs.backwards
    assert "aten.cat" in str(graph)
    assert ("aten.split_with_sizes" in str(graph)) is joins
    if joins:
        assert graph.owning_module is not None
        post_grad_passes(graph.owning_module, is_inference=False)
        assert "aten.cat" not in str(graph)
    torch.compiler.reset()


@full_only
def test_keys_and_values_of_a_projection_have_one_gradient() -> None:
    from torch._inductor.fx_passes.post_grad import post_grad_passes

    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 24, 4, 16, generator=generator).requires_grad_()
    projected = torch.randn(2, 40, 4, 16, generator=generator).requires_grad_()

    def attend(query: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        return flash_attention(query, *projected.chunk(2, dim=2))

    for needs_query in (True, False):
        leaves = (query, projected) if needs_query else (projected,)
        graphs = CompiledGraphs()
        compiled = torch.compile(attend, backend=graphs.backend, fullgraph=True, dynamic=False)
        ours = torch.autograd.grad(compiled(query.requires_grad_(needs_query), projected).square().sum(), leaves)
        plain = torch.autograd.grad(attend(query, projected).square().sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
        (graph,) = graphs.backwards
        assert "aten.cat" in str(graph)
        assert graph.owning_module is not None
        post_grad_passes(graph.owning_module, is_inference=False)
        assert "aten.cat" not in str(graph)
        torch.compiler.reset()


@full_only
def test_one_graph_of_any_length() -> None:
    graphs = 0

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(flash_attention, fullgraph=True, backend=backend, dynamic=True)
    for length in (20, 33, 47):
        problem = build(Case(queries=length, keys=length, causal=True), torch.float32)
        out = compiled(**problem.tensors, **problem.options)
        assert torch.equal(out, flash_attention(**problem.tensors, **problem.options))
    assert graphs == 1


@full_only
@ON_DEVICES
def test_second_derivative_is_refused(device: str) -> None:
    problem = build(Case(), torch.float32, device)
    out = flash_attention(**problem.tensors, **problem.options)
    query = problem.tensors["q"]
    (gradient,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(gradient.sum(), query)


@full_only
@ON_DEVICES
def test_backward_twice_over_a_kept_graph(device: str) -> None:
    problem = build(Case(reach=3), torch.float16, device)
    out = flash_attention(**problem.tensors, **problem.options)
    leaves = list(problem.tensors.values())
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(out.sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def arguments_of_the_operation(problem: Problem) -> tuple[Any, ...]:
    """Return the arguments that the public function hands to `stoker::flash_attention`."""
    inputs = AttentionInputs(**problem.arguments)
    return (*inputs[:3], *FlashAttentionParams.from_checked(inputs, check_arguments(inputs)))


@full_only
@mostly_full("name", {name: name for name in COMPILED}, [], gpu=True)
def test_operation_is_well_formed(name: str, device: str) -> None:
    """Schema, fake results, registered gradient, and the traced gradient with symbolic sizes."""
    problem = build(CASES_BY_FEATURE[name], torch.float32, device)
    torch.library.opcheck(torch.ops.stoker.flash_attention.default, arguments_of_the_operation(problem))


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 5 * 7),
        ({"causal": True}, 5 * 7 - 5 * 4 // 2),
        ({"causal": True, "attention_chunk": 3}, 3 + 1 + 2 + 3 + 1),  # queries at 2 to 6 of 7
        ({"causal": True, "attention_chunk": 3, "window_size": (1, 0)}, 2 + 1 + 2 + 2 + 1),
    ],
    ids=str,
)
def test_flops_count_what_is_visible(options: dict[str, Any], pairs: int) -> None:
    problem = build(Case(queries=5, keys=7), torch.float32).with_options(**options)
    with FlopCounterMode(display=False) as counter:
        flash_attention(**problem.tensors, **problem.options).sum().backward()
    assert counter.get_total_flops() == (4 + 10) * 2 * 16 * pairs
