"""flash-attn's functions on our kernels: its signatures, ALiBi as it defines it, packed forms, returned values."""

from __future__ import annotations

import inspect
from itertools import product
from typing import Any

import pytest
import torch
from attention_cases import mostly_full
from tiers import looped
from torch import Tensor

from stoker.kernels import compat, reference_attention
from stoker.kernels.compat import flash_attn_func, flash_attn_varlen_func

OPTIONS = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
SIGNATURES: dict[str, tuple[str, ...]] = {  # required arguments in flash-attn 2.8; OPTIONS follow in this order
    "flash_attn_func": ("q", "k", "v"),
    "flash_attn_kvpacked_func": ("q", "kv"),
    "flash_attn_qkvpacked_func": ("qkv",),
    "flash_attn_varlen_func": ("q", "k", "v", *LENGTHS),
    "flash_attn_varlen_kvpacked_func": ("q", "kv", *LENGTHS),
    "flash_attn_varlen_qkvpacked_func": ("qkv", "cu_seqlens", "max_seqlen"),
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


@looped("name", SIGNATURES)
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(compat, name)).parameters
    options = OPTIONS | ({"block_table": None} if name == "flash_attn_varlen_func" else {})
    assert list(parameters) == [*SIGNATURES[name], *options]
    assert {n: parameters[n].default for n in options} == options
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


DENSE: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"causal": True, "window_size": (5, 0)},
    "cap": {"softcap": 1},
}


@mostly_full("options", DENSE, ["window"])
def test_dense(options: dict[str, Any], device: str) -> None:
    q, k, v = draw(2, 9, 4, 16), draw(2, 12, 2, 16, seed=1), draw(2, 12, 2, 16, seed=2)
    expected, expected_lse = reference_attention(q, k, v, **options, softmax_scale=0.3, return_lse=True)
    out, lse, nothing = flash_attn_func(q, k, v, softmax_scale=0.3, return_attn_probs=True, **options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert nothing is None
    assert torch.equal(flash_attn_func(q, k, v, 0.0, 0.3, **options), out)
    assert torch.equal(compat.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), 0.0, 0.3, **options), out)
    same = compat.flash_attn_qkvpacked_func(torch.stack([k, k, v], 2), softmax_scale=0.3, **options)
    torch.testing.assert_close(same, reference_attention(k, k, v, **options, softmax_scale=0.3))


ALIBI = {
    f"{'sequences' if per_sequence else 'heads'}-{queries}x{keys}-{'causal' if causal else 'full'}": (
        per_sequence, queries, keys, causal,
    )
    for per_sequence, (queries, keys), causal in product((False, True), ((9, 14), (14, 9), (1, 1)), (False, True))
}  # fmt: skip


@mostly_full("alibi", ALIBI, ["sequences-9x14-full"])
def test_alibi(alibi: tuple[bool, int, int, bool], device: str) -> None:
    """The bias as flash-attn documents it; slopes of each sequence too; with gradients."""
    per_sequence, queries, keys, causal = alibi
    q, k, v = draw(2, queries, 4, 16), draw(2, keys, 2, 16, seed=1), draw(2, keys, 2, 16, seed=2)
    shape = (2, 4) if per_sequence else (4,)
    slopes = torch.rand(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()
    place = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    bias = -slopes[..., None, None].double() * place.abs()
    leaves = (q, k, v, slopes)
    expected, expected_lse = reference_attention(q, k, v, bias=bias, causal=causal, return_lse=True)
    upstream = draw(*expected.shape, seed=4).detach()
    expected_gradients = torch.autograd.grad(expected, leaves, upstream)
    out, lse, _ = flash_attn_func(q, k, v, alibi_slopes=slopes, causal=causal, return_attn_probs=True)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(torch.autograd.grad(out, leaves, upstream), expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_packed() -> None:
    lengths = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    q, k, v = draw(12, 4, 16), draw(12, 4, 16, seed=1), draw(12, 4, 16, seed=2)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, lengths, lengths, 7, 7, causal=True, alibi_slopes=slopes, return_attn_probs=True
    )
    for start, end in ((0, 5), (5, 12)):
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        alone, alone_lse = reference_attention(
            *(t[None, start:end] for t in (q, k, v)), bias=-slopes[:, None, None].double() * distance.abs(),
            causal=True, return_lse=True,
        )  # fmt: skip
        torch.testing.assert_close(out[start:end], alone[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(lse[:, start:end], alone_lse[0], rtol=1e-6, atol=1e-6)
    options: dict[str, Any] = {"causal": True, "alibi_slopes": slopes}
    one = compat.flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 1), lengths, 7, **options)
    two = compat.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), lengths, lengths, 7, 7, **options)
    assert torch.equal(one, out)
    assert torch.equal(two, out)


def test_dropout_follows_the_generator() -> None:
    q = draw(1, 20, 2, 16)
    torch.manual_seed(0)
    first, second = flash_attn_func(q, q, q, 0.5), flash_attn_func(q, q, q, 0.5)
    torch.manual_seed(0)
    again = flash_attn_func(q, q, q, dropout_p=0.5)
    assert torch.equal(again, first)
    assert not torch.equal(first, second)


def test_refused() -> None:
    q, packed = draw(2, 9, 4, 16), draw(9, 4, 16)
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"`alibi_slopes` \(3,\) must be \(heads,\) = \(4,\) or \(batch, heads\)"):
        flash_attn_func(q, q, q, alibi_slopes=torch.zeros(3))
    with pytest.raises(ValueError, match=r"`alibi_slopes` \(torch.float64\)"):
        flash_attn_func(q, q, q, alibi_slopes=torch.zeros(4).double())
    with pytest.raises(ValueError, match=r"`alibi_slopes` \(2, 4\) must be \(heads,\) = \(4,\); slopes per sequence"):
        flash_attn_varlen_func(
            packed, packed, packed, lengths, lengths, 5, 5, alibi_slopes=torch.zeros(2, 4)
        )  # fmt: skip
    with pytest.raises(ValueError, match="`block_table` must be None"):
        flash_attn_varlen_func(packed, packed, packed, lengths, lengths, 5, 5, block_table=lengths)
    with pytest.raises(ValueError, match=r"`qkv` \(2, 9, 4, 16\) must be \(batch, tokens, 3, heads"):
        compat.flash_attn_qkvpacked_func(q)
    with pytest.raises(ValueError, match=r"`kv` \(9, 4, 16\) must be \(total, 2, heads"):
        compat.flash_attn_varlen_kvpacked_func(packed, packed, lengths, lengths, 5, 5)
    with pytest.raises(ValueError, match=r"`q`.*4 dimensions"):
        flash_attn_func(packed, packed, packed)
