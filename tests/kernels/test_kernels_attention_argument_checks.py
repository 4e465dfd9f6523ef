"""Argument checks of the attention functions: each error names the argument, what it is and the rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from cuda_sync import forbid_device_sync
from tiers import looped
from torch import Tensor
from torch._subclasses import FakeTensorMode

from stoker.kernels import flash_attention, lse_first_attention, reference_attention
from stoker.kernels.attention.argument_checks import AttentionGeometry, check_arguments
from stoker.kernels.attention.inputs import AttentionInputs
from stoker.kernels.attention.recompute_scores import attention_recompute_scores

SHAPES = {"q": (2, 5, 6, 16), "k": (2, 7, 3, 16), "v": (2, 7, 3, 16)}
PACKED_SHAPES = {"q": (5, 6, 16), "k": (7, 3, 16), "v": (7, 3, 16)}


def dense(**changes: Any) -> dict[str, Any]:
    """A good dense call of 2 sequences, 6 heads in 3 groups, 5 queries of 7 keys, with changes."""
    return {n: torch.zeros(shape) for n, shape in SHAPES.items()} | changes


def ends(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def packed(**changes: Any) -> dict[str, Any]:
    """A good packed call of sequences of 2 and 3 queries, 4 and 3 keys, with changes."""
    tensors = {n: torch.zeros(shape) for n, shape in PACKED_SHAPES.items()}
    lengths = {"cu_seqlens_q": ends(0, 2, 5), "cu_seqlens_k": ends(0, 4, 7), "max_seqlen_q": 3, "max_seqlen_k": 4}
    return tensors | lengths | changes


def check(*, for_kernel: bool = True, **arguments: Any) -> AttentionGeometry:
    return check_arguments(AttentionInputs(**arguments), for_kernel=for_kernel)


def empty(shapes: Mapping[str, tuple[int, ...]], **options: Any) -> dict[str, Any]:
    return {n: torch.empty(shape, **options) for n, shape in shapes.items()}


def on_meta(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, device="meta", **options)


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "q_rank": (lambda: dense(q=torch.zeros(5, 6, 16)), r"`q` \(5, 6, 16\) must have 4 dimensions.*without `cu_seql"),
    "q_rank_packed": (lambda: packed(q=torch.zeros(1, 5, 6, 16)), r"`q` \(1, 5, 6, 16\) must have 3 dimensions"),
    "k_rank": (lambda: dense(k=torch.zeros(2, 7, 16)), r"`k` \(2, 7, 16\) must have 4"),
    "v_rank": (lambda: dense(v=torch.zeros(16)), r"`v` \(16,\) must have 4"),
    "k_dtype": (lambda: dense(k=torch.zeros(SHAPES["k"]).half()), r"`k` \(torch.float16\).*`q` \(torch.float32\)"),
    "v_dtype": (lambda: dense(v=torch.zeros(SHAPES["v"]).bfloat16()), r"`v` \(torch.bfloat16\)"),
    "integers": (lambda: {n: torch.zeros(s, dtype=torch.int32) for n, s in SHAPES.items()}, r"`q` \(torch.int32\)"),
    "float8": (lambda: {n: torch.zeros(s).to(torch.float8_e5m2) for n, s in SHAPES.items()}, r"`q` \(torch.float8_e5"),
    "k_device": (lambda: dense(k=on_meta(*SHAPES["k"])), r"`k` \(meta\) must be on the device of `q` \(cpu\)"),
    "v_shape": (lambda: dense(v=torch.zeros(2, 8, 3, 16)), r"`v` \(2, 8, 3, 16\) must have the shape of `k` \(2, 7"),
    "batch": (lambda: dense(k=torch.zeros(3, 7, 3, 16), v=torch.zeros(3, 7, 3, 16)), "`k`.*batch of `q`, 2, not 3"),
    "widths": (lambda: dense(k=torch.zeros(2, 7, 3, 24), v=torch.zeros(2, 7, 3, 24)), "`k`.*head width of `q`, 16"),
    "groups": (lambda: dense(k=torch.zeros(2, 7, 4, 16), v=torch.zeros(2, 7, 4, 16)), r"`q` \(6 heads\).*\(4\)"),
    "no_groups": (lambda: dense(k=torch.zeros(2, 7, 0, 16), v=torch.zeros(2, 7, 0, 16)), r"`q` \(6 heads\).*\(0\)"),
    "no_heads": (lambda: dense(q=torch.zeros(2, 5, 0, 16)), r"`q` \(0 heads\)"),
    "window_below": (lambda: dense(window_size=(-2, 0)), r"`window_size` \(\(-2, 0\)\) must be two whole numbers"),
    "window_float": (lambda: dense(window_size=(1.0, 0)), "`window_size`"),
    "window_bool": (lambda: dense(window_size=(True, 0)), "`window_size`"),
    "window_one": (lambda: dense(window_size=(3,)), "`window_size`"),
    "window_int": (lambda: dense(window_size=3), r"`window_size` \(3\)"),
    "scale_nan": (lambda: dense(softmax_scale=float("nan")), r"`softmax_scale` \(nan\) must be finite"),
    "scale_inf": (lambda: dense(softmax_scale=float("inf")), r"`softmax_scale` \(inf\)"),
    "softcap_negative": (lambda: dense(softcap=-1.0), r"`softcap` \(-1.0\) must be 0"),
    "softcap_nan": (lambda: dense(softcap=float("nan")), r"`softcap` \(nan\)"),
    "bias_shape": (
        lambda: dense(bias=torch.zeros(6, 5, 8)),
        r"`bias` \(6, 5, 8\) must broadcast to \(batch, heads, queries, keys\) = \(2, 6, 5, 7\)",
    ),
    "bias_heads": (lambda: dense(bias=torch.zeros(1, 3, 5, 7)), r"`bias` \(1, 3, 5, 7\) must broadcast"),
    "bias_rank": (lambda: dense(bias=torch.zeros(1, 1, 1, 5, 7)), r"`bias` \(1, 1, 1, 5, 7\) must broadcast"),
    "bias_dtype": (lambda: dense(bias=torch.zeros(5, 7).half()), r"`bias` \(torch.float16\) must be torch.float32"),
    "bias_bool": (lambda: dense(bias=torch.ones(5, 7, dtype=torch.bool)), r"`bias` \(torch.bool\)"),
    "bias_device": (lambda: dense(bias=on_meta(5, 7)), r"`bias` \(meta\) must be on the device"),
    "bias_packed": (lambda: packed(bias=torch.zeros(3, 4)), r"`bias` \(3, 4\) must be None with `cu_seqlens_q`"),
    "distance_even": (lambda: dense(distance_bias=torch.zeros(6, 4)), r"`distance_bias` \(6, 4\) must be \(heads, 2 R"),
    "distance_short": (lambda: dense(distance_bias=torch.zeros(6, 1)), r"`distance_bias` \(6, 1\)"),
    "distance_heads": (lambda: dense(distance_bias=torch.zeros(3, 5)), r"`distance_bias` \(3, 5\).*with 6 heads"),
    "distance_rank": (lambda: dense(distance_bias=torch.zeros(5)), r"`distance_bias` \(5,\)"),
    "distance_dtype": (lambda: dense(distance_bias=torch.zeros(6, 5).half()), r"`distance_bias` \(torch.float16\)"),
    "distance_device": (lambda: dense(distance_bias=on_meta(6, 5)), r"`distance_bias` \(meta\)"),
    "slopes_heads": (lambda: dense(alibi_slopes=torch.zeros(3)), r"`alibi_slopes` \(3,\) must be \(heads,\) = \(6,\)"),
    "slopes_rank": (lambda: dense(alibi_slopes=torch.zeros(2, 6)), r"`alibi_slopes` \(2, 6\) must be \(heads,\)"),
    "slopes_dtype": (lambda: dense(alibi_slopes=torch.zeros(6).half()), r"`alibi_slopes` \(torch.float16\)"),
    "slopes_device": (lambda: dense(alibi_slopes=on_meta(6)), r"`alibi_slopes` \(meta\) must be on the device"),
    "slopes_packed": (lambda: packed(alibi_slopes=torch.zeros(2, 6)), r"`alibi_slopes` \(2, 6\) must be \(heads,\)"),
    "sinks_heads": (lambda: dense(sinks=torch.zeros(3)), r"`sinks` \(3,\) must be \(heads,\) = \(6,\)"),
    "sinks_dtype": (lambda: dense(sinks=torch.zeros(6).half()), r"`sinks` \(torch.float16\) must be float32"),
    "sinks_device": (lambda: dense(sinks=on_meta(6)), r"`sinks` \(meta\) must be on the device"),
    "chunk_negative": (lambda: dense(causal=True, attention_chunk=-1), r"`attention_chunk` \(-1\) must be a number"),
    "chunk_float": (lambda: dense(causal=True, attention_chunk=2.0), r"`attention_chunk` \(2.0\) must be a number"),
    "chunk_full": (lambda: dense(attention_chunk=4), r"`attention_chunk` \(4\) must be 0 without `causal`"),
    "dropout_one": (lambda: dense(dropout_p=1.0), r"`dropout_p` \(1.0\) must be at least 0 and less than 1"),
    "dropout_negative": (lambda: dense(dropout_p=-0.1), r"`dropout_p` \(-0.1\)"),
    "dropout_nan": (lambda: dense(dropout_p=float("nan")), r"`dropout_p` \(nan\)"),
    "rng_missing": (lambda: dense(dropout_p=0.1), r"`rng` \(None\) must be given with `dropout_p` \(0.1\)"),
    "rng_dtype": (lambda: dense(dropout_p=0.1, rng=torch.zeros(2)), r"`rng` \(torch.float32 \(2,\)\)"),
    "rng_shape": (lambda: dense(dropout_p=0.1, rng=torch.tensor(3)), r"`rng` \(torch.int64 \(\)\)"),
    "rng_device": (lambda: dense(dropout_p=0.1, rng=on_meta(2, dtype=torch.int64)), r"`rng` \(meta\)"),
    "padding_dtype": (lambda: dense(key_padding_mask=torch.ones(2, 7)), r"`key_padding_mask` \(torch.float32\).*bool"),
    "padding_shape": (
        lambda: dense(key_padding_mask=torch.ones(2, 5, dtype=torch.bool)),
        r"`key_padding_mask` \(2, 5\) must be \(batch, keys\) = \(2, 7\)",
    ),
    "padding_device": (lambda: dense(key_padding_mask=on_meta(2, 7, dtype=torch.bool)), r"`key_padding_mask` \(meta\)"),
    "padding_packed": (
        lambda: packed(key_padding_mask=torch.ones(2, 4, dtype=torch.bool)),
        "`key_padding_mask` must be None with `cu_seqlens_k`",
    ),
    "ends_of_keys_missing": (lambda: packed(cu_seqlens_k=None), r"`cu_seqlens_k` \(None\) must be given with `cu_seql"),
    "bound_of_queries_missing": (lambda: packed(max_seqlen_q=None), r"`max_seqlen_q` \(None\) must be given"),
    "bound_of_keys_missing": (lambda: packed(max_seqlen_k=None), r"`max_seqlen_k` \(None\) must be given"),
    "bound_without_ends": (lambda: dense(max_seqlen_q=5), r"`cu_seqlens_q` \(None\) must be given with `max_seqlen_q`"),
    "ends_dtype": (lambda: packed(cu_seqlens_q=ends(0, 2, 5, dtype=torch.int64)), r"`cu_seqlens_q` \(torch.int64\)"),
    "ends_rank": (lambda: packed(cu_seqlens_q=ends(0, 2, 5)[None]), r"`cu_seqlens_q` \(1, 3\) must have one dim"),
    "ends_empty": (lambda: packed(cu_seqlens_q=ends()), r"`cu_seqlens_q` \(0,\) must have one dim"),
    "ends_device": (lambda: packed(cu_seqlens_k=ends(0, 4, 7).to("meta")), r"`cu_seqlens_k` \(meta\)"),
    "ends_count": (lambda: packed(cu_seqlens_k=ends(0, 2, 4, 7)), r"`cu_seqlens_k` \(4 entries\).*`cu_seqlens_q` \(3"),
    "ends_first": (lambda: packed(cu_seqlens_q=ends(1, 2, 5)), "`cu_seqlens_q` must begin with 0, not 1"),
    "ends_decrease": (lambda: packed(cu_seqlens_k=ends(0, 4, 3)), "`cu_seqlens_k` must not decrease, but entry 2 is 3"),
    "ends_beyond": (lambda: packed(cu_seqlens_q=ends(0, 2, 6), max_seqlen_q=9), r"`cu_seqlens_q`.*`q` \(5 tokens\).*6"),
    "bound_low": (lambda: packed(max_seqlen_k=3), r"`max_seqlen_k` \(3\).*sequence 0 has 4 tokens"),
    "bound_negative": (lambda: packed(max_seqlen_q=-1), r"`max_seqlen_q` \(-1\) must not be negative"),
    "bound_tensor": (lambda: packed(max_seqlen_q=torch.tensor(3)), r"`max_seqlen_q` \(Tensor\) must be an int"),
    "bound_bool": (lambda: packed(max_seqlen_q=True), r"`max_seqlen_q` \(bool\)"),
}  # fmt: skip


@looped(("arguments", "message"), REFUSED.values())
@looped("attention", [reference_attention, flash_attention])
def test_refused(attention: Callable[..., Any], arguments: Callable[[], dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(**arguments())


KERNEL_ONLY: dict[str, tuple[dict[str, Any], str]] = {
    "narrow_values": ({n: torch.zeros(*s[:3], 8 if n == "v" else 16) for n, s in SHAPES.items()}, r"`v` .*not 8"),
    "narrow": ({n: torch.zeros(*s[:3], 8) for n, s in SHAPES.items()}, r"`q` \(2, 5, 6, 8\).*16 to 256 wide.*not 8"),
    "wide": ({n: torch.zeros(*s[:3], 264) for n, s in SHAPES.items()}, "not 264"),
    "odd": ({n: torch.zeros(*s[:3], 84) for n, s in SHAPES.items()}, "steps of 8, not 84"),
}


@pytest.mark.parametrize(("arguments", "message"), KERNEL_ONLY.values(), ids=KERNEL_ONLY.keys())
def test_limits_of_the_kernels(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attention(**arguments)
    check(**arguments, for_kernel=False)


def test_functions_that_need_values_of_the_width_of_keys_say_so() -> None:
    arguments: dict[str, Any] = {n: torch.zeros(*s[:3], 24 if n == "v" else 16) for n, s in SHAPES.items()}
    assert check(**arguments).value_dim == 24
    with pytest.raises(ValueError, match=r"`v` \(2, 7, 3, 24\) must have the head width of `k`, 16, not 24"):
        lse_first_attention(*arguments.values())
    query, key, value = arguments.values()
    with pytest.raises(ValueError, match="must have the head width of `k`"):
        attention_recompute_scores(query, key, value, scale=1.0, causal=True)


def test_fp64_is_for_the_interpreter() -> None:
    with FakeTensorMode():
        on_gpu = empty(SHAPES, dtype=torch.float64, device="cuda")
        with pytest.raises(ValueError, match=r"`q` \(torch.float64\) must be bfloat16, float16 or float32"):
            check(**on_gpu)
    check(**empty(SHAPES, dtype=torch.float64))


def test_values_on_a_device_are_not_read() -> None:
    """Reading `cu_seqlens` of a GPU would wait for it; a fake tensor raises where its value is read."""
    with FakeTensorMode():
        on_gpu = empty(PACKED_SHAPES, device="cuda")
        lengths = empty({"cu_seqlens_q": (3,), "cu_seqlens_k": (3,)}, dtype=torch.int32, device="cuda")
        geometry = check(**on_gpu, **lengths, max_seqlen_q=3, max_seqlen_k=4)
    assert (geometry.batch, geometry.queries, geometry.keys) == (2, 3, 4)


@pytest.mark.gpu
def test_no_wait_for_the_device() -> None:
    arguments: dict[str, Any] = {n: t.cuda() if isinstance(t, Tensor) else t for n, t in packed(causal=True).items()}
    with forbid_device_sync():
        check(**arguments)
        flash_attention(**arguments)


def test_geometry() -> None:
    expected = AttentionGeometry(
        batch=2,
        heads=6,
        groups=3,
        head_dim=16,
        value_dim=16,
        queries=5,
        keys=7,
        packed=False,
        scale=0.25,
        left=-1,
        right=-1,
        chunk=0,
    )
    assert check(**dense()) == expected
    longest = expected._replace(queries=8, keys=4, packed=True, scale=1.0)
    assert check(**packed(softmax_scale=1, max_seqlen_q=8)) == longest


@looped(
    ("causal", "window", "expected"),
    [
        (False, (-1, -1), (-1, -1)),
        (True, (-1, -1), (-1, 0)),
        (True, (3, 2), (3, 0)),
        (False, (0, 0), (0, 0)),
        (False, (5, 3), (5, 3)),
        (False, (6, 4), (-1, -1)),  # 5 queries of 7 keys: no key is farther
        (False, (100, 100), (-1, -1)),
    ],
)
def test_window_and_causal_become_one(causal: bool, window: tuple[int, int], expected: tuple[int, int]) -> None:
    geometry = check(**dense(causal=causal, window_size=window))
    assert (geometry.left, geometry.right) == expected


@looped(("chunk", "kept"), [(0, 0), (3, 3), (6, 6), (7, 0), (100, 0)])
def test_a_chunk_of_all_keys_is_none(chunk: int, kept: int) -> None:
    """So that the same kernels run, with the same bits."""
    assert check(**dense(causal=True, attention_chunk=chunk)).chunk == kept


@looped(
    "bias", [(), (7,), (5, 1), (6, 1, 7), (1, 1, 5, 7), (2, 6, 5, 7), (2, 1, 1, 1)]
)  # fmt: skip
def test_biases_that_broadcast(bias: tuple[int, ...]) -> None:
    check(**dense(bias=torch.zeros(bias)))
    value = torch.randn(SHAPES["v"])
    expected = reference_attention(**dense(v=value))
    torch.testing.assert_close(reference_attention(**dense(v=value, bias=torch.zeros(bias))), expected)


def test_good_arguments_are_taken() -> None:
    check(**dense(softmax_scale=0.0, softcap=30.0, window_size=[4, 0], rng=torch.zeros(2, dtype=torch.int64)))
    check(**packed(cu_seqlens_q=ends(0, 0, 4), max_seqlen_q=4))  # an empty sequence, a token of none
    check(**packed(cu_seqlens_q=ends(0), cu_seqlens_k=ends(0), max_seqlen_q=0, max_seqlen_k=0))
    check(**packed(alibi_slopes=torch.zeros(6), distance_bias=torch.zeros(6, 3), sinks=torch.zeros(6)))
    check(**empty(SHAPES, dtype=torch.float64), alibi_slopes=torch.zeros(6, dtype=torch.float64))
    check(**dense(distance_bias=torch.zeros(6, 3), bias=torch.zeros(5, 7), dropout_p=0))
    half = empty(SHAPES, dtype=torch.bfloat16)
    check(**half, bias=torch.zeros(5, 7))
    check(**half, bias=torch.zeros(5, 7, dtype=torch.bfloat16), distance_bias=torch.zeros(6, 3))
