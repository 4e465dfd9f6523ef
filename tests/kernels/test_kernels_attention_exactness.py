"""The flash kernels, call against call: the same bits where they must be, and nothing hidden that is noticed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
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
    mostly_full,
    outputs,
    per_sequence,
    run,
)
from tiers import full_only
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stoker import kernels

flash_attention: Any = kernels.flash_attention  # a tensor, or two with `return_lse`
reference_attention: Any = kernels.reference_attention

BOTH = pytest.mark.parametrize("attention", [reference_attention, flash_attention], ids=["reference", "flash"])


@mostly_full("case", CASES_BY_FEATURE, ["dropout"], gpu=True)
def test_repeats_bit_for_bit(case: Case, device: str) -> None:
    problem = build(case, torch.float16, device)
    first = run(flash_attention, problem)
    for _ in range(1 if device == "cpu" else 50):
        assert_equal(run(flash_attention, problem.with_options(deterministic=True)), first)


@full_only
@ON_DEVICES
def test_order_of_the_batch_does_not_matter(device: str) -> None:
    problem = build(Case(batch=3, causal=True, padding=True, bias="bqk"), torch.float16, device)
    order = torch.tensor([2, 0, 1], device=device)
    turned = problem.with_tensors(**{n: t.detach()[order].requires_grad_() for n, t in problem.tensors.items()})
    turned = turned.with_options(key_padding_mask=problem.options["key_padding_mask"][order])
    ours, theirs = outputs(flash_attention, turned), outputs(flash_attention, problem)
    assert all(torch.equal(mine, other[order]) for mine, other in zip(ours, theirs, strict=True))


@full_only
@ON_DEVICES
@pytest.mark.parametrize("causal", [False, True])
def test_padding_on_the_right_changes_nothing(device: str, causal: bool) -> None:
    """Keys and queries appended alike, the keys masked out."""
    problem = build(Case(queries=40, keys=40, causal=causal, reach=5), torch.float16, device)
    more = {n: torch.nn.functional.pad(problem.tensors[n].detach(), (0, 0, 0, 0, 0, 30), value=2.0) for n in "qkv"}
    mask = (torch.arange(70, device=device) < 40).expand(1, 70)
    padded = problem.with_tensors(**{n: t.requires_grad_() for n, t in more.items()})
    padded = padded.with_options(key_padding_mask=mask)
    out, lse = flash_attention(**padded.tensors, **padded.options, return_lse=True)
    gradients = torch.autograd.grad(out[:, :40].float().square().sum(), list(padded.tensors.values()))
    ours = [out[:, :40], lse[..., :40], *(g[:, :40] for g in gradients[:3]), gradients[3]]
    for mine, other in zip(ours, outputs(flash_attention, problem), strict=True):
        assert torch.equal(mine, other)


@ON_DEVICES
def test_packed_is_each_sequence_alone(device: str) -> None:
    case = Case(batch=4, lengths=((5, 9), (0, 4), (35, 20), (7, 0)), causal=True, reach=9)
    problem = build(case, torch.float16, device)
    out, lse, dq, dk, dv, _ = outputs(flash_attention, problem)
    alone = [outputs(flash_attention, one) for one in per_sequence(problem)]
    for packed, place in ((out, 0), (dq, 2), (dk, 3), (dv, 4)):
        assert torch.equal(packed, torch.cat([one[place][0] for one in alone]))
    assert torch.equal(lse, torch.cat([one[1][0] for one in alone], dim=1))


@full_only
@ON_DEVICES
def test_bound_of_the_lengths_may_be_generous(device: str) -> None:
    problem = build(CASES_BY_FEATURE["packed"], torch.float16, device)
    generous = problem.with_options(max_seqlen_q=77, max_seqlen_k=129)
    assert_equal(run(flash_attention, generous), run(flash_attention, problem))


@full_only
@ON_DEVICES
def test_tokens_outside_the_sequences_are_nothing(device: str) -> None:
    problem = build(CASES_BY_FEATURE["packed"], torch.float16, device)
    more = {n: torch.nn.functional.pad(problem.tensors[n].detach(), (0, 0, 0, 0, 0, 9), value=math.nan) for n in "qkv"}
    longer = problem.with_tensors(**{n: t.requires_grad_() for n, t in more.items()})
    out, lse = flash_attention(**longer.tensors, **longer.options, return_lse=True)
    gradients = torch.autograd.grad(out.float().square().sum(), list(longer.tensors.values()))
    for tensor in (out, *gradients[:3]):
        assert not tensor[-9:].any()
    assert (lse[:, -9:] == -math.inf).all()
    ours = [out[:-9], lse[:, :-9], *(g[:-9] for g in gradients[:3])]
    *expected, expected_distance_gradient = outputs(flash_attention, problem)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    # summed over tiles, whose number follows the size of the tensors
    torch.testing.assert_close(gradients[3], expected_distance_gradient)


STRIDES = ("head_first", "fused", "sliced", "reversed_strides", "offset", "batch_expanded")


@mostly_full("how", {how: how for how in STRIDES}, ["head_first"], gpu=True)
def test_strides_do_not_matter(how: str, device: str) -> None:
    problem = build(
        Case(groups=2, bias="hqk", reach=4, batch=2 if how == "batch_expanded" else 1), torch.float16, device
    )
    if how == "batch_expanded":
        problem = problem.with_tensors(
            **{n: problem.tensors[n].detach()[:1].expand(2, -1, -1, -1).contiguous() for n in "qkv"}
        )
    views = {}
    plain = {n: t.detach() for n, t in problem.tensors.items()}
    q, k, v = (plain[n] for n in "qkv")
    if how == "head_first":
        views = {n: plain[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
        views["bias"] = plain["bias"].transpose(2, 3).contiguous().transpose(2, 3)
    elif how == "fused":
        views = dict(zip("qkv", torch.cat([q, k, v], dim=2).split(2, dim=2), strict=True))
    elif how == "sliced":
        views = {n: torch.nn.functional.pad(plain[n], (0, 8))[..., :16] for n in "qkv"}
    elif how == "reversed_strides":
        views = {n: plain[n].permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for n in "qkv"}
        views["distance_bias"] = plain["distance_bias"].t().contiguous().t()
    elif how == "offset":
        for n in "qkv":
            room = plain[n].new_zeros(plain[n].numel() + 1)
            views[n] = room[1:].view(plain[n].shape).copy_(plain[n])  # not on a multiple of 16 bytes
    else:
        views = {n: plain[n][:1].expand(2, -1, -1, -1) for n in "qkv"}
    strided = Problem({n: t.requires_grad_() for n, t in (plain | views).items()}, problem.options)
    fresh = problem.detached()
    assert_equal(run(flash_attention, strided), run(flash_attention, fresh))


@full_only
@ON_DEVICES
@pytest.mark.parametrize("how", ["transposed", "expanded"])
def test_strides_of_the_upstream_gradient_do_not_matter(how: str, device: str) -> None:
    problem = build(Case(), torch.float16, device)
    out = flash_attention(**problem.tensors, **problem.options)
    if how == "transposed":
        upstream = torch.randn_like(out.transpose(1, 3).contiguous()).transpose(1, 3)
    else:
        upstream = out.new_full((1,), 0.5).expand_as(out)
    leaves = list(problem.tensors.values())
    ours = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
    theirs = torch.autograd.grad(out, leaves, upstream.contiguous())
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@full_only
@ON_DEVICES
def test_groups_are_repeated_heads(device: str) -> None:
    problem = build(Case(heads=6, groups=2, causal=True), torch.float16, device)
    wide = {n: problem.tensors[n].repeat_interleave(3, dim=2) for n in "kv"}
    ours, ours_lse = flash_attention(**problem.tensors, **problem.options, return_lse=True)
    theirs, theirs_lse = flash_attention(**problem.with_tensors(**wide).tensors, **problem.options, return_lse=True)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours_lse, theirs_lse)


@full_only
@ON_DEVICES
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_the_same(reentrant: bool, device: str) -> None:
    problem = build(Case(causal=True, dropout=0.4, reach=3), torch.float16, device)

    def recomputed(q: Tensor, k: Tensor, v: Tensor, distance_bias: Tensor, **options: Any) -> Any:
        attend = partial(flash_attention, distance_bias=distance_bias, **options)
        return checkpoint(attend, q, k, v, use_reentrant=reentrant)

    fresh = problem.detached()
    out = recomputed(**fresh.tensors, **fresh.options)
    out.float().square().sum().backward()  # the reentrant way allows no other
    expected_out, _, *expected = outputs(flash_attention, problem)
    assert torch.equal(out, expected_out)
    names = "qkv" if reentrant else (*"qkv", "distance_bias")  # reentrant: tensors in positions only
    for name, gradient in zip(names, expected, strict=False):
        assert torch.equal(fresh.tensors[name].grad, gradient)  # pyrefly: ignore[bad-argument-type]


@full_only
@ON_DEVICES
def test_a_gradient_does_not_depend_on_the_others(device: str) -> None:
    problem = build(Case(bias="hqk", reach=4), torch.float16, device)
    everything = run(flash_attention, problem)
    names = list(problem.tensors)
    for count in (1, 2, 4):
        for wanted in itertools.combinations(names, count) if count == 1 else [tuple(names[-count:])]:
            fresh = problem.detached()
            for name, tensor in fresh.tensors.items():
                tensor.requires_grad_(name in wanted)
            some = run(flash_attention, fresh, wanted=wanted)
            assert all(torch.equal(tensor, everything[name]) for name, tensor in some.items())
    frozen = problem.detached()
    for tensor in frozen.tensors.values():
        tensor.requires_grad_(False)
    out, lse = flash_attention(**frozen.tensors, **frozen.options, return_lse=True)
    assert not out.requires_grad
    assert not lse.requires_grad
    assert torch.equal(out, everything["out"])


# ---------------------------------------------------------------- what is hidden has no influence


HIDDEN = {
    f"{name}-{where}-{poison}": (attention, where, poison)
    for name, attention in (("reference", reference_attention), ("flash", flash_attention))
    for where in ("padding", "window")
    for poison in (math.nan, math.inf)
}


@mostly_full(
    "hidden_keys", HIDDEN, [name for name in HIDDEN if name.startswith("ref") or "padding-nan" in name], gpu=True
)
def test_hidden_keys_do_not_leak(hidden_keys: tuple[Callable[..., Any], str, float], device: str) -> None:
    attention, where, poison = hidden_keys
    if where == "padding":
        problem = build(Case(queries=20, keys=70), torch.float16, device)
        hidden = torch.arange(70, device=device) >= 37
        problem = problem.with_options(key_padding_mask=(~hidden).expand(1, 70))
    else:
        problem = build(Case(queries=20, keys=70, window=(3, 0)), torch.float16, device)
        hidden = torch.arange(70, device=device) < 50 - 3
    bad = {n: problem.tensors[n].detach().clone() for n in "kv"}
    for tensor in bad.values():
        tensor[:, hidden] = poison
    poisoned = problem.with_tensors(**{n: t.requires_grad_() for n, t in bad.items()})
    results = run(attention, poisoned)
    assert_equal(results, run(attention, problem))
    assert not results["dk"][:, hidden].any()
    assert not results["dv"][:, hidden].any()


EMPTY_ROWS = {
    f"{name}-{how}": (attention, how)
    for name, attention in (("reference", reference_attention), ("flash", flash_attention))
    for how in ("causal", "window", "padding", "bias")
}


@mostly_full(
    "empty_rows", EMPTY_ROWS, [name for name in EMPTY_ROWS if name.startswith("ref") or "causal" in name], gpu=True
)
def test_rows_without_keys_are_zero(empty_rows: tuple[Callable[..., Any], str], device: str) -> None:
    """And nothing else is: their gradient must not reach the keys either."""
    attention, how = empty_rows
    problem = build(Case(batch=2, queries=40, keys=30), torch.float32, device)
    empty = torch.zeros(2, 40, dtype=torch.bool)
    if how == "causal":
        problem, empty[:, :10] = problem.with_options(causal=True), True
    elif how == "window":
        problem, empty[:, :7] = problem.with_options(window_size=(-1, 3)), True
    elif how == "padding":
        mask = torch.ones(2, 30, dtype=torch.bool)
        mask[1], empty[1] = False, True
        problem = problem.with_options(key_padding_mask=mask.to(device))
    else:
        bias = torch.zeros(1, 1, 40, 30)
        bias[:, :, 7], empty[:, 7] = -math.inf, True
        problem = problem.with_tensors(bias=bias.to(device).requires_grad_())
    results = run(attention, problem)
    empty = empty.to(device)
    assert not results["out"][empty].any()
    assert results["out"][~empty].any(-1).all()
    assert not results["dq"][empty].any()
    assert torch.equal(results["lse"] == -math.inf, empty[:, None].expand(2, 2, 40))
    assert all(tensor.isfinite().all() for name, tensor in results.items() if name != "lse")
    truth = run(reference_attention, problem)
    assert all(torch.allclose(results[name], expected, atol=1e-5) for name, expected in truth.items())


@ON_DEVICES
@BOTH
@pytest.mark.parametrize(
    "case",
    [
        Case(batch=0),
        Case(queries=0),
        Case(keys=0),
        Case(batch=2, lengths=((0, 0), (0, 0))),
        Case(batch=2, lengths=((3, 0), (2, 0))),
        Case(batch=2, lengths=((0, 3), (0, 1))),
        Case(keys=0, reach=2, bias="hqk"),
    ],
    ids=str,
)
def test_nothing_to_do(attention: Callable[..., Any], case: Case, device: str) -> None:
    problem = build(case, torch.float32, device)
    results = run(attention, problem)
    assert results["out"].shape == problem.tensors["q"].shape
    assert (results["lse"] == -math.inf).all()
    for name, tensor in results.items():
        assert name == "lse" or not tensor.any()
