"""Fused scaled masked softmax: the kernels in the interpreter and the operation, against fp64 and plain torch."""

from itertools import product
from typing import Any

import pytest
import torch
from attention_cases import attend
from tiers import DEVICES, cases, extra, looped

from stoker.kernels import masked_softmax, masked_softmax_kernels
from stoker.kernels.attention.backends import unfused
from stoker.kernels.attention.backends.unfused import UnfusedAttention
from stoker.kernels.attention.packed_sequences import PackedSequences
from stoker.kernels.masked_softmax import (
    _scaled_masked_softmax,
    _scaled_masked_softmax_backward,
    _softmax_with_sinks,
    reference_scaled_masked_softmax,
    scaled_masked_softmax,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def kernels(monkeypatch):
    """The custom operations run the Triton kernels on CPU tensors too, in the interpreter."""
    monkeypatch.setattr(masked_softmax, "triton_runs_on", lambda tensor: True)


def seeded(*shape, dtype=torch.float32, seed=0, scale=3.0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(device, dtype)


def random_mask(*shape, seed=1, device="cpu", share=0.4):
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share).to(device)


def forward_and_backward(function, x, output_gradient, *arguments):
    leaf = x.detach().requires_grad_()
    output = function(leaf, *arguments)
    return output.detach(), torch.autograd.grad(output, leaf, output_gradient)[0]


def plain_softmax(x, mask, scale, causal):
    """Step by step, every step in the dtype of x."""
    scores = x * scale
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    if causal:
        hidden = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(x.shape[-1] - x.shape[-2] + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    empty = (scores == float("-inf")).all(dim=-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)


def assert_as_good_as_torch(x, mask, scale, causal):
    """Error against fp64 of the same inputs at most that of plain torch in the same dtype."""
    gradient = seeded(*x.shape, seed=7, dtype=x.dtype, device=x.device)
    exact = forward_and_backward(reference_scaled_masked_softmax, x.double(), gradient.double(), mask, scale, causal)
    plain = forward_and_backward(plain_softmax, x, gradient, mask, scale, causal)
    ours = forward_and_backward(scaled_masked_softmax, x, gradient, mask, scale, causal)
    unit = torch.finfo(x.dtype).eps
    for got, same_dtype, truth, most, rms in zip(ours, plain, exact, (1.25, 2.0), (1.05, 1.25), strict=True):
        assert got.dtype == x.dtype
        error, allowed = (got - truth).abs(), (same_dtype - truth).abs()
        size = truth.abs().max()
        assert error.max() <= most * allowed.max() + 2 * unit * size
        assert error.square().mean().sqrt() <= rms * allowed.square().mean().sqrt() + 0.05 * unit * size


LENGTHS = [1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 129, 257, 1025]


@pytest.mark.parametrize(
    ("columns", "dtype"), [*((c, torch.bfloat16) for c in LENGTHS[::2]), (65, torch.float16), (65, torch.float32)]
)
@pytest.mark.usefixtures("kernels")
def test_every_length(columns, dtype):
    assert_as_good_as_torch(seeded(2, 3, 5, columns, dtype=dtype), None, 0.7, False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [*LENGTHS, 2048, 4095, 8192, 16384, 16385, 32768, 32769, 65536, 131072, 131071])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_every_length_on_a_gpu(columns, dtype, causal, masked):
    mask = random_mask(2, 1, 5, columns, device="cuda") if masked else None
    assert_as_good_as_torch(seeded(2, 3, 5, columns, dtype=dtype, device="cuda"), mask, 0.7, causal)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("queries", "keys"), [(1, 9), (9, 9), (5, 33), (33, 5), (70, 64)])
@pytest.mark.usefixtures("kernels")
def test_causal_is_bottom_right_aligned_and_reads_nothing_later(queries, keys, device):
    x = seeded(2, 2, queries, keys, device=device)
    gradient = seeded(*x.shape, seed=3, device=device)
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(keys - queries + 1)
    expected = forward_and_backward(reference_scaled_masked_softmax, x, gradient, hidden)
    poisoned = x.masked_fill(hidden, float("nan")), gradient.masked_fill(hidden, float("nan"))
    ours = forward_and_backward(scaled_masked_softmax, *poisoned, None, 1.0, True)
    for got, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, wanted)
        assert (got.masked_select(hidden) == 0).all()
        assert (got[:, :, : max(0, queries - keys)] == 0).all()  # queries before the first key


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [*extra(False), True])
@pytest.mark.parametrize("mask_shape", [(2, 3, 6, 21), (2, 1, 1, 21), (1, 3, 6, 1), (6, 21), (21,), (3, 1, 1), ()])
@pytest.mark.usefixtures("kernels")
def test_masks_broadcast(mask_shape, causal, device):
    mask = random_mask(*mask_shape, device=device)
    assert_as_good_as_torch(seeded(2, 3, 6, 21, device=device), mask, -1.3, causal)


@pytest.mark.parametrize("shape", [(21,), (6, 21), (3, 6, 21), (2, 2, 3, 6, 21), (2, 1, 2, 3, 6, 21)])
@pytest.mark.usefixtures("kernels")
def test_any_number_of_dimensions(shape):
    x, mask = seeded(*shape), random_mask(*(1 if n == 2 else n for n in shape))
    torch.testing.assert_close(scaled_masked_softmax(x, mask), reference_scaled_masked_softmax(x, mask))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("kernels")
def test_a_mask_may_be_strided(device):
    mask = random_mask(21, 6, 3, 2, device=device).permute(3, 2, 1, 0)
    x = seeded(21, 2, 6, 3, device=device).permute(1, 3, 2, 0)
    torch.testing.assert_close(scaled_masked_softmax(x, mask), reference_scaled_masked_softmax(x, mask))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("one_pass", [1 << 15, 16])
@pytest.mark.usefixtures("kernels")
def test_nothing_visible_gives_zero_and_nothing_hidden_leaks(one_pass, device, monkeypatch):
    monkeypatch.setattr(masked_softmax_kernels, "ONE_PASS_COLUMNS", one_pass)
    x, mask = seeded(1, 2, 4, 40, device=device), random_mask(1, 1, 4, 40, device=device)
    mask[:, :, 1] = True
    gradient = seeded(*x.shape, seed=3, device=device)
    expected = forward_and_backward(reference_scaled_masked_softmax, x, gradient, mask)
    for poison in (float("nan"), float("inf"), float("-inf")):
        spoiled = x.masked_fill(mask, poison), gradient.masked_fill(mask, poison)
        ours = forward_and_backward(scaled_masked_softmax, *spoiled, mask)
        for got, wanted in zip(ours, expected, strict=True):
            torch.testing.assert_close(got, wanted)
            assert (got[:, :, 1] == 0).all()
    assert (scaled_masked_softmax(torch.full((3, 40), float("-inf"), device=device)) == 0).all()


@pytest.mark.parametrize(("masked", "causal"), [(False, False), (True, True)])
@pytest.mark.parametrize("columns", cases([63, 65, 200], fast=1))
@pytest.mark.usefixtures("kernels")
def test_long_rows_are_read_twice_with_the_same_result(columns, masked, causal, monkeypatch):
    x = seeded(1, 2, 3, columns)
    mask = random_mask(1, 2, 1, columns) if masked else None
    gradient = seeded(*x.shape, seed=3)
    once = forward_and_backward(scaled_masked_softmax, x, gradient, mask, 0.5, causal)
    monkeypatch.setattr(masked_softmax_kernels, "ONE_PASS_COLUMNS", 0)
    monkeypatch.setattr(masked_softmax_kernels, "STEP", 64)
    twice = forward_and_backward(scaled_masked_softmax, x, gradient, mask, 0.5, causal)
    for got, wanted in zip(twice, once, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("kernels")
def test_a_row_of_131072_columns(device):
    x = seeded(1, 1, 2, 131072, device=device, scale=1.0)
    gradient = seeded(*x.shape, seed=3, device=device)
    exact = forward_and_backward(reference_scaled_masked_softmax, x.double(), gradient.double(), None, 1.0, True)
    ours = forward_and_backward(scaled_masked_softmax, x, gradient, None, 1.0, True)
    for got, truth in zip(ours, exact, strict=True):
        torch.testing.assert_close(got.double(), truth, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("magnitude", [1e4, 65504.0])
@pytest.mark.usefixtures("kernels")
def test_large_scores_lose_nothing(magnitude):
    x = seeded(1, 1, 4, 50, scale=1.0) + magnitude * torch.tensor([1.0, -1.0]).repeat(25)
    torch.testing.assert_close(scaled_masked_softmax(x), reference_scaled_masked_softmax(x), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("one_pass", [1 << 15, 0])
@pytest.mark.parametrize("causal", [*extra(False), True])
@pytest.mark.usefixtures("kernels")
def test_gradients_of_the_kernels_in_fp64(one_pass, causal, monkeypatch):
    monkeypatch.setattr(masked_softmax_kernels, "ONE_PASS_COLUMNS", one_pass)
    monkeypatch.setattr(masked_softmax_kernels, "STEP", 4)
    monkeypatch.setattr(masked_softmax_kernels, "VECTOR", 2)
    x = seeded(1, 1, 3, 5, dtype=torch.float64, scale=1.0).requires_grad_()
    mask = torch.tensor([False, True, False, False, False])
    torch.autograd.gradcheck(lambda t: scaled_masked_softmax(t, mask, 0.8, causal), (x,), fast_mode=True)


def test_gradients_in_plain_torch():
    x = seeded(1, 2, 4, 19, dtype=torch.float64, scale=1.0).requires_grad_()
    mask = random_mask(2, 1, 19)
    torch.autograd.gradcheck(lambda t: scaled_masked_softmax(t, mask, 0.8, True), (x,), fast_mode=True)
    torch.autograd.gradcheck(lambda t: reference_scaled_masked_softmax(t, mask, 0.8, True), (x,), fast_mode=True)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("kernels")
def test_nothing_to_do(shape, causal):
    x = torch.zeros(shape, requires_grad=True)
    output = scaled_masked_softmax(x, None, 1.0, causal)
    assert output.shape == x.shape
    assert torch.autograd.grad(output.sum(), x)[0].shape == x.shape


def with_sinks(function, x, output_gradient, sinks, *arguments):
    """Return probabilities and the gradients of x and sinks."""
    leaves = x.detach().requires_grad_(), sinks.detach().requires_grad_()
    output = function(leaves[0], *arguments, sinks=leaves[1])
    return output.detach(), *torch.autograd.grad(output, leaves, output_gradient)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "one_pass"),
    cases(product((torch.float64, torch.float32, torch.bfloat16), (1 << 15, 16)), fast=3),
)
@pytest.mark.usefixtures("kernels")
def test_sinks_take_part_in_the_denominator(dtype, one_pass, device, monkeypatch):
    """Against a softmax over one more column, of the same rounded inputs; rows without keys included."""
    if dtype == torch.float64 and device != "cpu":
        pytest.skip("GPUs compute in fp32")
    monkeypatch.setattr(masked_softmax_kernels, "ONE_PASS_COLUMNS", one_pass)
    x, mask = seeded(2, 3, 7, 40, dtype=dtype, device=device), random_mask(2, 1, 1, 40, device=device)
    mask[1] = True
    gradient = seeded(*x.shape, seed=3, dtype=dtype, device=device)
    accumulate = torch.promote_types(dtype, torch.float32)
    sinks = torch.tensor([-30.0, 0.0, 4.0], device=device, dtype=accumulate)
    exact = with_sinks(reference_scaled_masked_softmax, x.double(), gradient.double(), sinks.double(), mask, 0.5, True)
    ours = with_sinks(scaled_masked_softmax, x, gradient, sinks, mask, 0.5, True)
    unit = torch.finfo(dtype).eps
    assert ours[2].dtype == accumulate
    assert not ours[0][1].any()
    for got, truth in zip(ours, exact, strict=True):
        assert (got - truth).abs().max() <= 4 * unit * max(truth.abs().max(), 0.25)


def test_sinks_in_plain_torch():
    x = seeded(2, 2, 4, 9, dtype=torch.float64, scale=1.0).requires_grad_()
    sinks = torch.tensor([0.3, -1.0], dtype=torch.float64, requires_grad=True)
    for function in (scaled_masked_softmax, reference_scaled_masked_softmax):
        torch.autograd.gradcheck(lambda t, s, f=function: f(t, None, 0.8, True, s), (x, sinks), fast_mode=True)
    for wrong in (torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="`sinks`"):
            scaled_masked_softmax(x, sinks=wrong)


@pytest.mark.parametrize("device", DEVICES)
def test_the_operations_are_well_formed(device):
    x = seeded(2, 2, 5, 9, device=device).requires_grad_()
    mask = random_mask(2, 1, 1, 9, device=device)
    torch.library.opcheck(_scaled_masked_softmax, (x, mask, 0.5, True))
    plain = (x.detach(), x.detach().abs(), 0.5, True)
    torch.library.opcheck(_scaled_masked_softmax_backward, plain, test_utils=("test_schema", "test_faketensor"))
    sinks = torch.zeros(2, device=device, requires_grad=True)
    torch.library.opcheck(_softmax_with_sinks, (x, mask, 0.5, True, sinks))


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_as_one_graph(device):
    x, mask = seeded(2, 2, 5, 9, device=device), random_mask(2, 1, 1, 9, device=device)
    gradient = seeded(*x.shape, seed=3, device=device)
    compiled = torch.compile(scaled_masked_softmax, fullgraph=True, backend="aot_eager")
    ours = forward_and_backward(compiled, x, gradient, mask, 0.5, True)
    expected = forward_and_backward(scaled_masked_softmax, x, gradient, mask, 0.5, True)
    for got, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_only_the_probabilities_are_kept():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        scaled_masked_softmax(seeded(2, 2, 5, 9).requires_grad_(), random_mask(2, 1, 5, 9), 0.5, True)
    assert kept == [(2, 2, 5, 9)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("kernels")
def test_equal_calls_give_equal_bits(device):
    x, mask = seeded(2, 2, 9, 300, device=device), random_mask(2, 1, 1, 300, device=device)
    gradient = seeded(*x.shape, seed=3, device=device)
    first = forward_and_backward(scaled_masked_softmax, x, gradient, mask, 0.5, True)
    assert all(
        torch.equal(a, b)
        for a, b in zip(first, forward_and_backward(scaled_masked_softmax, x, gradient, mask, 0.5, True), strict=True)
    )


# ---------------------------------------------------------------- in unfused attention


def padding(batch, keys):
    kept = torch.ones(batch, keys, dtype=torch.bool)
    kept[0, keys - 3 :] = False
    kept[1] = False  # a sequence that is nothing but padding
    return kept


UNFUSED: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "padding": {"causal": True, "key_padding_mask": padding(2, 11)},
    "window": {"causal": True, "window_size": (3, 0)},
    "two_sided_window": {"causal": False, "window_size": (1, 2)},
    "packed": {
        "causal": True,
        "packed": PackedSequences.from_documents(
            torch.tensor([[0] * 4 + [1] * 7, [0] * 11]), dtype=torch.float32, causal=True
        ),
    },
    "bias": {"causal": True, "bias": seeded(1, 4, 11, 11)},
    "softcap": {"causal": True, "softcap": 2.0},
}


@pytest.mark.parametrize("case", UNFUSED)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("kernels")
def test_unfused_attention_is_the_same_with_the_fused_softmax(case, device, monkeypatch):
    monkeypatch.setattr(unfused, "triton_runs_on", lambda tensor: True)
    seen: list[tuple[Any, bool]] = []
    monkeypatch.setattr(
        unfused,
        "scaled_masked_softmax",
        lambda x, mask, causal, sinks: (
            seen.append((mask, causal)) or scaled_masked_softmax(x, mask, 1.0, causal, sinks)
        ),
    )
    q, k, v = (
        seeded(2, 11, heads, 8, seed=heads + i, scale=1.0, device=device).requires_grad_()
        for i, heads in enumerate((4, 2, 2))
    )
    options: dict[str, Any] = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in UNFUSED[case].items()
    }
    if case == "packed":
        moved: list[Any] = [part.to(device) if isinstance(part, torch.Tensor) else part for part in options["packed"]]
        options["packed"] = PackedSequences(*moved)
    found = []
    for fusion in (True, False):
        context = attend(UnfusedAttention(masked_softmax_fusion=fusion), q, k, v, softmax_scale=0.4, **options)
        gradients = torch.autograd.grad(context, (q, k, v), seeded(*context.shape, seed=9, device=device))
        found.append((context, *gradients))
    for fused, plain in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)

    ((mask, causal),) = seen  # without fusion it is not called
    assert causal == (options["causal"] and case != "packed")
    if case in ("causal", "full", "bias", "softcap"):
        assert mask is None
    if case == "padding":
        assert mask is not None
        assert mask.shape == (2, 1, 1, 11)  # not queries x keys


@looped(
    ("x", "mask", "causal", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), None, False, "`x` must be floating.*int64"),
        (torch.zeros(3), None, True, r"`x` must be .*queries, keys.*\(3,\)"),
        (torch.zeros(2, 3), torch.zeros(2, 3), False, "`mask` must be bool.*float32"),
        (torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.bool), False, r"`mask` \(2, 2\) must broadcast.*\(2, 3\)"),
        (torch.zeros(3), torch.zeros(2, 3, dtype=torch.bool), False, r"`mask` \(2, 3\) must broadcast.*\(3,\)"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.bool, device="meta"), False, "`mask` must be on the device"),
    ],
)
def test_bad_input_is_named(x, mask, causal, message):
    with pytest.raises(ValueError, match=message):
        scaled_masked_softmax(x, mask, 1.0, causal)
