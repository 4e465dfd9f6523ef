"""Every backend computes what the reference computes, forward and backward, and PyTorch agrees with the table."""

from __future__ import annotations

import dataclasses
import os
import random
import sys
import warnings
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, get_args

import pytest
import torch
from attention_cases import attend, told
from tiers import cases, extra, full_only, looped
from torch import Tensor

from stoker.kernels.attention import installed_software
from stoker.kernels.attention.backend_support import BACKENDS, BACKENDS_BY_NAME, BackendName
from stoker.kernels.attention.backends import transformer_engine, unfused
from stoker.kernels.attention.backends.registry import ATTENTION_FUNCTIONS, get_attention_function
from stoker.kernels.attention.backends.unfused import UnfusedAttention
from stoker.kernels.attention.call_spec import AttentionCall
from stoker.kernels.attention.dispatch import BackendSelection
from stoker.kernels.attention.installed_software import detect_installed_software
from stoker.kernels.attention.packed_sequences import PackedSequences, unpadded_cu_seqlens
from stoker.kernels.attention.reference import reference_attention, reference_backend, visibility_mask
from stoker.kernels.launch import INTERPRETED

ON_CPU = ("sdpa_flash", "sdpa_math", "unfused")
TORCH_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def inputs(
    *,
    queries: int = 9,
    keys: int = 9,
    heads: int = 6,
    groups: int = 2,
    dim: int = 5,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Query, key and value."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, queries, heads, dim), (2, keys, groups, dim), (2, keys, groups, dim))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def run(name: str, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Output and gradients of a fixed random projection of it."""
    output = attend(ATTENTION_FUNCTIONS[name], *tensors[:3], **({"softmax_scale": 0.4, "causal": True} | options))
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


@looped(("queries", "keys"), [(4, 4), (2, 5), (5, 2), (1, 3)])
@looped(("causal", "window"), [(True, None), (False, None), (True, (1, 0)), (False, (0, 1))])
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
    assert torch.equal(visibility_mask(queries, keys, causal=causal, window=window, device=device), visible)
    options = {"softmax_scale": 0.7, "causal": causal, "window_size": window, "bias": bias}
    for name in ("reference", "unfused"):
        output = attend(ATTENTION_FUNCTIONS[name], query, key, value, **options)
        expected = by_hand(query, key, value, scale=0.7, visible=visible, bias=bias)
        assert (output - expected).abs().max() < 1e-14


@looped("name", ON_CPU)
@looped("groups", [1, 2, 6])
@looped("causal", [True, False])
def test_backends_equal_the_reference(name: str, groups: int, causal: bool) -> None:
    tensors = inputs(groups=groups)
    assert_same(run(name, tensors, causal=causal), run("reference", tensors, causal=causal), 1e-13)


@looped("name", ON_CPU)
@looped("causal", [True, False])
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
    output = attend(ATTENTION_FUNCTIONS[name], query, key, value, softmax_scale=1.0, causal=False, dropout_p=0.25)
    weights = output[..., 0] * 64 * 0.75  # kept weights of each row
    assert weights.std() > 1
    assert abs(weights.mean() - 48) < 1
    again = attend(ATTENTION_FUNCTIONS[name], query, key, value, softmax_scale=1.0, causal=False)
    assert torch.allclose(again, torch.ones_like(again))


def test_unfused_does_not_trust_beta_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPS adds 0 times the first argument of baddbmm (pytorch #187521): what it holds must be finite."""

    def baddbmm_of_mps(start: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float) -> Tensor:
        return beta * start + alpha * torch.bmm(left, right)

    query, key, value = (torch.randn(1, 4, 2, 8) for _ in range(3))
    expected = attend(ATTENTION_FUNCTIONS["unfused"], query, key, value, softmax_scale=0.3, causal=True)
    monkeypatch.setattr(torch, "baddbmm", baddbmm_of_mps)
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
    try:
        context = attend(ATTENTION_FUNCTIONS["unfused"], query, key, value, softmax_scale=0.3, causal=True)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(context, expected)


def test_sdpa_refuses_what_it_would_get_wrong() -> None:
    query, key, value = inputs(queries=2, keys=5)
    with pytest.raises(ValueError, match="use `unfused`"):
        attend(ATTENTION_FUNCTIONS["sdpa_math"], query, key, value, softmax_scale=1.0, causal=True)
    with pytest.raises(ValueError, match="not supported by SDPA"):
        attend(ATTENTION_FUNCTIONS["sdpa_math"], query, key, value, softmax_scale=1.0, causal=False, window_size=(1, 0))


@looped("name", ["sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math"])
@looped("dropout", [0.0, 0.25])
@looped("bias", ["none", "dense", "dense_with_gradient"])
@looped("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_pytorch_agrees_with_the_table_on_cpu(name: str, dropout: float, bias: Any, dtype: Any) -> None:
    """A forced backend runs where its row says so, and nowhere else."""
    call = AttentionCall(
        device="cpu", dtype=dtype, batch=2, heads=6, groups=2, head_dim=5, queries=9, keys=9, bias=bias,
        dropout=dropout, training=True,
    )  # fmt: skip
    (row,) = (backend for backend in BACKENDS if backend.name == name)
    torch_dtype = TORCH_DTYPES[dtype]
    tensors = inputs(dtype=torch_dtype)
    options: dict[str, Any] = {"dropout_p": dropout}
    if bias != "none":
        options["bias"] = torch.zeros(1, 6, 9, 9, dtype=torch_dtype)
    if bias == "dense_with_gradient":
        tensors.append(options["bias"].requires_grad_())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own reasons, before it raises
        if row.why_not(call, detect_installed_software()) is None:
            assert all(tensor.isfinite().all() for tensor in run(name, tensors, **options))
        else:
            with pytest.raises(RuntimeError, match=r"No (available kernel|viable backend)"):
                run(name, tensors, **options)


@full_only
@pytest.mark.parametrize("name", [*ON_CPU, "reference"])
def test_one_graph(name: str) -> None:
    tensors = inputs(dtype=torch.float32)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(ATTENTION_FUNCTIONS[name], query, key, value, softmax_scale=0.4, causal=True)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.allclose(
        compiled(*tensors), attend(reference_backend, *tensors, softmax_scale=0.4, causal=True), atol=1e-6
    )


# ---------------------------------------------------------------- every option

DOCUMENTS = torch.tensor([[0] * 7 + [1] * 2 + [2] * 11, [0] * 20], dtype=torch.int32)
PADDING = torch.arange(20) < torch.tensor([[13], [20]])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"causal": False},
    "window": {"window_size": (4, 1), "causal": False},
    "softcap": {"softcap": 2.0},
    "dense": {"bias": "dense"},
    "distance": {"distance_bias": "distance", "causal": False},
    "both biases": {"bias": "dense", "distance_bias": "distance"},
    "slopes": {"alibi_slopes": "slopes"},
    "slopes with gradient": {"alibi_slopes": "slopes_with_gradient", "causal": False},
    "packed": {"packed": True},
    "packed window": {"packed": True, "window_size": (3, 0)},
    "packed distance": {"packed": True, "distance_bias": "distance"},
    "packed slopes": {"packed": True, "alibi_slopes": "slopes"},
    "padding": {"key_padding_mask": PADDING, "causal": False},
    "padding in front": {"key_padding_mask": ~PADDING | (torch.arange(20) == 19), "causal": True},
    "padding slopes": {"key_padding_mask": PADDING, "causal": False, "alibi_slopes": "slopes_with_gradient"},
    "every bias": {"bias": "dense", "distance_bias": "distance", "alibi_slopes": "slopes_with_gradient"},
    "sinks": {"sinks": True},
    "sinks packed": {"sinks": True, "packed": True, "window_size": (3, 0)},
    "sinks distance": {"sinks": True, "distance_bias": "distance", "key_padding_mask": PADDING, "causal": False},
}
OPTIONS["values"] = {"value_dim": 24}
OPTIONS["values packed"] = {"value_dim": 24, "packed": True, "causal": False}
OPTIONS["chunks"] = {"attention_chunk": 6}
OPTIONS["chunks packed"] = {"attention_chunk": 4, "packed": True, "window_size": (2, 0)}
OPTIONS["chunks padding"] = {"attention_chunk": 6, "key_padding_mask": PADDING}
OF_FEW = {option for option, words in OPTIONS.items() if {"sinks", "attention_chunk"} & words.keys()}
"""Options that only this package's own kernels and compositions support."""
TAKEN = {
    "triton": set(OPTIONS),
    "triton_atomic": set(OPTIONS),  # on other devices than Hopper the same kernels
    "unfused": set(OPTIONS),
    "sdpa_math": set(OPTIONS) - {"window", "softcap", "packed window"} - OF_FEW,
    "lse_first": {"plain", "full"},
    "te_flash": {"plain", "full", "window", "packed", "packed window"},
    "te_fused": {option for option in OPTIONS if option.split()[0] not in ("softcap", "padding", "values")}
    - OF_FEW
    - {"packed distance", "packed slopes"},
    "te_unfused": {option for option in OPTIONS if option.split()[0] not in ("softcap", "padding", "values")} - OF_FEW,
    "flash_attn": {"plain", "full", "window", "softcap", "packed", "packed window", "slopes", "packed slopes"},
}


def with_options(words: dict[str, Any], tensors: list[Tensor]) -> dict[str, Any]:
    """Arguments of a backend; biases, slopes and sinks that want a gradient are added to `tensors`."""
    options: dict[str, Any] = {"causal": True, "softmax_scale": 0.3} | words
    if width := options.pop("value_dim", None):
        tensors[2] = tensors[2].detach().repeat(1, 1, 1, 2)[..., :width].requires_grad_()
    generator = torch.Generator().manual_seed(3)
    for name, shape in (("bias", (1, 4, 20, 20)), ("distance_bias", (4, 9))):
        if name in options:
            tensors.append(torch.randn(shape, generator=generator).requires_grad_())
            options[name] = tensors[-1]
    if "alibi_slopes" in options:
        slopes = torch.rand(4, generator=generator)
        if options["alibi_slopes"] == "slopes_with_gradient":
            tensors.append(slopes.requires_grad_())
        options["alibi_slopes"] = slopes
    if "sinks" in options:
        tensors.append(torch.randn(4, generator=generator).requires_grad_())
        options["sinks"] = tensors[-1]
    if "packed" in options:
        options["packed"] = PackedSequences.from_documents(DOCUMENTS, dtype=torch.float32, causal=options["causal"])
    return options


@pytest.mark.parametrize(("name", "option"), cases(((name, option) for name in TAKEN for option in OPTIONS), fast=20))
def test_every_option_of_every_backend(name: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call a backend takes gives the reference's output and gradients; any other is an error."""
    pretend_extras(monkeypatch)
    if name.startswith("triton") and not INTERPRETED:
        pytest.skip("on a CPU Triton needs its interpreter")
    tensors = inputs(queries=20, keys=20, heads=4, dim=16, dtype=torch.float32)
    options = with_options(OPTIONS[option], tensors)
    if option not in TAKEN[name]:
        with pytest.raises(ValueError, match=r"must (be None|be 0|not be given|have the head width)"):
            attend(ATTENTION_FUNCTIONS[name], *tensors[:3], **options)
        return
    assert_same(run(name, tensors, **options), run("reference", tensors, **options), 2e-5)


@pytest.mark.parametrize("name", ["unfused", "reference", *(["triton"] if INTERPRETED else [])])
def test_chunks_of_packed_documents_begin_with_them(name: str) -> None:
    """Each document alone gives the same, although a chunk of the row would begin elsewhere."""
    query, key, value = inputs(queries=20, keys=20, heads=4, dim=16, dtype=torch.float32)
    documents = PackedSequences.from_documents(DOCUMENTS, dtype=torch.float32, causal=True)
    options: dict[str, Any] = {"causal": True, "attention_chunk": 4}
    packed = attend(ATTENTION_FUNCTIONS[name], query, key, value, packed=documents, **options)
    for begin, end in ((0, 7), (7, 9), (9, 20)):
        alone = (tensor[:1, begin:end] for tensor in (query, key, value))
        expected = attend(ATTENTION_FUNCTIONS["reference"], *alone, **options)
        torch.testing.assert_close(packed[:1, begin:end], expected, rtol=1e-5, atol=1e-5)


def test_rows_hidden_by_padding_give_zero() -> None:
    """In front of a text, under a causal mask, there are queries that see nothing."""
    hidden = torch.arange(20).expand(2, 20) >= 5
    names = ["unfused", "sdpa_math", "reference", *(["triton"] if INTERPRETED else [])]
    for name in names:
        tensors = inputs(queries=20, keys=20, dim=16, dtype=torch.float32)
        output, *gradients = run(name, tensors, key_padding_mask=hidden)
        assert not output[:, :5].any()
        assert output[:, 5:].all()
        assert not any(gradient[:, :5].any() for gradient in gradients)
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.skipif(not INTERPRETED, reason="on a CPU Triton needs its interpreter")
@pytest.mark.parametrize("packed", [*extra(False), True])
def test_dropout_of_triton_comes_from_torchs_generator(packed: bool) -> None:
    """The same state gives the same mask, so recomputation does; about the right part of the weights is dropped."""
    query, key = (torch.zeros(2, 20, heads, 16) for heads in (6, 2))
    value, seen = torch.ones(2, 20, 2, 16), []
    documents = PackedSequences.from_documents(DOCUMENTS, dtype=torch.float32, causal=False) if packed else None
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seen.append(
            attend(
                ATTENTION_FUNCTIONS["triton"],
                query,
                key,
                value,
                softmax_scale=1.0,
                causal=False,
                dropout_p=0.25,
                packed=documents,
            )
        )
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    assert abs(seen[0].mean() - 1) < 0.1
    assert seen[0].std() > 0.05


# ---------------------------------------------------------------- packages that are not installed here


class PretendedAttention:
    """TransformerEngine's DotProductAttention in plain torch, as far as the adapter uses it."""

    state: ClassVar[dict[str, Any]] = {"backend_selection_requires_update": False}
    calls: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, heads: int, head_dim: int, *, num_gqa_groups: int, attention_dropout: float, qkv_format: str,
                 softmax_scale: float) -> None:  # fmt: skip
        assert qkv_format == "bshd"
        self.scale, self.shape = softmax_scale, (heads, num_gqa_groups, head_dim)
        self.deterministic = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"

    def train(self, mode: bool) -> None:
        self.training = mode

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        on = {family: os.environ[f"NVTE_{family.upper()}_ATTN"] == "1" for family in ("flash", "fused", "unfused")}
        assert self.state["backend_selection_requires_update"]
        self.state.update({f"use_{family}_attention": there for family, there in on.items()})
        self.calls.append({**options, "deterministic": self.deterministic, "training": self.training})
        assert (query.shape[-2], key.shape[-2], query.shape[-1]) == self.shape
        kind, bias = options["attn_mask_type"], options.get("core_attention_bias")
        left, right = options["window_size"]  # what 2.20 asks of it without a warning
        assert right == 0 if "causal" in kind else (left < 0) == (right < 0)
        assert (bias is not None) == (options.get("core_attention_bias_type") == "post_scale_bias")
        if bias is not None:
            assert bias.shape[-2:] == (query.shape[1], key.shape[1])
        if kind == "arbitrary":
            hidden = torch.zeros(()).masked_fill(options["attention_mask"], float("-inf"))
            bias = hidden if bias is None else bias + hidden
        result = reference_attention(
            query, key, value, causal="causal" in kind, window_size=(left, right),
            softmax_scale=self.scale, bias=bias, cu_seqlens_q=options.get("cu_seqlens_q"),
            cu_seqlens_k=options.get("cu_seqlens_kv"), max_seqlen_q=options.get("max_seqlen_q"),
            max_seqlen_k=options.get("max_seqlen_kv"),
        )  # fmt: skip
        assert isinstance(result, Tensor)
        return result.flatten(-2)


def pretended_flash_attn(query: Tensor, key: Tensor, value: Tensor, *lengths: Any, **options: Any) -> Tensor:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    result = reference_attention(query, key, value, **dict(zip(names, lengths, strict=False)), **options)
    assert isinstance(result, Tensor)
    return result


def pretend_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put stand-ins where TransformerEngine and flash-attn are imported from."""
    transformer_engine._module.cache_clear()
    PretendedAttention.calls.clear()
    packages = {
        "transformer_engine": SimpleNamespace(),
        "transformer_engine.pytorch": SimpleNamespace(DotProductAttention=PretendedAttention),
        transformer_engine._MODULE: SimpleNamespace(_attention_backends=PretendedAttention.state),
        "flash_attn": SimpleNamespace(
            flash_attn_func=pretended_flash_attn, flash_attn_varlen_func=pretended_flash_attn
        ),
    }
    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name, package)


def test_transformer_engine_is_held_to_one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables are set in a scope, its memory of an earlier choice is not trusted, and what ran is looked at."""
    pretend_extras(monkeypatch)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)
    query, key, value = (tensor.float() for tensor in inputs(dim=16))
    with torch.no_grad():
        attend(ATTENTION_FUNCTIONS["te_flash"], query, key, value, softmax_scale=0.3, causal=True)
    assert PretendedAttention.state["use_flash_attention"]
    assert os.environ["NVTE_FLASH_ATTN"] == "0"
    assert "NVTE_FUSED_ATTN" not in os.environ
    assert not PretendedAttention.calls[-1]["training"]
    attend(
        transformer_engine.TEAttention("fused", deterministic=True), query, key, value, softmax_scale=0.3, causal=True
    )
    assert PretendedAttention.calls[-1]["deterministic"]
    assert PretendedAttention.calls[-1]["training"]
    attend(transformer_engine.te_fused, query, key, value, softmax_scale=0.3, causal=True)
    assert not PretendedAttention.calls[-1]["deterministic"]
    attend(transformer_engine.te_fused, query[:, :4], key, value, softmax_scale=0.3, causal=True)
    assert PretendedAttention.calls[-1]["attn_mask_type"] == "causal_bottom_right"
    windows = {
        (None, True): (-1, 0), (None, False): (-1, -1), ((4, 2), True): (4, 0), ((4, 2), False): (4, 2),
        ((-1, 2), False): (9, 2), ((4, -1), False): (4, 9), ((4, -1), True): (4, 0),
    }  # fmt: skip
    for (window, causal), expected in windows.items():  # it knows none that is open on one side, nor takes None well
        attend(transformer_engine.te_fused, query, key, value, softmax_scale=0.3, causal=causal, window_size=window)
        assert PretendedAttention.calls[-1]["window_size"] == expected

    def elsewhere(self: PretendedAttention, *tensors: Tensor, **options: Any) -> Tensor:
        self.state.update(use_flash_attention=False, use_fused_attention=False, use_unfused_attention=True)
        return tensors[0].flatten(-2)

    monkeypatch.setattr(PretendedAttention, "__call__", elsewhere)
    with pytest.raises(RuntimeError, match=r"restricted to fused attention but used \['unfused'\]"):
        attend(transformer_engine.te_fused, query, key, value, softmax_scale=0.3, causal=True)

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise ValueError("No dot product attention backend is available")

    monkeypatch.setattr(PretendedAttention, "__call__", refuse)
    with pytest.raises(RuntimeError, match=r"does not support this call in te_fused: No dot.*NVTE_DEBUG_LEVEL=2"):
        attend(transformer_engine.te_fused, query, key, value, softmax_scale=0.3, causal=True)
    assert os.environ["NVTE_FLASH_ATTN"] == "0"


@pytest.mark.parametrize("name", ["te_fused", *extra("te_flash", "te_unfused", "flash_attn")])
def test_a_graph_breaks_around_what_cannot_be_traced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a layer with such a backend is compiled around it, and none that is one graph takes it in."""
    pretend_extras(monkeypatch)
    tensors = [tensor.detach().float() for tensor in inputs(dim=16)]

    def doubled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return 2 * attend(ATTENTION_FUNCTIONS[name], 2 * query, key, value, softmax_scale=0.3, causal=True)

    torch.compiler.reset()
    around = torch.compile(doubled, backend="eager")
    assert torch.allclose(around(*tensors), doubled(*tensors))
    assert not BACKENDS_BY_NAME[name].supports_compile
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"torch\.compiler\.disable"):
        torch.compile(doubled, backend="eager", fullgraph=True)(*tensors)
    torch.compiler.reset()


def test_documents_are_counted_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_extras(monkeypatch)
    packed = PackedSequences.from_documents(DOCUMENTS, dtype=torch.float32, causal=True, with_mask=False)
    first = unpadded_cu_seqlens(packed)
    assert first.tolist() == [0, 7, 9, 20, 40]
    assert unpadded_cu_seqlens(packed) is first
    other = PackedSequences.from_documents(DOCUMENTS.flip(0), dtype=torch.float32, causal=True, with_mask=False)
    assert unpadded_cu_seqlens(other).tolist() == [0, 20, 27, 29, 40]
    tensors = [tensor.float() for tensor in inputs(queries=20, keys=20, dim=16)]
    with pytest.raises(ValueError, match="must hold a mask"):
        attend(ATTENTION_FUNCTIONS["unfused"], *tensors, softmax_scale=0.3, causal=True, packed=packed)


def test_functions_follow_call_and_flags() -> None:
    assert {*ATTENTION_FUNCTIONS} == {backend.name for backend in BACKENDS} == set(get_args(BackendName))
    # every other backend is covered by `test_every_option_of_every_backend`
    assert {*ATTENTION_FUNCTIONS} - {*TAKEN} == {"reference", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn"}

    def made(backend: str, fusion: bool = True) -> Any:
        call = AttentionCall(
            device="cpu", dtype="fp32", batch=1, heads=1, groups=1, head_dim=16, queries=8, keys=8, deterministic=True
        )
        return get_attention_function(BackendSelection(call, backend, ()), masked_softmax_fusion=fusion)

    assert (made("te_fused").deterministic, made("te_fused").family) == (True, "fused")
    assert made("flash_attn").deterministic
    assert [made("unfused", fusion).masked_softmax_fusion for fusion in (True, False)] == [True, False]
    assert made("triton") is ATTENTION_FUNCTIONS["triton"]


@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("option", ["plain", "full", "window", "packed", "padding in front"])
def test_the_fused_softmax_is_the_softmax(fusion: bool, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU `unfused` takes the kernel; here its plain form, to see that it is given the right masks."""
    taken: list[bool] = []
    real = unfused.scaled_masked_softmax
    monkeypatch.setattr(unfused, "triton_runs_on", lambda _: True)
    monkeypatch.setattr(unfused, "scaled_masked_softmax", lambda *a, **b: taken.append(True) or real(*a, **b))
    tensors = inputs(queries=20, keys=20, dim=16)
    options = with_options(OPTIONS[option], tensors)
    output = attend(UnfusedAttention(masked_softmax_fusion=fusion), *tensors[:3], **options)
    gradients = torch.autograd.grad(output.sum(), tensors)
    expected = attend(ATTENTION_FUNCTIONS["reference"], *tensors[:3], **options)
    assert_same([output, *gradients], [expected, *torch.autograd.grad(expected.sum(), tensors)], 1e-12)
    assert bool(taken) is fusion


def test_versions_come_without_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {
        "triton": "3.6.0+git1",
        "transformer-engine": "2.20.2",
        "flash-attn": "2.8.3.post1",
        "flash-attn-4": "4",
    }

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    installed_software._version.cache_clear()
    found = detect_installed_software()
    assert (found.triton, found.te, found.flash_attn) == ((3, 6), (2, 20), (2, 8, 3))
    assert (found.flash_attn_3, found.flash_attn_4, found.te_problem) == (False, True, "")
    installed_software._te_problem.cache_clear()
    broken = detect_installed_software("cuda").te_problem  # it is not here at all, which its metadata denies
    assert broken.startswith("transformer_engine is installed but cannot be imported: ModuleNotFoundError")
    installed_software._te_problem.cache_clear()
    installed_software._version.cache_clear()


def test_transformer_engine_gets_the_cudnn_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of its parts, while it is imported, where the caller has not said where cuDNN is."""
    for name in ("CUDNN_HOME", "CUDNN_PATH"):
        monkeypatch.delenv(name, raising=False)
    wheel = tmp_path / "nvidia" / "cudnn"
    package = tmp_path / "transformer_engine"
    for folder in (wheel / "lib", package):
        folder.mkdir(parents=True)
    for part in ("libcudnn.so.9", "libcudnn_graph.so.9", "cudnn.h"):
        (wheel / "lib" / part).touch()
    loaded: list[str] = []
    monkeypatch.setattr(transformer_engine.ctypes, "CDLL", lambda path, mode: loaded.append(Path(path).name))
    (package / "__init__.py").touch()
    (package / "pytorch.py").write_text("import os\nSEEN = os.environ.get('CUDNN_PATH')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("nvidia", "nvidia.cudnn", "transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, module, None)  # so that what is imported here is removed again
        del sys.modules[module]
    assert str(wheel) == transformer_engine.import_transformer_engine().SEEN
    assert loaded == ["libcudnn.so.9", "libcudnn_graph.so.9"]
    assert "CUDNN_PATH" not in os.environ
    monkeypatch.setenv("CUDNN_HOME", "elsewhere")
    assert transformer_engine.torch_cudnn_dir() is None


# ---------------------------------------------------------------- on a GPU


def gpu_call(**changes: Any) -> AttentionCall:
    facts: dict[str, Any] = {
        "device": "cuda", "capability": torch.cuda.get_device_capability(), "dtype": "bf16", "batch": 2, "heads": 8,
        "groups": 2, "head_dim": 64, "queries": 256, "keys": 256, "training": True,
    }  # fmt: skip
    return AttentionCall(**facts | changes)


def skip_unless_it_runs(name: str, call: AttentionCall) -> None:
    """A backend that the table refuses here is skipped, in the table's words."""
    if (reason := BACKENDS_BY_NAME[name].why_not(call, detect_installed_software("cuda"))) is not None:
        pytest.skip(f"{name}: {reason}")


def values_of(head_dim: int) -> int:
    """Width of value heads beside keys: MLA's with 192."""
    return 128 if head_dim == 192 else head_dim // 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", [backend.name for backend in BACKENDS if backend.name != "reference"])
@pytest.mark.parametrize(("groups", "head_dim"), [(1, 64), (2, 64), (8, 64), (2, 128), (8, 192), (2, 256)])
@pytest.mark.parametrize("option", list(OPTIONS))
def test_gpu_backends_equal_the_reference(name: str, groups: int, head_dim: int, option: str) -> None:
    """Output and gradients in bf16 against the definition in fp64, for every option the table accepts on this card."""
    words, tokens, heads = OPTIONS[option], 256, 8
    bias = {"bias": "dense_with_gradient", "distance_bias": "distance_with_gradient"}
    given = [bias.get(word, words[word]) for word in words if word in (*bias, "alibi_slopes")]
    if len(given) > 1:
        pytest.skip("no call has two biases")
    call = gpu_call(
        groups=groups, head_dim=head_dim, bias=given[0] if given else "none", causal=words.get("causal", True),
        window=words.get("window_size"), softcap=words.get("softcap", 0.0), packed="packed" in words,
        padding="key_padding_mask" in words, sinks="sinks" in words,
        attention_chunk=words.get("attention_chunk", 0),
        value_dim=values_of(head_dim) if "value_dim" in words else None,
    )  # fmt: skip
    skip_unless_it_runs(name, call)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, tokens, heads, head_dim), (2, tokens, groups, head_dim)]
    shapes += [(2, tokens, groups, call.value_dim or head_dim)]
    shapes += [(1, heads, tokens, tokens)] if "bias" in words else []
    shapes += [(heads, 65)] if "distance_bias" in words else []
    shapes += [(heads,)] if "alibi_slopes" in words else []
    drawn = [torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for shape in shapes]
    if "alibi_slopes" in words:
        drawn[-1] = drawn[-1].abs() / 8
    documents = (torch.rand(2, tokens, generator=generator) < 0.03).int().cumsum(1, dtype=torch.int32).to("cuda")
    seen = (torch.arange(tokens) < torch.tensor([[200], [tokens]])).to("cuda")
    upstream = torch.randn(2, tokens, heads, call.value_dim or head_dim, generator=generator).to("cuda")
    results: list[list[Tensor]] = []
    for function, dtype in (("reference", torch.float64), (name, torch.bfloat16)):
        tensors = [tensor.to(dtype, copy=True).requires_grad_() for tensor in drawn]
        options: dict[str, Any] = {"causal": True, "softmax_scale": head_dim**-0.5} | words
        options.pop("value_dim", None)
        if "bias" in words:
            options["bias"] = tensors[3]
        for word in ("distance_bias", "alibi_slopes"):
            if word in words:
                tensors[3] = drawn[3].to(torch.promote_types(dtype, torch.float32)).requires_grad_()
                options[word] = tensors[3]
        if words.get("alibi_slopes") == "slopes":
            tensors.pop().requires_grad_(False)
        if "sinks" in words:
            tensors.append(torch.linspace(-2, 2, heads, device="cuda", dtype=torch.promote_types(dtype, torch.float32)))
            options["sinks"] = tensors[-1].requires_grad_()
        if "packed" in words:
            options["packed"] = PackedSequences.from_documents(documents, dtype=dtype, causal=options["causal"])
        if "key_padding_mask" in words:
            options["key_padding_mask"] = seen
        output = attend(ATTENTION_FUNCTIONS[function], *tensors[:3], **options)
        results.append([output, *torch.autograd.grad(output, tensors, upstream.to(output.dtype))])
    for expected, ours in zip(*results, strict=True):
        assert (ours - expected).abs().max() < 0.03 * expected.abs().max()


def random_gpu_call(draw: random.Random) -> AttentionCall:
    """Any call, with odd lengths and widths; most backends refuse it."""
    call = _random_gpu_call(draw)
    return call if call.causal else dataclasses.replace(call, attention_chunk=0)


def _random_gpu_call(draw: random.Random) -> AttentionCall:
    queries = draw.choice((2, 17, 64, 100, 128, 256, 300))
    keys = queries if draw.random() < 0.7 else draw.choice((2, 33, 128, 200, 384))
    groups = draw.choice((1, 2, 4))
    packed = queries == keys and draw.random() < 0.2
    bias = draw.choice(("none", "none", "dense", "dense_with_gradient", "distance", "distance_with_gradient", "slopes"))
    return gpu_call(
        dtype=draw.choice(("bf16", "bf16", "fp16", "fp32")), batch=draw.choice((1, 2, 3)), groups=groups,
        heads=groups * draw.choice((1, 2, 3)), head_dim=draw.choice((16, 40, 64, 64, 80, 96, 128, 128, 160, 192, 256)),
        queries=queries, keys=keys, causal=draw.random() < 0.6, packed=packed, bias=bias,
        window=draw.choice((None, None, None, (40, 0), (9, 20), (-1, 5), (30, -1))),
        padding=not packed and draw.random() < 0.15, softcap=draw.choice((0.0, 0.0, 0.0, 5.0)),
        dropout=draw.choice((0.0, 0.0, 0.0, 0.125)), deterministic=draw.random() < 0.2, sinks=draw.random() < 0.15,
        value_dim=draw.choice((None, None, None, 64, 128)), attention_chunk=draw.choice((0, 0, 0, 70)),
    )  # fmt: skip


def drawn_arguments(call: AttentionCall, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    """Query, key, value and a bias that is trained, all with gradients, and the other arguments, on the GPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(call.batch, call.queries, call.heads, call.head_dim)]
    shapes += [
        (call.batch, call.keys, call.groups, width) for width in (call.head_dim, call.value_dim or call.head_dim)
    ]
    biases = {"dense": (1, call.heads, call.queries, call.keys), "distance": (call.heads, 2 * 20 + 1),
              "slopes": (call.heads,)}  # fmt: skip
    shapes += [shape for name, shape in biases.items() if call.bias.startswith(name)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    if call.bias_is_alibi:
        tensors[3] = tensors[3].abs() / 8
    rounded = [tensor.to(TORCH_DTYPES[call.dtype]) for tensor in tensors]
    if call.bias_is_relative:
        rounded[3] = tensors[3].float()
    wide = dtype == torch.float64
    tensors = [tensor.to("cuda", torch.float64 if wide else tensor.dtype).requires_grad_() for tensor in rounded]
    options: dict[str, Any] = {"causal": call.causal, "window_size": call.window, "softcap": call.softcap,
                               "softmax_scale": call.head_dim**-0.5, "dropout_p": call.dropout,
                               "attention_chunk": call.attention_chunk}  # fmt: skip
    if call.bias != "none":
        names = {"dense": "bias", "distance": "distance_bias", "slopes": "alibi_slopes"}
        options[names[call.bias.removesuffix("_with_gradient")]] = tensors[3]
        if not call.bias_requires_grad:
            tensors.pop().requires_grad_(False)
    if call.sinks:
        options["sinks"] = torch.linspace(
            -2, 2, call.heads, device="cuda", dtype=torch.float64 if wide else torch.float32
        )
        tensors.append(options["sinks"].requires_grad_())
    starts = torch.rand(call.batch, call.queries, generator=generator) < 0.03
    if call.packed:
        documents = starts.int().cumsum(1, dtype=torch.int32).to("cuda")
        options["packed"] = PackedSequences.from_documents(documents, dtype=dtype, causal=call.causal)
    if call.padding:
        options["key_padding_mask"] = (torch.arange(call.keys) < call.keys - torch.arange(call.batch)[:, None]).cuda()
    return tensors, options


@pytest.mark.gpu
@pytest.mark.parametrize("block", range(12))
def test_what_the_table_accepts_runs_and_is_right(block: int) -> None:
    """Random calls on every backend that is not our own and says that it can run them; dropout runs at least.

    Our kernels have their own random cases; here they would be compiled for each call.
    """
    bars = {"bf16": 0.03, "fp16": 0.01, "fp32": 5e-3}
    for seed in range(12 * block, 12 * block + 12):
        call = random_gpu_call(random.Random(seed))
        results: dict[str, list[Tensor]] = {}
        for backend in BACKENDS:
            if (
                backend.name in ("triton", "lse_first")
                or backend.why_not(call, detect_installed_software("cuda")) is not None
            ):
                continue
            wide = backend.name == "reference"
            tensors, options = drawn_arguments(call, torch.float64 if wide else TORCH_DTYPES[call.dtype])
            with told(f"{backend.name}: {call}", seed):
                function = get_attention_function(BackendSelection(call, backend.name, ()))
                output = attend(function, *tensors[:3], **options | ({"dropout_p": 0.0} if wide else {}))
                upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
                gradients = torch.autograd.grad(output, tensors, upstream.to(output))
                results[backend.name] = [output.detach(), *gradients]
                assert all(tensor.isfinite().all() for tensor in results[backend.name])
        truth = results.pop("reference")
        for name, ours in results.items() if not call.dropout else ():
            with told(f"{name}: {call}", seed):
                for expected, tensor in zip(truth, ours, strict=True):
                    assert (tensor - expected).abs().max() < bars[call.dtype] * max(expected.abs().max(), 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "te_fused", "te_flash", "flash_attn"])
def test_gpu_backends_that_are_deterministic_repeat_to_the_bit(name: str) -> None:
    call = gpu_call(deterministic=True)
    skip_unless_it_runs(name, call)
    function = get_attention_function(BackendSelection(call, name, ()))
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 256, 8, 64), (2, 256, 2, 64), (2, 256, 2, 64))
    tensors = [torch.randn(shape, generator=generator).to("cuda", torch.bfloat16).requires_grad_() for shape in shapes]
    runs = []
    for _ in range(20):
        output = attend(function, *tensors, softmax_scale=0.125, causal=True)
        runs.append([output, *torch.autograd.grad(output.sum(), tensors)])
    for again in runs[1:]:
        assert all(torch.equal(first, other) for first, other in zip(runs[0], again, strict=True))
