"""Attention that recomputes scores from log-sum-exps: against the definition in fp64, and in 16 bits as unfused.

On a CPU the kernels run in Triton's interpreter; `-m gpu` runs the same tests, and larger ones, on a device.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import attend
from tiers import DEVICES, extra
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from stoker.kernels import reference_attention
from stoker.kernels.attention import recompute_scores, recompute_scores_kernels
from stoker.kernels.attention.backends.unfused import UnfusedAttention
from stoker.kernels.attention.call_spec import AttentionCall
from stoker.kernels.attention.inputs import AttentionInputs
from stoker.kernels.attention.packed_sequences import PackedSequences
from stoker.kernels.attention.recompute_scores import (
    _attention_score_gradient,
    _attention_weights,
    attention_recompute_scores,
    supports,
    supports_call,
)
from stoker.kernels.attention.reference import reference_backend
from stoker.models.layers import recomputed_attention
from stoker.models.layers.recomputed_attention import RecomputedAttention


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels serve the CPU too, in the interpreter, and find NaN where they shall write."""
    room = recompute_scores_kernels._empty_scores
    monkeypatch.setattr(recompute_scores_kernels, "_empty_scores", lambda q, k: room(q, k).fill_(float("nan")))
    monkeypatch.setattr(recompute_scores, "triton_runs_on", lambda _: True)


def made(
    queries: int, keys: int, *, batch: int = 1, heads: int = 2, groups: int = 1, head_dim: int = 16,
    dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> list[Tensor]:  # fmt: skip
    """Queries, keys, values and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, queries, heads, head_dim), *[(batch, keys, groups, head_dim)] * 2]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in (*shapes, shapes[0])]


def results(function: Any, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    *leaves, gradient = (tensor.detach().requires_grad_() for tensor in tensors)
    out = function(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient.detach())]


def backend(function: Any) -> Any:
    """An attention backend with the arguments of `attention_recompute_scores`, and more."""

    def run(query: Tensor, key: Tensor, value: Tensor, *, scale: float, **options: Any) -> Tensor:
        return attend(function, query, key, value, softmax_scale=scale, **options)

    return run


def defined(query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool) -> Tensor:
    out = reference_attention(query, key, value, softmax_scale=scale, causal=causal)
    assert isinstance(out, Tensor)
    return out


def exact(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    return results(defined, [tensor.double() for tensor in tensors], **options)


# ---------------------------------------------------------------- the definition

CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "groups": ({"queries": 40, "keys": 40, "heads": 4, "groups": 2, "batch": 2}, True),
    "fewer queries": ({"queries": 33, "keys": 150, "head_dim": 24}, True),
    "queries that see nothing": ({"queries": 100, "keys": 35, "groups": 2}, True),
    "full": ({"queries": 33, "keys": 70, "heads": 1}, False),
    "whole tiles": ({"queries": 64, "keys": 128, "heads": 1}, True),
    "full, more queries": ({"queries": 70, "keys": 33}, False),
    "one query": ({"queries": 1, "keys": 65}, True),
    "one key": ({"queries": 65, "keys": 1}, True),
    "no key": ({"queries": 3, "keys": 0}, False),
    "no query": ({"queries": 0, "keys": 3}, True),
}
SLOW = ("full, more queries", "whole tiles")


@pytest.mark.parametrize("scale", [0.3, *extra(-0.2)])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in CASES if name not in SLOW or extra(name)])
def test_output_and_gradients_are_those_of_the_definition(name: str, device: str, scale: float) -> None:
    sizes, causal = CASES[name]
    tensors = made(**sizes, device=device)
    found = results(attention_recompute_scores, tensors, scale=scale, causal=causal)
    for ours, truth in zip(found, exact(tensors, scale=scale, causal=causal), strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize(("queries", "keys"), [(257, 257), (2100, 1030), (1030, 2100)])
def test_gpu_long_sequences_in_fp32(queries: int, keys: int, head_dim: int, causal: bool) -> None:
    tensors = made(queries, keys, batch=2, heads=4, groups=2, head_dim=head_dim, device="cuda")
    options: dict[str, Any] = {"scale": head_dim**-0.5, "causal": causal}
    found = results(attention_recompute_scores, tensors, **options)
    for ours, truth in zip(found, exact(tensors, **options), strict=True):
        assert (ours - truth).norm() <= 2e-5 * truth.norm()


def assert_no_worse_than_unfused(tensors: list[Tensor], causal: bool) -> None:
    """Error against fp64 of the same inputs: at most that of `UnfusedAttention`, a single number twice it."""
    options: dict[str, Any] = {"scale": tensors[0].shape[-1] ** -0.5, "causal": causal}
    plain = results(backend(UnfusedAttention()), tensors, **options)
    found = results(attention_recompute_scores, tensors, **options)
    for ours, theirs, truth in zip(found, plain, exact(tensors, **options), strict=True):
        assert ours.dtype == theirs.dtype == tensors[0].dtype
        error, allowed = (ours - truth).abs(), (theirs - truth).abs()
        assert error.norm() <= allowed.norm()
        assert error.max() <= 2 * allowed.max() + torch.finfo(ours.dtype).eps * truth.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, *extra(torch.float16)])
def test_in_16_bits_errors_are_no_larger_than_those_of_unfused(dtype: torch.dtype) -> None:
    assert_no_worse_than_unfused(made(70, 96, head_dim=32, dtype=dtype), causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [*((torch.bfloat16, width) for width in (64, 80, 128, 256)), (torch.float16, 128)]
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(257, 257), (2100, 1030), (1030, 2100), (2048, 2048)])
def test_gpu_in_16_bits_errors_are_no_larger_than_those_of_unfused(
    queries: int, keys: int, head_dim: int, causal: bool, dtype: torch.dtype
) -> None:
    assert_no_worse_than_unfused(
        made(queries, keys, heads=4, groups=2, head_dim=head_dim, dtype=dtype, device="cuda"), causal
    )


@pytest.mark.gpu
def test_gpu_more_than_2_31_numbers_are_all_in_their_places() -> None:
    """9 heads of 16384 x 16384: the last one lies beyond what 32 bits count."""
    query, key, value, gradient = made(16384, 16384, heads=9, dtype=torch.bfloat16, device="cuda")
    _, lse = _attention_weights(query, key, True, 0.25)
    found: list[list[Tensor]] = []
    for heads in (slice(None), slice(8, None)):
        of_query, out, of_lse = query[:, :, heads], gradient[:, :, heads], lse[:, heads].contiguous()
        written = _attention_score_gradient(out, of_query, key, value, out, of_lse, True, 0.25)
        found.append([each[0, -1].clone() for each in written])
    for ours, alone in zip(*found, strict=True):
        assert (ours.float() - alone.float()).norm() <= 1e-3 * alone.float().norm()


# ---------------------------------------------------------------- the kernels


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, *extra(False)])
def test_the_backward_makes_the_bits_of_the_forward_and_hides_what_is_hidden(device: str, causal: bool) -> None:
    queries, keys = (70, 60) if device == "cpu" else (1100, 1000)
    query, key, value, gradient = made(queries, keys, device=device)
    weights, lse = _attention_weights(query, key, causal, 0.3)
    again, score_gradient = _attention_score_gradient(gradient, query, key, value, query, lse, causal, 0.3)
    assert torch.equal(weights, again)
    if causal:
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(keys - queries + 1)
        for written in (weights, score_gradient):
            assert (written[..., hidden] == 0).all()
        assert (weights[..., ~hidden] > 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_strides_and_expanded_gradients_change_nothing(device: str) -> None:
    query, key, value, gradient = made(40, 33, heads=2, batch=2, device=device)
    gradient = gradient[:1, :1].expand_as(gradient)
    plain = results(attention_recompute_scores, [query, key, value, gradient.contiguous()], scale=0.3, causal=True)
    turned = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key)]
    value = torch.cat((value, value), dim=2)[:, :, 1:]
    for ours, theirs in zip(
        results(attention_recompute_scores, [*turned, value, gradient], scale=0.3, causal=True), plain, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_operations_are_well_formed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # what is not written yet may hold anything, but the same in both runs of a check
    query, key, value, gradient = made(5, 6, device=device)
    _, lse = _attention_weights(query, key, True, 0.3)
    torch.library.opcheck(_attention_weights, (query, key, True, 0.3))
    torch.library.opcheck(_attention_score_gradient, (gradient, query, key, value, query, lse, True, 0.3))


def test_flop_count() -> None:
    query, key, value, gradient = (tensor.requires_grad_() for tensor in made(8, 16))
    product = 2 * 2 * 8 * 16 * 16
    with FlopCounterMode(display=False) as counter:
        out = attention_recompute_scores(query, key, value, scale=0.3, causal=True)
    assert counter.get_total_flops() == 3 * product
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(out, (query, key, value), gradient)
    assert counter.get_total_flops() == 5 * product


# ---------------------------------------------------------------- what is kept


@pytest.mark.parametrize("device", DEVICES)
def test_no_number_for_each_query_and_key_is_kept(device: str) -> None:
    query, key, value, _ = (tensor.requires_grad_() for tensor in made(20, 24, device=device))
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = attention_recompute_scores(query, key, value, scale=0.3, causal=True)
        out.flatten(2).square()  # as a projection keeps what it reads
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    inputs = sum(tensor.untyped_storage().nbytes() for tensor in (query, key, value))
    assert sum(storages.values()) == inputs + out.untyped_storage().nbytes() + 2 * 20 * 4  # the log-sum-exps


def test_the_weights_are_gone_before_the_last_two_products(monkeypatch: pytest.MonkeyPatch) -> None:
    refs: list[StorageWeakRef] = []
    gone: list[bool] = []
    operation, stacked = recompute_scores._attention_score_gradient, recompute_scores.stack_heads_by_group

    def watched(*given: Any) -> tuple[Tensor, Tensor]:
        weights, gradient = operation(*given)
        refs.append(StorageWeakRef(weights.untyped_storage()))
        return weights, gradient

    def seen(*given: Any) -> Tensor:
        gc.collect()  # the interpreter leaves what it was given in a cycle
        gone.append(refs[0].expired())
        return stacked(*given)

    query, key, value, gradient = (tensor.requires_grad_() for tensor in made(8, 12))
    out = attention_recompute_scores(query, key, value, scale=0.3, causal=True)
    monkeypatch.setattr(recompute_scores, "_attention_score_gradient", watched)
    monkeypatch.setattr(recompute_scores, "stack_heads_by_group", seen)
    torch.autograd.grad(out, (query, key, value), gradient)
    assert gone == [False, True, True]


@pytest.mark.gpu
def test_gpu_the_peak_is_one_tensor_of_scores_in_the_forward_and_two_in_the_backward() -> None:
    query, key, value, gradient = (
        tensor.requires_grad_() for tensor in made(4096, 4096, heads=8, dtype=torch.bfloat16, device="cuda")
    )
    written = 2 * 8 * 4096 * 4096
    results(attention_recompute_scores, [query, key, value, gradient], scale=0.3, causal=True)  # workspaces
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = attention_recompute_scores(query, key, value, scale=0.3, causal=True)
    assert torch.cuda.memory_allocated() - before < 0.1 * written
    assert torch.cuda.max_memory_allocated() - before < 1.2 * written
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, (query, key, value), gradient)
    assert torch.cuda.max_memory_allocated() - before < 2.2 * written


# ---------------------------------------------------------------- which calls

PLAIN = AttentionCall(
    device="cuda", capability=(9, 0), dtype="bf16", batch=2, heads=2, groups=1, head_dim=16, queries=8, keys=8,
    training=True,
)  # fmt: skip


def option(name: str) -> Any:
    """Something that a call may be given besides."""
    options: dict[str, Any] = {
        "dropout_p": 0.1,
        "bias": torch.zeros(2, 8, 8),
        "distance_bias": torch.zeros(2, 5),
        "alibi_slopes": torch.ones(2),
        "sinks": torch.ones(2),
        "attention_chunk": 5,
        "window_size": (4, 0),
        "softcap": 2.0,
        "packed": PackedSequences.from_documents(torch.arange(8).expand(2, 8) // 5, dtype=torch.float32, causal=True),
        "key_padding_mask": torch.ones(2, 8, dtype=torch.bool),
    }
    return options[name]


FACTS: dict[str, dict[str, Any]] = {
    "dropout_p": {"dropout": 0.1},
    "bias": {"bias": "dense"},
    "distance_bias": {"bias": "distance"},
    "alibi_slopes": {"bias": "slopes"},
    "sinks": {"sinks": True},
    "attention_chunk": {"attention_chunk": 5},
    "window_size": {"window": (4, 0)},
    "softcap": {"softcap": 2.0},
    "packed": {"packed": True},
    "key_padding_mask": {"padding": True},
}


@pytest.mark.parametrize("name", FACTS)
def test_calls_with_options_go_on_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputed_attention, "attention_recompute_scores", None)
    query, key, value, gradient = made(8, 8, batch=2)
    assert not supports(AttentionInputs(query, key, value, causal=True, softmax_scale=0.3, **{name: option(name)}))
    assert not supports_call(replace(PLAIN, **FACTS[name]))
    if name == "dropout_p":  # drawn anew in each call
        return
    options: dict[str, Any] = {"scale": 0.3, "causal": name != "key_padding_mask", name: option(name)}
    tensors = [query, key, value, gradient]
    found = results(backend(RecomputedAttention(UnfusedAttention(), uses_rng=False)), tensors, **options)
    for ours, truth in zip(found, results(backend(reference_backend), tensors, **options), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)


def of_width(width: int) -> AttentionInputs:
    tensor = torch.zeros(1, 2, 1, width)
    return AttentionInputs(tensor, tensor, tensor)


@pytest.mark.parametrize("width", [8, 20, 264])
def test_widths_of_heads_that_the_kernels_do_not_take(width: int) -> None:
    assert not supports(of_width(width))
    assert not supports_call(replace(PLAIN, head_dim=width))
    assert supports(of_width(24))
    assert supports_call(replace(PLAIN, head_dim=24))


def test_without_triton_there_is_nothing_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not supports(of_width(16))
    assert not supports_call(replace(PLAIN, device="cpu", capability=None))
    assert not supports_call(replace(PLAIN, dtype="fp64"))


def test_bad_arguments_are_named() -> None:
    query, key, value, _ = made(3, 4)
    with pytest.raises(ValueError, match="`v`"):
        attention_recompute_scores(query, key, value[:, 1:], scale=1.0, causal=True)
    with pytest.raises(ValueError, match="softmax_scale"):
        attention_recompute_scores(query, key, value, scale=float("nan"), causal=True)


# ---------------------------------------------------------------- recomputation


@pytest.mark.parametrize("function", ["as written", *extra("compiled")])
def test_recomputed_unfused_attention_takes_it(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []

    def seen(*tensors: Tensor, **options: Any) -> Tensor:
        taken.append(True)
        return attention_recompute_scores(*tensors, **options)

    monkeypatch.setattr(recomputed_attention, "attention_recompute_scores", seen)
    again = backend(RecomputedAttention(UnfusedAttention(), uses_rng=False))
    tensors = made(8, 12)
    truth = exact(tensors, scale=0.3, causal=True)
    if function == "compiled":
        torch.compiler.reset()
        monkeypatch.setattr(recomputed_attention, "attention_recompute_scores", attention_recompute_scores)
        again = torch.compile(again, fullgraph=True, backend="aot_eager")
        monkeypatch.setattr(UnfusedAttention, "weights", None)
        taken.append(True)
    for ours, wanted in zip(results(again, tensors, scale=0.3, causal=True), truth, strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-5)
    assert taken == [True]


def test_who_wants_plain_softmax_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputed_attention, "attention_recompute_scores", None)
    again = RecomputedAttention(UnfusedAttention(masked_softmax_fusion=False), uses_rng=False)
    results(backend(again), made(8, 12), scale=0.3, causal=True)
    with torch.no_grad():
        monkeypatch.setattr(UnfusedAttention, "__call__", lambda *_, **__: "plain")
        assert attend(RecomputedAttention(UnfusedAttention(), uses_rng=False), *made(8, 12)[:3], causal=True) == "plain"


def test_under_autocast_it_computes_in_its_dtype() -> None:
    tensors = made(8, 12)
    with torch.autocast("cpu", torch.bfloat16):
        out, *gradients = results(
            lambda *given: attention_recompute_scores(*given, scale=0.3, causal=True).float(), tensors
        )
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    wanted, *others = exact([tensor.bfloat16() for tensor in tensors], scale=0.3, causal=True)
    for ours, truth in zip((out, *gradients), (wanted, *others), strict=True):
        assert (ours - truth).norm() <= 0.02 * truth.norm()
