"""Linear cross-entropy: value and gradients against all logits at once, in torch and in the Triton interpreter."""

from typing import Any

import pytest
import torch
from tiers import DEVICES, cases, full_only, looped

from stoker.kernels import cross_entropy
from stoker.kernels.cross_entropy import (
    _linear_cross_entropy,
    _loss_per_token,
    can_accumulate_in_gemm,
    default_chunk_tokens,
    linear_cross_entropy,
    reference_linear_cross_entropy,
    triton_loss_and_gradient_,
)


def inputs(tokens, hidden_size, vocab, dtype, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, hidden_size, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, hidden_size, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocab - 3, (tokens,), generator=generator)
    labels[::5] = -100
    return (
        hidden.to(device, dtype).requires_grad_(),
        weight.to(device, dtype).requires_grad_(),
        labels.to(device),
    )


def saved_by(loss):
    assert loss.grad_fn is not None
    return loss.grad_fn.saved_tensors


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
def test_value_and_gradients_do_not_depend_on_the_chunks(chunk):
    hidden, weight, labels = inputs(37, 12, 29, torch.float64)
    expected = reference_linear_cross_entropy(hidden, weight, labels, valid_vocab=26)
    expected_gradients = torch.autograd.grad(expected / 3, (hidden, weight))
    value = linear_cross_entropy(hidden, weight, labels, valid_vocab=26, chunk_tokens=chunk)
    gradients = torch.autograd.grad(value / 3, (hidden, weight))
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    assert gradients[1][26:].abs().max() == 0


@looped("chunk", [5, 1000])
@looped("smoothing", [0.0, 0.1])
@looped("softcap", [0.0, 2.5])
def test_bias_softcap_and_label_smoothing(chunk, smoothing, softcap):
    hidden, weight, labels = inputs(37, 12, 29, torch.float64)
    bias = torch.randn(29, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
    leaves, options = (
        (hidden, weight, bias),
        {"valid_vocab": 26, "bias": bias, "label_smoothing": smoothing, "softcap": softcap},
    )
    expected = reference_linear_cross_entropy(hidden, weight, labels, **options)
    value = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk, **options)
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)
    expected_gradients = torch.autograd.grad(expected / 3, leaves)
    for ours, theirs in zip(torch.autograd.grad(value / 3, leaves), expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    plain = linear_cross_entropy(hidden, weight, labels, valid_vocab=26)
    assert abs(value - plain) > 1e-2


@looped("divided", [False, True])
@looped("frozen", [False, True])
def test_no_tokens_are_as_in_torch(divided, frozen):
    hidden, weight, labels = inputs(0, 12, 29, torch.float32)
    bias = torch.randn(29).requires_grad_(not frozen)
    weight.requires_grad_(not frozen)
    denominator = torch.tensor(0.0) if divided else None
    value = linear_cross_entropy(hidden, weight, labels, valid_vocab=26, bias=bias, denominator=denominator)
    plain = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="mean" if divided else "sum")
    torch.testing.assert_close(value, plain, rtol=0, atol=0, equal_nan=True)
    for leaf in (hidden,) if frozen else (hidden, weight, bias):
        (gradient,) = torch.autograd.grad(value, leaf, retain_graph=True)
        torch.testing.assert_close(gradient, torch.zeros_like(leaf), rtol=0, atol=0)


@looped("chunk", [5, 1000])
@looped("of", [torch.float32, torch.float64, torch.int64])
def test_the_sum_is_divided_with_its_gradients(chunk, of):
    hidden, weight, labels = inputs(37, 12, 29, torch.float64)
    bias = torch.randn(29, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
    options = {"valid_vocab": 26, "bias": bias, "label_smoothing": 0.1, "denominator": torch.tensor(7, dtype=of)}
    expected = reference_linear_cross_entropy(hidden, weight, labels, **options)
    value = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk, **options)
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)
    expected_gradients = torch.autograd.grad(expected / 3, (hidden, weight, bias))
    for ours, theirs in zip(torch.autograd.grad(value / 3, (hidden, weight, bias)), expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    with torch.no_grad():
        alone = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk, **options)
    torch.testing.assert_close(alone, expected, rtol=1e-13, atol=0)


def test_all_ignored_gives_zero():
    hidden, weight, labels = inputs(8, 4, 9, torch.float32)
    value = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), valid_vocab=9)
    gradients = torch.autograd.grad(value, (hidden, weight))
    assert value == 0
    assert all(g.abs().max() == 0 for g in gradients)


def test_evaluation_stores_no_gradient():
    hidden, weight, labels = inputs(8, 4, 9, torch.float32)
    with torch.no_grad():
        value = linear_cross_entropy(hidden, weight, labels, valid_vocab=9)
    expected = reference_linear_cross_entropy(hidden, weight, labels, valid_vocab=9)
    assert not value.requires_grad
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("denominator", cases([None, 48.0], fast=1))
@pytest.mark.parametrize(("tokens", "vocab", "valid"), [(5, 7, 7), (9, 300, 257), (3, 9000, 8191)])
def test_kernel_equals_torch(device, tokens, vocab, valid, denominator, smoothing, softcap):
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(tokens, vocab, generator=generator) * 8).to(device)
    labels = torch.randint(0, valid, (tokens,), generator=generator).to(device)
    labels[1] = -100
    leaf = logits[:, :valid].double().requires_grad_()
    capped = softcap * torch.tanh(leaf / softcap) if softcap else leaf
    expected = torch.nn.functional.cross_entropy(capped, labels, reduction="none", label_smoothing=smoothing)
    expected_gradient = torch.autograd.grad(expected.sum() / (denominator or 1.0), leaf)[0]
    options = {"ignore_index": -100, "with_gradient": True, "smoothing": smoothing, "softcap": softcap}
    options["denominator"] = None if denominator is None else torch.tensor(denominator, device=device)
    losses, _ = triton_loss_and_gradient_(logits, labels, valid_vocab=valid, **options)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    atol = 1e-6 / (denominator or 1.0)
    torch.testing.assert_close(logits[:, :valid].double(), expected_gradient, rtol=1e-4, atol=atol)
    assert (logits[:, valid:] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_the_logits_is_divided_before_it_is_rounded(device):
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)).to(device, torch.float16)
    labels = torch.arange(6, device=device)
    options: dict[str, Any] = {"valid_vocab": 50, "ignore_index": -100, "with_gradient": True}
    options["denominator"] = torch.tensor(5, device=device)  # int64: as targets are counted
    wide = logits.float()
    triton_loss_and_gradient_(wide, labels, **options)
    triton_loss_and_gradient_(logits, labels, **options)
    assert (logits != wide.half()).float().mean() < 0.02  # a third of them if it were rounded twice


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [-1, 5, 6, 1 << 40])
def test_a_label_that_is_no_token_makes_its_loss_nan(device, bad):
    labels = torch.tensor([1, bad, -100, 2], device=device)
    logits = torch.zeros(4, 7, device=device)
    losses, _ = triton_loss_and_gradient_(logits, labels, valid_vocab=5, ignore_index=-100, with_gradient=False)
    assert losses.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("device", DEVICES)
def test_labels_may_be_strided(device):
    labels = torch.tensor([1, 0, 2, 0, 3, 0], device=device)[::2]
    logits = torch.arange(15.0, device=device).view(3, 5)
    losses, _ = triton_loss_and_gradient_(logits.clone(), labels, valid_vocab=5, ignore_index=-100, with_gradient=False)
    torch.testing.assert_close(losses, torch.nn.functional.cross_entropy(logits, labels, reduction="none"))


@pytest.mark.gpu
def test_bf16_error_is_that_of_plain_torch():
    hidden, weight, labels = inputs(3000, 256, 5000, torch.bfloat16, "cuda")
    truth_inputs = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = reference_linear_cross_entropy(truth_inputs[0], truth_inputs[1], labels, valid_vocab=4997)
    truth_gradients = torch.autograd.grad(truth, truth_inputs)
    plain = reference_linear_cross_entropy(hidden, weight, labels, valid_vocab=4997)
    plain_gradients = torch.autograd.grad(plain, (hidden, weight))
    value = linear_cross_entropy(hidden, weight, labels, valid_vocab=4997, chunk_tokens=1024)
    gradients = torch.autograd.grad(value, (hidden, weight))
    assert abs(value.double() - truth) <= 2 * abs(plain.double() - truth) + 1e-5 * truth
    for ours, theirs, exact in zip(gradients, plain_gradients, truth_gradients, strict=True):
        assert (ours - exact).norm() <= 1.25 * (theirs - exact).norm()


@full_only
@pytest.mark.parametrize("device", DEVICES)
def test_chunks_of_16_bits_are_summed_unrounded(monkeypatch, device):
    """The gradient of the weight is rounded once: four chunks are as near to the truth as one."""
    if device == "cpu":  # which has no such matmul
        mm = torch.mm

        def wide_mm(left, right, *, out_dtype=None, **options):
            return mm(left, right, **options) if out_dtype is None else mm(left.to(out_dtype), right.to(out_dtype))

        def add_product_(total, left, right):
            total += mm(left.float(), right.float())

        monkeypatch.setattr(torch, "mm", wide_mm)
        monkeypatch.setattr(cross_entropy, "triton_runs_on", lambda tensor: True)
        monkeypatch.setattr(cross_entropy, "_addmm_fp32_", add_product_)
    hidden, weight, labels = inputs(256, 64, 96, torch.bfloat16, device)
    hidden = (hidden.detach() * 0.1).requires_grad_()  # else the rounding of the logits is most of the error
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    count = torch.tensor(204.0, device=device)
    truth = torch.autograd.grad(
        reference_linear_cross_entropy(exact[0], exact[1], labels, valid_vocab=93, denominator=count), exact
    )
    errors = []
    for chunk in (256, 64):
        value = linear_cross_entropy(hidden, weight, labels, valid_vocab=93, denominator=count, chunk_tokens=chunk)
        found = torch.autograd.grad(value, (hidden, weight))
        errors.append(
            [((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in zip(found, truth, strict=True)]
        )
    for one, four in zip(*errors, strict=True):
        assert four <= 1.05 * one < 5e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_given_away_as_they_are_and_once(monkeypatch, device, frozen):
    """On a GPU: what is saved is scaled in place, no product or copy of it is made, and it is not scaled twice."""
    if device == "cpu":  # the kernel in the interpreter
        monkeypatch.setattr(cross_entropy, "can_scale_in_place", lambda tensor: not torch.is_grad_enabled())
    hidden, weight, labels = inputs(40, 16, 32, torch.float32, device)
    bias = torch.zeros(32, device=device, requires_grad=True)
    leaves = (hidden, weight, bias)
    expected = torch.autograd.grad(
        reference_linear_cross_entropy(hidden, weight, labels, valid_vocab=29, bias=bias) / 3, leaves
    )
    if frozen:
        weight, bias = weight.detach(), bias.detach()
        leaves, expected = (hidden,), expected[:1]
    for upstream in (1.0, 1 / 3):
        for leaf in leaves:
            leaf.grad = None
        share = torch.tensor(3.0 * upstream, device=device)
        value = linear_cross_entropy(hidden, weight, labels, valid_vocab=29, bias=bias, denominator=share)
        saved = saved_by(value)
        (value * upstream if upstream != 1 else value).backward(retain_graph=True)
        for leaf, theirs in zip(leaves, expected, strict=True):
            torch.testing.assert_close(leaf.grad, theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(saved[0], expected[0], rtol=1e-4, atol=1e-5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()
        value = linear_cross_entropy(hidden, weight, labels, valid_vocab=29, bias=bias, denominator=share)
        places = [tensor.data_ptr() for tensor in saved_by(value) if tensor.numel()]
        for leaf in leaves:
            leaf.grad = None
        value.backward()
        assert [leaf.grad is not None and leaf.grad.data_ptr() for leaf in leaves] == places


@full_only
@pytest.mark.parametrize("device", DEVICES)
def test_it_compiles(device):
    hidden, weight, labels = inputs(20, 8, 16, torch.float32, device)
    count = torch.tensor(16.0, device=device)

    def loss(hidden, weight, count):
        return linear_cross_entropy(hidden, weight, labels, valid_vocab=16, denominator=count, chunk_tokens=8)

    expected = torch.autograd.grad(loss(hidden, weight, count) / 3, (hidden, weight))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(hidden, weight, count) / 3, (hidden, weight))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@full_only
def test_custom_operation_is_well_formed():
    hidden, weight, labels = inputs(10, 4, 9, torch.float64)
    torch.library.opcheck(_linear_cross_entropy, (hidden, weight, labels, 9, -100, 4, True))
    bias = torch.zeros(9, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(_linear_cross_entropy, (hidden, weight, labels, 9, -100, 4, True, bias, 0.1, 3.0))
    count = torch.tensor(8.0, dtype=torch.float64)
    torch.library.opcheck(
        _linear_cross_entropy, (hidden, weight, labels, 9, -100, 4, True, bias, 0.1, 3.0, False, count)
    )


def test_chunks_shrink_with_the_vocabulary():
    assert default_chunk_tokens(384, cuda=False) > default_chunk_tokens(50304, cuda=False)
    assert default_chunk_tokens(32000, cuda=True) == 8192
    assert default_chunk_tokens(1 << 20, cuda=True) == 2048


def test_only_aligned_matrices_of_16_bits_are_summed_in_the_matmul():
    assert can_accumulate_in_gemm(32000, 1024, width=2, cuda=True)
    for vocab, hidden_size, width, cuda in ((32001, 1024, 2, True), (32000, 100, 2, True), (32000, 1024, 4, True)):
        assert not can_accumulate_in_gemm(vocab, hidden_size, width=width, cuda=cuda)
    assert not can_accumulate_in_gemm(32000, 1024, width=2, cuda=False)


def test_bad_shapes_are_named():
    hidden, weight, labels = inputs(8, 4, 9, torch.float32)
    with pytest.raises(ValueError, match="must be"):
        linear_cross_entropy(hidden, weight[:, :3], labels, valid_vocab=9)
    with pytest.raises(ValueError, match="valid_vocab"):
        linear_cross_entropy(hidden, weight, labels, valid_vocab=10)
    with pytest.raises(ValueError, match="bias"):
        linear_cross_entropy(hidden, weight, labels, valid_vocab=9, bias=hidden[:3, 0])
    with pytest.raises(ValueError, match="label_smoothing"):
        linear_cross_entropy(hidden, weight, labels, valid_vocab=9, label_smoothing=1.0)
    with pytest.raises(ValueError, match=r"denominator.*\(1,\)"):
        linear_cross_entropy(hidden, weight, labels, valid_vocab=9, denominator=torch.ones(1))


# ---------------------------------------------------------------- z-loss and losses of each token

PER_TOKEN = {
    "plain": {},
    "z_loss": {"z_loss": 0.05},
    "all": {"z_loss": 0.05, "softcap": 2.5, "label_smoothing": 0.1},
}


@looped("chunk", [5, 1000])
@looped("option", PER_TOKEN)
@looped("reduction", ["sum", "none"])
@looped("frozen", [False, True])
def test_z_loss_and_losses_of_each_token(chunk, option, reduction, frozen):
    """Against autograd of all logits at once, with a gradient of each loss that is known in the backward only."""
    hidden, weight, labels = inputs(37, 12, 29, torch.float64)
    weight.requires_grad_(not frozen)
    bias = torch.randn(29, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_(not frozen)
    options: dict[str, Any] = {"valid_vocab": 26, "bias": bias, "reduction": reduction} | PER_TOKEN[option]
    leaves = (hidden,) if frozen else (hidden, weight, bias)
    value = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk, **options)
    expected = reference_linear_cross_entropy(hidden, weight, labels, **options)
    upstream = torch.randn(value.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=1e-13)
    found = torch.autograd.grad(value, leaves, upstream)
    for ours, theirs in zip(found, torch.autograd.grad(expected, leaves, upstream), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    if reduction == "none":
        assert value.shape == labels.shape
        assert not value[labels == -100].any()
        with torch.no_grad():
            assert torch.equal(linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk, **options), value)
    if option != "plain":
        assert abs(value.sum() - linear_cross_entropy(hidden, weight, labels, valid_vocab=26, bias=bias)) > 1e-2


def test_the_z_loss_is_that_of_palm():
    """z log^2 Z of each token beside its cross-entropy, written out."""
    hidden, weight, labels = inputs(11, 6, 9, torch.float64)
    kept = labels != -100
    logsumexp = (hidden @ weight.t())[kept].logsumexp(-1)
    with_z, without = (linear_cross_entropy(hidden, weight, labels, valid_vocab=9, z_loss=z) for z in (1e-2, 0.0))
    torch.testing.assert_close(with_z - without, 1e-2 * logsumexp.square().sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("tokens", "vocab", "valid"), [(5, 7, 7), (3, 9000, 8191)])
def test_kernel_with_z_loss_and_row_weights_equals_torch(device, tokens, vocab, valid):
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(tokens, vocab, generator=generator) * 8).to(device)
    labels = torch.randint(0, valid, (tokens,), generator=generator).to(device)
    labels[1] = -100
    row_weights = torch.linspace(-1.0, 2.0, tokens, device=device)
    leaf = logits[:, :valid].double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(leaf, labels, reduction="none")
    expected = expected + 0.01 * leaf.logsumexp(-1).square() * (labels != -100)
    expected_gradient = torch.autograd.grad(expected, leaf, row_weights.double())[0]
    options = {"ignore_index": -100, "with_gradient": True, "z_loss": 0.01, "row_weights": row_weights}
    losses, _ = triton_loss_and_gradient_(logits, labels, valid_vocab=valid, **options)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[:, :valid].double(), expected_gradient, rtol=1e-4, atol=2e-6)
    assert (logits[:, valid:] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_z_loss_in_bf16_on_a_gpu(reduction):
    hidden, weight, labels = inputs(3000, 256, 5000, torch.bfloat16, "cuda")
    hidden = (hidden.detach() * 0.1).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    options = {"valid_vocab": 4997, "z_loss": 1e-2, "reduction": reduction}
    upstream = torch.rand(labels.shape if reduction == "none" else (), device="cuda")
    truth = reference_linear_cross_entropy(exact[0], exact[1], labels, **options)
    plain = reference_linear_cross_entropy(hidden, weight, labels, **options)
    value = linear_cross_entropy(hidden, weight, labels, chunk_tokens=1024, **options)
    assert (value.double() - truth).norm() <= 2 * (plain.double() - truth).norm() + 1e-5 * truth.norm()
    gradients = [
        torch.autograd.grad(loss, leaves, upstream.to(loss))
        for loss, leaves in ((truth, exact), (plain, (hidden, weight)), (value, (hidden, weight)))
    ]
    # of the sum, the gradients are made in the forward pass and multiplied by that of the loss: one more rounding
    times = 1.25 if reduction == "none" else 1.25 * 2**0.5
    for wanted, theirs, ours in zip(*gradients, strict=True):
        assert (ours - wanted).norm() <= times * (theirs - wanted).norm()


@pytest.mark.gpu
def test_losses_of_each_token_hold_the_logits_of_a_chunk_only():
    tokens, vocab = 16384, 64000
    hidden, weight, labels = inputs(tokens, 128, vocab, torch.bfloat16, "cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(
        hidden, weight, labels, valid_vocab=vocab, reduction="none", chunk_tokens=2048
    ).mean().backward()
    assert torch.cuda.max_memory_allocated() - before < tokens * vocab * 2 / 4


def test_operations_of_each_token_are_well_formed():
    hidden, weight, labels = inputs(10, 4, 9, torch.float64)
    bias = torch.zeros(9, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(_loss_per_token, (hidden, weight, labels, bias, 9, -100, 4, 0.1, 3.0, 0.01))
    empty = linear_cross_entropy(hidden[:0], weight, labels[:0], valid_vocab=9, reduction="none")
    assert empty.shape == (0,)
    assert not torch.autograd.grad(empty.sum(), weight)[0].any()


@looped(
    ("options", "message"),
    [
        ({"z_loss": -1.0}, r"`z_loss` \(-1.0\)"),
        ({"z_loss": float("nan")}, r"`z_loss` \(nan\)"),
        ({"reduction": "mean"}, r"`reduction` \(mean\) must be sum or none"),
        ({"reduction": "none", "denominator": torch.tensor(1.0)}, "`denominator` must be None"),
    ],
)
def test_options_that_do_not_fit_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(*inputs(8, 4, 9, torch.float32), valid_vocab=9, **options)
