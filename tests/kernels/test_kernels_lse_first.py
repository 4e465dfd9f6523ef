"""LSE-first attention: its three stages in the interpreter and in plain torch, against a dense fp64 reference."""

from typing import Any

import pytest
import torch
from attention_cases import attend
from tiers import DEVICES, cases, extra, full_only, looped
from torch.utils.flop_counter import FlopCounterMode

from stoker.kernels.attention.backends.lse_first import lse_first
from stoker.kernels.attention.lse_first import eager_stages, ops, triton_stages
from stoker.kernels.attention.lse_first.chunks import Chunk, split_into_chunks
from stoker.kernels.attention.lse_first.ops import (
    _attention_lse,
    _attention_lse_backward,
    _lse_first_attention,
    _lse_first_attention_backward,
    attention_lse,
    lse_first_attention,
)

NAMES = ("out", "lse", "dq", "dk", "dv")


@pytest.fixture(params=["triton", "torch"])
def stages(request, monkeypatch):
    """Each test runs on the Triton kernels, here in the interpreter, and on their twins in plain torch."""
    module = {"triton": triton_stages, "torch": eager_stages}[request.param]
    monkeypatch.setattr(ops, "_stages", lambda q: module)
    return request.param


def seeded(*shape, dtype=torch.float32, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)


def inputs(queries, keys, *, batch=1, heads=2, groups=1, head_dim=16, dtype=torch.float32, device="cpu"):
    """q, k, v and gradients of output and log-sum-exp."""
    q = seeded(batch, queries, heads, head_dim, dtype=dtype, seed=1, device=device)
    k = seeded(batch, keys, groups, head_dim, dtype=dtype, seed=2, device=device)
    v = seeded(batch, keys, groups, head_dim, dtype=dtype, seed=3, device=device)
    out_gradient = seeded(batch, queries, heads, head_dim, dtype=dtype, seed=4, device=device)
    wide = torch.promote_types(dtype, torch.float32)
    return q, k, v, out_gradient, seeded(batch, heads, queries, dtype=wide, seed=5, device=device)


def dense(q, k, v, *, causal=False, softmax_scale=None):
    """Attention in one matrix; the arithmetic is in the dtype of the inputs but for an fp32 softmax."""
    per_group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(per_group, dim=2), v.repeat_interleave(per_group, dim=2)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if causal:
        queries, keys = scores.shape[-2:]
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(keys - queries + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    empty = (scores == float("-inf")).all(dim=-1)
    lse = scores.masked_fill(empty[..., None], 0.0).logsumexp(dim=-1).masked_fill(empty, float("-inf"))
    weights = scores.masked_fill(empty[..., None], 0.0).softmax(dim=-1).masked_fill(empty[..., None], 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights.to(q.dtype), v), lse


def results(function: Any, *tensors: Any, **options: Any) -> Any:
    """Output, log-sum-exp, and gradients of q, k and v, of which k and v may be lists."""
    q, k, v, out_gradient, lse_gradient = tensors
    q, *kv = (t.detach().requires_grad_() for t in (q, *as_list(k), *as_list(v)))
    half = len(kv) // 2
    arguments = (kv[0], kv[1]) if isinstance(k, torch.Tensor) else (kv[:half], kv[half:])
    out, lse = function(q, *arguments, **options)
    finite = lse.masked_fill(lse == float("-inf"), 0.0)
    gradients = torch.autograd.grad((out, finite), (q, *kv), (out_gradient, lse_gradient), allow_unused=True)
    dk, dv = (
        torch.cat([g.to(q.device) for g in part], dim=1) for part in (gradients[1 : half + 1], gradients[half + 1 :])
    )
    return out.detach(), lse.detach(), gradients[0], dk, dv


def as_list(tensors):
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def ours(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return lse_first_attention(q, k, v, return_lse=True, **options)


def assert_as_good_as_torch(q, k, v, out_gradient, lse_gradient, *, causal, softmax_scale=None, **options):
    """Error against fp64 of the same inputs at most that of dense torch in the same dtype."""
    same = {"causal": causal, "softmax_scale": softmax_scale}
    flat = [torch.cat([t.to(q.device) for t in as_list(x)], dim=1) for x in (k, v)]
    wide: Any = [t.double() for t in (q, *flat, out_gradient, lse_gradient)]
    exact = results(dense, *wide, **same)
    plain = results(dense, q, *flat, out_gradient, lse_gradient, **same)
    got = results(ours, q, k, v, out_gradient, lse_gradient, **same, **options)
    unit = torch.finfo(q.dtype).eps
    # gradients of scores are differences of larger numbers, which one row of few keys shows in fp32
    slack, rms_slack = (16, 4) if q.dtype == torch.float32 else (2, 0.1)
    for name, tensor, same_dtype, truth in zip(NAMES, got, plain, exact, strict=True):
        assert tensor.dtype == same_dtype.dtype, name
        if not truth.numel():
            continue
        if name == "lse":
            finite = truth.isfinite()
            assert torch.equal(tensor.isfinite(), finite)
            assert ((tensor - truth).abs()[finite] <= 2e-6 * (1 + truth[finite].abs())).all()
            continue
        most, rms = (1.25, 1.05) if name == "out" else (2.0, 1.25)
        error, allowed = (tensor - truth).abs(), (same_dtype - truth).abs()
        size = truth.abs().max().clamp(min=1.0)
        assert error.max() <= most * allowed.max() + slack * unit * size, name
        assert error.square().mean().sqrt() <= rms * allowed.square().mean().sqrt() + rms_slack * unit * size, name


# ---------------------------------------------------------------- lengths, shapes, dtypes


LENGTHS = [(1, 65), (33, 64), (40, 33)]


@pytest.mark.parametrize("causal", [*extra(False), True])
@pytest.mark.parametrize(("queries", "keys"), cases(LENGTHS, fast=1))
@pytest.mark.usefixtures("stages")
def test_every_length(queries, keys, causal):
    assert_as_good_as_torch(*inputs(queries, keys), causal=causal)


@full_only
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [1, 2, 15, 17, 63, 64, 65, 97, 127, 128, 129, 200, 257])
@pytest.mark.parametrize("keys", [1, 3, 16, 63, 65, 127, 129, 200, 257])
@pytest.mark.usefixtures("stages")
def test_every_length_full(queries, keys, causal):
    assert_as_good_as_torch(*inputs(queries, keys), causal=causal, chunk_size=50)


@pytest.mark.parametrize("head_dim", [24, *extra(80, 112, 256)])
@pytest.mark.usefixtures("stages")
def test_head_dims(head_dim):
    assert_as_good_as_torch(*inputs(9, 40, heads=1, head_dim=head_dim), causal=True)


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), *extra((6, 2))])
@pytest.mark.usefixtures("stages")
def test_groups(heads, groups):
    assert_as_good_as_torch(*inputs(9, 20, heads=heads, groups=groups), causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *extra(torch.float16)])
@pytest.mark.usefixtures("stages")
def test_16_bit_types(dtype):
    assert_as_good_as_torch(*inputs(33, 40, head_dim=32, dtype=dtype), causal=True, chunk_size=20)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 112, 128, 160, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1025), (257, 257), (1023, 200), (200, 1023)])
def test_everything_on_a_gpu(dtype, head_dim, causal, queries, keys):
    made = inputs(queries, keys, head_dim=head_dim, dtype=dtype, device="cuda")
    assert_as_good_as_torch(*made, causal=causal)
    assert_as_good_as_torch(*made, causal=causal, chunk_size=150)


@pytest.mark.parametrize("scale", [0.0, *extra(-0.4)])
@pytest.mark.usefixtures("stages")
def test_scales(scale):
    assert_as_good_as_torch(*inputs(9, 20), causal=True, softmax_scale=scale)


@pytest.mark.usefixtures("stages")
def test_large_scores():
    """A weight is as exact as the log-sum-exp it is computed from: its relative error is that of fp32 times |lse|."""
    q, k, v, *others = inputs(9, 20)
    wide: Any = [t.double() for t in (q * 60, k * 60, v, *others)]
    exact = results(dense, *wide, causal=True)
    largest = exact[1].abs().max()
    assert largest > 5e3
    for got, truth in zip(results(ours, q * 60, k * 60, v, *others, causal=True, chunk_size=6), exact, strict=True):
        assert (got - truth).abs().max() <= 4 * torch.finfo(torch.float32).eps * largest * truth.abs().max().clamp(
            min=1
        )


def test_strided_inputs(stages):
    """The kernels give the same bits; a matrix product of PyTorch may sum in another order for other strides."""
    bounds: dict[str, Any] = {"rtol": 0.0, "atol": 0.0} if stages == "triton" else {"rtol": 1e-5, "atol": 1e-6}
    q, k, v, out_gradient, lse_gradient = inputs(9, 20)
    views: Any = [t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for t in (q, k, v, out_gradient)]
    strided = results(ours, *views, lse_gradient, causal=True)
    for got, wanted in zip(strided, results(ours, q, k, v, out_gradient, lse_gradient, causal=True), strict=True):
        torch.testing.assert_close(got, wanted, **bounds)


@pytest.mark.parametrize(
    ("batch", "queries", "keys"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=["batch", "queries", "keys"]
)
@pytest.mark.usefixtures("stages")
def test_nothing_there(batch, queries, keys):
    out, lse, *gradients = results(ours, *inputs(queries, keys, batch=batch), causal=True)
    assert out.shape == (batch, queries, 2, 16)
    assert lse.shape == (batch, 2, queries)
    assert (lse == float("-inf")).all()
    assert all((t == 0).all() for t in (out, *gradients))


# ---------------------------------------------------------------- chunks


def test_chunks_cover_the_keys_in_order():
    first = [Chunk(0, 0, 2, 0), Chunk(0, 2, 4, 2), Chunk(0, 4, 5, 4)]
    assert split_into_chunks([5, 0, 3], 2) == [*first, Chunk(2, 0, 2, 5), Chunk(2, 2, 3, 7)]
    assert split_into_chunks([5, 3], 0) == [Chunk(0, 0, 5, 0), Chunk(1, 0, 3, 5)]


@pytest.mark.parametrize("causal", [False, *extra(True)])
@pytest.mark.parametrize("chunk_size", [20, *extra(1, 7, 16, 1000)])
@pytest.mark.usefixtures("stages")
def test_chunks_change_rounding_only(chunk_size, causal):
    made = inputs(20, 33) if chunk_size > 1 else inputs(3, 5)
    whole = results(ours, *made, causal=causal)
    for got, wanted in zip(results(ours, *made, causal=causal, chunk_size=chunk_size), whole, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.usefixtures("stages")
def test_lists_of_tensors_follow_each_other():
    q, k, v, *others = inputs(20, 33)
    lists = [list(t.split([13, 0, 20], dim=1)) for t in (k, v)]
    got = results(ours, q, *lists, *others, causal=True, chunk_size=15)
    for tensor, wanted in zip(got, results(ours, q, k, v, *others, causal=True), strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.usefixtures("stages")
def test_queries_before_the_first_key_give_zero():
    out, lse, dq, *_ = results(ours, *inputs(20, 12), causal=True, chunk_size=7)
    assert (out[:, :8] == 0).all()
    assert (lse[..., :8] == float("-inf")).all()
    assert (dq[:, :8] == 0).all()
    assert out[:, 8:].abs().min() > 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, about the NaN
@pytest.mark.parametrize("device", DEVICES)
def test_tiles_of_later_keys_are_not_read(device):
    half = 32 if device == "cpu" else 128  # tiles of the interpreter are small
    q, k, v, *_ = inputs(2 * half, 2 * half, heads=1, device=device)
    spoiled = [t.clone() for t in (k, v)]
    for tensor in spoiled:
        tensor[:, half:] = float("nan")  # whole tiles, which the first half of the queries do not see
    got = ours(q, *spoiled, causal=True)
    for tensor, wanted in zip(got, ours(q, k, v, causal=True), strict=True):
        first = (slice(None), slice(half)) if tensor.ndim == 4 else (..., slice(half))
        torch.testing.assert_close(tensor[first], wanted[first])


# ---------------------------------------------------------------- stage 1 alone


@pytest.mark.parametrize("causal", [*extra(False), True])
@pytest.mark.usefixtures("stages")
def test_log_sum_exps_of_parts_merge(causal):
    q, k, *_ = inputs(20, 33)
    wanted = dense(q.double(), k.double(), k.double(), causal=causal)[1]
    parts = [
        attention_lse(q, part, causal=causal, k_offset=offset, total_keys=33)
        for offset, part in ((0, k[:, :10]), (10, k[:, 10:27]), (27, k[:, 27:]))
    ]
    merged = torch.logaddexp(torch.logaddexp(parts[0], parts[1]), parts[2])
    torch.testing.assert_close(merged.double(), wanted, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(attention_lse(q, k, causal=causal).double(), wanted, rtol=2e-6, atol=2e-6)


def test_log_sum_exp_of_the_output_is_the_same():
    q, k, v, *_ = inputs(9, 20)
    assert torch.equal(attention_lse(q, k, causal=True, chunk_size=11), ours(q, k, v, causal=True, chunk_size=11)[1])


# ---------------------------------------------------------------- gradients, operations


@full_only
@pytest.mark.parametrize("causal", [*extra(False), True])
@pytest.mark.usefixtures("stages")
def test_gradients_in_fp64(causal):
    q, k, v, *_ = inputs(2, 3, heads=1, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def both(*tensors):
        return ours(*tensors, causal=causal, chunk_size=2)

    torch.autograd.gradcheck(both, leaves, fast_mode=True)
    torch.autograd.gradcheck(lambda q, k: attention_lse(q, k, causal=causal, total_keys=4), leaves[:2], fast_mode=True)


def test_an_output_without_gradient():
    q, k, v, out_gradient, lse_gradient = inputs(5, 6)
    zeros = torch.zeros_like(out_gradient)
    wanted = results(ours, q, k, v, zeros, lse_gradient)[2:]
    leaves = [t.requires_grad_() for t in (q, k, v)]
    got = torch.autograd.grad(ours(*leaves)[1], leaves, lse_gradient)
    for tensor, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(tensor, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_equal_calls_give_equal_bits(device):
    made = inputs(40, 50, heads=1, device=device) if device == "cpu" else inputs(700, 900, batch=2, device=device)
    first = results(ours, *made, causal=True, chunk_size=40)
    for _ in range(50 if device == "cuda" else 1):
        again = results(ours, *made, causal=True, chunk_size=40)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_order_within_the_batch_changes_no_bit(device):
    made = inputs(9, 20, batch=2, heads=1, device=device)
    swapped = [t.flip(0) for t in made]
    pairs = zip(results(ours, *made, causal=True), results(ours, *swapped, causal=True), strict=True)
    assert all(torch.equal(a, b.flip(0)) for a, b in pairs)


@full_only
@pytest.mark.parametrize("device", DEVICES)
def test_operations_are_well_formed(device, monkeypatch):
    if device == "cpu":  # what is checked does not depend on who computes, and the interpreter is slow
        monkeypatch.setattr(ops, "_stages", lambda q: eager_stages)
    q, k, v, *_ = (t.requires_grad_() for t in inputs(5, 6, device=device))
    torch.library.opcheck(_lse_first_attention, (q, [k], [v], True, 0.3, 4))
    torch.library.opcheck(_attention_lse, (q, [k], True, 0.3, 4, 0, 6), test_utils=("test_schema", "test_faketensor"))


@full_only
def test_backward_operations_are_well_formed(monkeypatch):
    monkeypatch.setattr(ops, "_stages", lambda q: eager_stages)
    q, k, v, out_gradient, lse_gradient = inputs(5, 6)
    out, lse = _lse_first_attention(q, [k], [v], True, 0.3, 4)
    torch.library.opcheck(
        _lse_first_attention_backward, (out_gradient, lse_gradient, q, [k], [v], out, lse, True, 0.3, 4)
    )
    torch.library.opcheck(_attention_lse_backward, (lse_gradient, q, [k], lse, True, 0.3, 4, 0, 6))


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_as_one_graph(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(ops, "_stages", lambda q: eager_stages)
    made = inputs(5, 6, device=device)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    pairs = zip(results(compiled, *made, causal=True), results(ours, *made, causal=True), strict=True)
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted)


def test_flop_count(monkeypatch):
    monkeypatch.setattr(ops, "_stages", lambda q: eager_stages)
    q, k, v, *_ = (t.requires_grad_() for t in inputs(8, 16))
    product = 2 * 1 * 2 * 8 * 16 * 16
    with FlopCounterMode(display=False) as counter:
        out, _ = ours(q, k, v)
    assert counter.get_total_flops() == 3 * product
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(out.sum(), (q, k, v))
    assert counter.get_total_flops() == 7 * product


# ---------------------------------------------------------------- keys and values on the host


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "chunk_size"), [(1, 100), (2, 100), (2, 7), (2, None)])
def test_host_chunks_give_what_device_chunks_give(batch, chunk_size, causal, pinned):
    made = inputs(300, 730, batch=batch, dtype=torch.bfloat16, device="cuda")
    expected = results(ours, *made, causal=causal, chunk_size=chunk_size)
    q, k, v, *others = made
    host = [t.cpu().pin_memory() if pinned else t.cpu() for t in (k, v)]
    for _ in range(20):  # a race between the streams would show in some
        got = results(ours, q, *host, *others, causal=causal, chunk_size=chunk_size)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    lists = [list(t.split(199, dim=1)) for t in host]
    for got, wanted in zip(results(ours, q, *lists, *others, causal=causal), expected, strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_gradients_of_host_tensors_stay_there():
    q, k, v, out_gradient, _ = inputs(30, 73, dtype=torch.bfloat16, device="cuda")
    host = [t.cpu().pin_memory().requires_grad_() for t in (k, v)]
    gradients = torch.autograd.grad(lse_first_attention(q, *host, chunk_size=20), host, out_gradient)
    assert all(g.device.type == "cpu" and g.is_pinned() for g in gradients)


@pytest.mark.gpu
def test_device_memory_does_not_grow_with_the_keys():
    """256 k keys from the host take the memory of 32 k."""
    peaks = []
    for keys in (1 << 15, 1 << 18):
        q, out_gradient = (seeded(1, 4096, 8, 128, dtype=torch.bfloat16, seed=s, device="cuda") for s in (1, 2))
        q.requires_grad_()
        host = [torch.randn(1, keys, 8, 128, dtype=torch.bfloat16).pin_memory().requires_grad_() for _ in range(2)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ours(q, *host, causal=True, chunk_size=8192)[0].backward(out_gradient)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        assert all(t.grad is not None and t.grad.isfinite().all() for t in host)
        del q, out_gradient, host
    assert peaks[1] <= 1.01 * peaks[0]


@pytest.mark.gpu
@pytest.mark.parametrize("score", [3.0, 77.7, 1234.5])
def test_a_highest_score_that_stays_shifts_the_sum_by_nothing(score):
    """The first key has the highest score: a rounding in the shift of each later tile would add up over 65536 keys."""
    q = seeded(1, 128, 1, 64, device="cuda", dtype=torch.bfloat16)
    k = (0.99 * q[:, :1]).repeat(1, 65536, 1, 1)
    k[:, 0] = q[:, 0]
    scale = score / (q[0, 0, 0].double() @ k[0, 0, 0].double()).item()
    truth = (torch.einsum("qd,kd->qk", q[0, :, 0].double(), k[0, :, 0].double()) * scale).logsumexp(1)
    error = (attention_lse(q, k, softmax_scale=scale)[0, 0].double() - truth).abs()
    # 1024 equal tiles are added, each with the same rounding: 3e-5; a shift would be 1e-4 for the lowest score
    assert (error <= 3e-5 + 1e-6 * (score + truth.abs())).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "head_dim"), [(512, 64), (8192, 64), (512, 256), (8192, 256)])
def test_sizes_of_fused_attention_and_beyond(tokens, head_dim):
    """Fixed-size fused attention once ended at 512 tokens and heads 64 wide; 16 times as many, 4 times as wide."""
    made = inputs(tokens, tokens, heads=4, head_dim=head_dim, dtype=torch.bfloat16, device="cuda")
    assert_as_good_as_torch(*made, causal=False)
    assert_as_good_as_torch(*made, causal=True, chunk_size=1000)


# ---------------------------------------------------------------- as a backend; what is refused


def test_backend():
    q, k, v, *_ = inputs(9, 9)
    expected = dense(q, k, v, causal=True, softmax_scale=0.3)[0]
    torch.testing.assert_close(attend(lse_first, q, k, v, softmax_scale=0.3, causal=True), expected)
    options: list[dict[str, Any]] = [
        {"dropout_p": 0.1},
        {"bias": torch.zeros(9, 9)},
        {"window_size": (3, 0)},
        {"softcap": 5.0},
    ]
    for option in options:
        with pytest.raises(ValueError, match=f"`{next(iter(option))}` must not be given"):
            attend(lse_first, q, k, v, softmax_scale=0.3, causal=True, **option)


@looped(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 20, 3, 16)}, "`v`"),
        ({"k": torch.zeros(1, 20, 2, 24), "v": torch.zeros(1, 20, 2, 24)}, r"`k` \(1, 20, 2, 24\).*16"),
        ({"k": torch.zeros(1, 20, 1, 16, dtype=torch.float16)}, "`k`.*float16"),
        ({"k": torch.zeros(1, 20, 1, 16, device="meta")}, r"`k` \(meta\) must be on the device"),
        ({"k": [], "v": []}, r"`v` \(0 tensors\)"),
        ({"v": [torch.zeros(1, 10, 1, 16)] * 2}, r"`v` \(2 tensors\).*`k` \(1\)"),
        ({"k": [torch.zeros(1, 9, g, 16) for g in (2, 1)], "v": [torch.zeros(1, 9, g, 16) for g in (2, 1)]}, "heads"),
        ({"chunk_size": 0}, r"`chunk_size` \(0\)"),
        ({"softmax_scale": float("nan")}, "`softmax_scale`"),
    ],
)
def test_bad_input_is_named(change, message):
    q, k, v, *_ = inputs(9, 20)
    with pytest.raises(ValueError, match=message):
        lse_first_attention(**({"q": q, "k": k, "v": v} | change))


def test_bad_place_in_the_sequence_is_named():
    q, k, *_ = inputs(9, 20)
    places: list[dict[str, Any]] = [{"k_offset": -1}, {"k_offset": 5, "total_keys": 24}]
    for place in places:
        with pytest.raises(ValueError, match="`total_keys`"):
            attention_lse(q, k, **place)
