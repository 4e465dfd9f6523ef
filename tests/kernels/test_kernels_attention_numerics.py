"""The flash kernels against the definition in fp64: the error of every output, and numerical differentiation.

On a CPU the kernels run in Triton's interpreter; `-m gpu` runs the same tests, and larger ones, on a device.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import (
    CASES_BY_FEATURE,
    HEAD_DIMS,
    ON_DEVICES,
    PACKED,
    Case,
    assert_accurate,
    build,
    check_gradients,
    close,
    mostly_full,
    random_case,
    run,
    told,
)
from tiers import extra, full_only, looped

from stoker.kernels import flash_attention, reference_attention

FIXED_CASES = [
    Case(queries=1, keys=65),
    Case(queries=65, keys=1),
    Case(queries=17, keys=97, causal=True, heads=6, groups=2),
    Case(queries=97, keys=17, causal=True, heads=3, groups=1),
    Case(queries=64, keys=64, head_dim=80, causal=True),
    Case(queries=65, keys=129, head_dim=40, window=(16, 0), heads=3, groups=3),
    Case(queries=129, keys=65, window=(0, 0), reach=1),
    Case(queries=65, keys=65, window=(0, 16), softcap=2.0, bias="bhqk"),
    Case(queries=33, keys=97, reach=128, scale=1.0, spread=0.5),
    Case(queries=97, keys=97, reach=15, causal=True, heads=6, groups=3, head_dim=24),
    Case(queries=31, keys=63, bias="k", padding=True, batch=3, bias_fp32=True),
    Case(queries=65, keys=64, bias="qk", dropout=0.17, causal=True),
    Case(batch=len(PACKED), lengths=PACKED, causal=True, window=(12, -1), heads=4, groups=2),
    Case(batch=len(PACKED), lengths=PACKED, reach=16, dropout=0.17),
    Case(queries=33, keys=65, spread=6.0),
    Case(queries=65, keys=97, slopes=True, heads=4, groups=2),
    Case(queries=97, keys=65, slopes=True, causal=True, reach=20, dropout=0.17, head_dim=24),
    Case(batch=len(PACKED), lengths=PACKED, slopes=True, causal=True, heads=4, groups=2, softcap=2.0),
    Case(queries=65, keys=70, slopes=True, padding=True, batch=3, bias="hqk", window=(40, 20)),
    Case(queries=97, keys=65, sinks=True, heads=4, groups=2, head_dim=24, causal=True, window=(20, -1)),
    Case(queries=65, keys=97, sinks=True, reach=20, softcap=2.0, dropout=0.17),
    Case(queries=65, keys=33, sinks=True, slopes=True, causal=True, heads=4, groups=4),
    Case(batch=len(PACKED), lengths=PACKED, sinks=True, causal=True, reach=16),
    Case(queries=65, keys=97, head_dim=48, value_dim=24, causal=True, heads=4, groups=2, softcap=2.0),
    Case(queries=97, keys=65, head_dim=24, value_dim=64, reach=15, dropout=0.17, sinks=True),
    Case(batch=len(PACKED), lengths=PACKED, head_dim=40, value_dim=32, causal=True, slopes=True),
    Case(queries=33, keys=65, value_dim=40, bias="hk", padding=True, batch=2),
    Case(queries=97, keys=130, chunk=40, causal=True, heads=4, groups=2),
    Case(queries=130, keys=97, chunk=7, causal=True, softcap=2.0, sinks=True),
    Case(queries=97, keys=97, chunk=32, causal=True, window=(20, -1), reach=16, dropout=0.17),
    Case(batch=len(PACKED), lengths=PACKED, chunk=10, causal=True, slopes=True),
    Case(queries=65, keys=65, chunk=24, causal=True, bias="hk", padding=True, batch=2, value_dim=24),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])


ACCURACY = {
    f"{name}-{case}": (case, dtype)
    for case in FIXED_CASES
    for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16))
}
FAST = [list(ACCURACY)[place] for place in (8, 50, 59, 74, 83)]  # groups, slopes, sinks, values, chunks


@mostly_full("case_and_dtype", ACCURACY, FAST, gpu=True)
def test_accuracy(case_and_dtype: tuple[Case, torch.dtype], device: str) -> None:
    assert_accurate(flash_attention, *case_and_dtype, device)


@pytest.mark.parametrize("seed", range(2))
def test_accuracy_of_random_cases(seed: int) -> None:
    case = random_case(random.Random(seed), largest=65, widest=64)
    assert_accurate(flash_attention, case, (torch.float32, torch.float16, torch.bfloat16)[seed % 3], seed=seed)


@full_only
@pytest.mark.parametrize("block", range(40))
def test_accuracy_of_many_random_cases(block: int) -> None:
    for seed in range(1000 + 10 * block, 1010 + 10 * block):
        case = random_case(random.Random(seed), largest=200, widest=256)
        dtype = (torch.float32, torch.float16, torch.bfloat16, torch.float64)[seed % 4]
        with told(case, seed):
            assert_accurate(flash_attention, case, dtype, seed=seed)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_accuracy_of_every_head_width(head_dim: int, causal: bool, dtype: torch.dtype) -> None:
    for case in (
        Case(head_dim=head_dim, causal=causal, queries=257, keys=513, heads=4, groups=2),
        Case(head_dim=head_dim, causal=causal, queries=300, keys=300, reach=64),
        Case(head_dim=head_dim, causal=causal, queries=129, keys=200, bias="hqk"),
        Case(head_dim=head_dim, causal=causal, queries=257, keys=513, value_dim=128, heads=4, groups=2, sinks=True),
        Case(head_dim=head_dim, causal=True, queries=600, keys=777, chunk=200, heads=4, groups=2),
        Case(head_dim=head_dim, causal=causal, batch=3, lengths=((128, 128), (1, 77), (200, 150)), dropout=0.1),
    ):
        with told(case, 0):
            assert_accurate(flash_attention, case, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("block", range(24))
def test_accuracy_of_many_random_cases_on_a_gpu(block: int) -> None:
    for seed in range(5000 + 10 * block, 5010 + 10 * block):
        case = random_case(random.Random(seed), largest=1025, widest=256)
        dtype = (torch.float32, torch.float16, torch.bfloat16)[seed % 3]
        with told(case, seed):
            assert_accurate(flash_attention, case, dtype, "cuda", seed)


SUMS = {
    "alibi_slopes": torch.tensor([0.5, 0.25]),
    "distance_bias": torch.linspace(-1.0, 1.0, 2 * 49).view(2, 49),
    "bias": torch.linspace(-1.0, 1.0, 40).view(1, 1, 1, 40),  # summed over heads and queries
}


@full_only
@ON_DEVICES
@looped("name", SUMS)
@looped("causal", [False, *extra(True)])
@looped("lse_gradient", [*extra(False), True])
def test_sums_of_score_gradients_do_not_see_the_rounding_of_the_output(
    name: str, causal: bool, lse_gradient: bool, device: str
) -> None:
    """More queries than keys: a residual of the rows' sums times distances outgrows the gradient in bf16."""
    queries, head_dim = (200, 16) if device == "cpu" else (1537, 64)
    generator = torch.Generator().manual_seed(0)
    q, k, v, out_gradient = (
        torch.randn(1, rows, 2, head_dim, generator=generator).bfloat16().to(device)
        for rows in (queries, 40, 40, queries)
    )
    row_gradient = torch.randn(1, 2, queries, generator=generator).to(device)

    def gradient(function: Any, dtype: torch.dtype) -> torch.Tensor:
        summed = SUMS[name].to(device, torch.promote_types(dtype, torch.float32)).requires_grad_()
        inputs = [tensor.to(dtype) for tensor in (q, k, v)]
        out, lse = function(*inputs, causal=causal, return_lse=True, **{name: summed})
        gradients = [out_gradient.to(dtype)]
        if lse_gradient:
            out, gradients = (out, lse), [*gradients, row_gradient.to(lse.dtype)]
        return torch.autograd.grad(out, summed, gradients)[0].double()

    exact = gradient(reference_attention, torch.float64)
    assert (gradient(flash_attention, torch.bfloat16) - exact).norm() <= 1e-4 * exact.norm()


@full_only
@ON_DEVICES
@pytest.mark.parametrize("logit", [1e4, 65504.0])
def test_huge_scores_stay_finite(device: str, logit: float) -> None:
    """Scores of +-logit: the softmax is one-hot, the log-sum-exp is the largest score."""
    problem = build(Case(batch=1, queries=17, keys=40, head_dim=16, scale=1.0), torch.float32, device)
    q, k = torch.zeros(1, 17, 2, 16, device=device), torch.zeros(1, 40, 1, 16, device=device)
    q[..., 0], k[..., 0], k[:, 5, :, 0] = 1.0, -logit, logit
    results = run(flash_attention, problem.with_tensors(q=q.requires_grad_(), k=k.requires_grad_()))
    assert all(tensor.isfinite().all() for tensor in results.values())
    value = problem.tensors["v"].detach()
    # a GPU may round score - largest once instead of twice, so that the largest weight is not quite 1
    torch.testing.assert_close(results["out"], value[:, 5:6].expand(1, 17, 2, 16), rtol=5e-7, atol=0.0)
    torch.testing.assert_close(results["lse"], torch.full_like(results["lse"], logit), rtol=5e-7, atol=0.0)


@ON_DEVICES
@pytest.mark.parametrize("sink", [-math.inf, -1e4, 0.0, 1e4])
def test_sinks_of_any_size(device: str, sink: float) -> None:
    """None, one far below or far above all scores, and a query that sees no key, whose log-sum-exp is the sink."""
    problem = build(Case(queries=40, keys=33, causal=True), torch.float32, device)
    sinks = torch.full((2,), sink, device=device, requires_grad=True)
    ours = run(flash_attention, problem.with_tensors(sinks=sinks))
    if sink in (-math.inf, -1e4):
        plain = run(flash_attention, problem)
        rows = slice(7, None) if sink == -1e4 else slice(None)  # seven queries see no key
        torch.testing.assert_close(ours["out"], plain["out"])
        torch.testing.assert_close(ours["lse"][..., rows], plain["lse"][..., rows])
        torch.testing.assert_close(ours["dk"], plain["dk"])
    assert (ours["lse"][..., :7] == sink).all()
    assert not ours["out"][:, :7].any()
    assert sink < 1e4 or not ours["out"].any()
    assert all(gradient.isfinite().all() for name, gradient in ours.items() if name.startswith("d"))


# ---------------------------------------------------------------- gradients of the kernels themselves, in fp64

GRADCHECK = {
    name: replace(case, batch=len(case.lengths) or 1, queries=min(case.queries, 19), keys=min(case.keys, 21))
    for name, case in CASES_BY_FEATURE.items()
}


@full_only
@mostly_full("case", GRADCHECK, [])  # `test_kernels_flash_internals.py` has all biases at once in the fast tier
def test_kernels_pass_gradcheck(case: Case, device: str) -> None:
    small = replace(case, lengths=tuple((q // 2, k // 2) for q, k in case.lengths))
    check_gradients(flash_attention, small)


@mostly_full("case", CASES_BY_FEATURE, ["both_biases", "slopes", "sinks", "values", "chunks"])
def test_fp64_is_the_reference(case: Case, device: str) -> None:
    problem = build(case, torch.float64, device)
    ours, truth = run(flash_attention, problem), run(reference_attention, problem)
    for name, expected in truth.items():
        assert close(ours[name], expected, 1e-11), name
