"""AdamW: equal to torch's own, kernel equal to the reference, 16-bit weights follow their main weights."""

import pytest
import torch
from cuda_sync import forbid_device_sync
from tiers import DEVICES, extra

from stoker.kernels.optim import adamw_kernel, multi_tensor
from stoker.kernels.optim.adamw_kernel import adamw_step, reference_adamw_step, triton_adamw_step

SETTINGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def tensors(shapes, dtype, seed, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes]


def number(step, device="cpu"):
    return torch.tensor(step, dtype=torch.float64, device=device)


def test_equals_torch_adamw_in_fp64():
    shapes = [(7, 5), (11,)]
    weights = tensors(shapes, torch.float64, 0)
    theirs = [w.clone().requires_grad_() for w in weights]
    optimizer = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    moments = [[torch.zeros_like(w) for w in weights] for _ in range(2)]
    for step in range(1, 6):
        gradients = tensors(shapes, torch.float64, step)
        for weight, gradient in zip(theirs, gradients, strict=True):
            weight.grad = gradient * 0.5
        optimizer.step()
        adamw_step(weights, weights, gradients, *moments, step=number(step), grad_scale=torch.tensor(0.5), **SETTINGS)
    for ours, expected in zip(weights, theirs, strict=True):
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("separate", [False, True])
def test_kernel_equals_reference(device, scaled, separate):
    rates = torch.tensor([0.5, 1.0, 20.0], device=device) if scaled else None
    shapes = [(33, 65), (1,), (1025,)]
    state = {}
    for name, function in (("reference", reference_adamw_step), ("triton", triton_adamw_step)):
        main = tensors(shapes, torch.float32, 0, device)
        params = [w.to(torch.float16) for w in main] if separate else main
        moments = [[torch.zeros_like(w) for w in main] for _ in range(2)]
        for step in range(1, 4):
            gradients = tensors(shapes, torch.float16 if separate else torch.float32, step, device)
            scale = torch.tensor(0.7, device=device)
            step_of = {"step": number(step, device), "grad_scale": scale, "lr_scales": rates}
            function(params, main, gradients, *moments, **step_of, **SETTINGS)
        state[name] = [*params, *main, *moments[0], *moments[1]]
    for ours, expected in zip(state["triton"], state["reference"], strict=True):
        tolerance = 2e-3 if ours.dtype == torch.float16 else 2e-6
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    if separate:
        count = len(shapes)
        for param, main in zip(state["triton"][:count], state["triton"][count : 2 * count], strict=True):
            assert torch.equal(param, main.to(torch.float16))


SIZES = [1, 3, 1023, 1024, 0, 1025, 5000, 4096]
KINDS = {
    "fp32": (torch.float32,) * 3,
    "mixed": (torch.bfloat16, torch.float32, torch.bfloat16),
    "fp32 gradients": (torch.bfloat16, torch.float32, torch.float32),
    "bf16": (torch.bfloat16,) * 3,
}


def arrays(kind, device, *, offset=0):
    """Param, main and both moments, some of which begin `offset` elements after a multiple of 16 bytes."""
    of_param, of_main, _ = KINDS[kind]
    longer = [size + offset for size in SIZES]
    main = [whole[offset:] for whole in tensors(longer, of_main, 0, device)]
    params = main if of_param == of_main else [weight.to(of_param) for weight in main]
    moments = [[whole[offset:].abs() for whole in tensors(longer, of_main, seed, device)] for seed in (1, 2)]
    return [params, main, *moments]


def gradients_of(kind, step, device):
    return tensors(SIZES, KINDS[kind][2], 10 + step, device)


def expected_after(state, gradients, **given):
    """Return the reference step of the arrays in fp32, rounded."""
    before = [[tensor.to(torch.float32, copy=True) for tensor in part] for part in (state[1], gradients, *state[2:])]
    reference_adamw_step(before[0], *before, **given, **SETTINGS)
    after = [before[0], before[0], *before[2:]]
    return [[w.to(old.dtype) for w, old in zip(part, now, strict=True)] for part, now in zip(after, state, strict=True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("offset", "scaled"), [*extra((0, False), (0, True)), (1, True)])
def test_many_tensors_of_any_size_equal_the_reference(device, kind, offset, scaled):
    state = arrays(kind, device, offset=offset)
    rates = torch.linspace(0.5, 8.0, len(SIZES), device=device) if scaled else None
    for step in (1, 2, 3):  # the gradients are elsewhere every time
        gradients = gradients_of(kind, step, device)
        given = {"step": number(step, device), "grad_scale": torch.tensor(0.7, device=device), "lr_scales": rates}
        expected = expected_after(state, gradients, **given)
        triton_adamw_step(state[0], state[1], gradients, *state[2:], **given, **SETTINGS)
        for part, of_reference in zip(state, expected, strict=True):
            for ours, theirs in zip(part, of_reference, strict=True):
                tolerance = 2**-7 if ours.dtype == torch.bfloat16 else 2e-6
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=2e-6)
        for param, main in zip(*state[:2], strict=True):
            assert torch.equal(param, main.to(param.dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["fp32", "mixed"])
def test_a_negative_scale_leaves_all_as_it_is(device, kind):
    state = arrays(kind, device)
    before = [[tensor.clone() for tensor in part] for part in state]
    gradients = [torch.full_like(gradient, torch.nan) for gradient in gradients_of(kind, 1, device)]
    given = {"step": number(1, device), "grad_scale": torch.tensor(-1.0, device=device)}
    triton_adamw_step(state[0], state[1], gradients, *state[2:], **given, **SETTINGS)
    for part, old in zip(state, before, strict=True):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(part, old, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_may_have_other_strides(device):
    states = [[tensors([(33, 40)], torch.float32, seed, device) for seed in (0, 3, 4)] for _ in range(2)]
    gradient = tensors([(40, 33)], torch.float32, 5, device)[0].T
    given = {"step": number(1, device), "grad_scale": torch.tensor(1.0, device=device), **SETTINGS}
    for (main, *moments), one in zip(states, (gradient, gradient.contiguous()), strict=True):
        triton_adamw_step(main, main, [one], [moments[0][0]], [moments[1][0].abs_()], **given)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(*states, strict=True))


def test_tensors_of_the_same_dtypes_are_one_launch(monkeypatch):
    launched = []

    class Counted:
        def __getitem__(self, grid):
            launched.append(grid)
            return lambda *arguments, **options: None

    monkeypatch.setattr(adamw_kernel, "_adamw_kernel", Counted())
    main = tensors([(16, 64)] * 200, torch.float32, 0)
    params = [weight.bfloat16() for weight in main[:100]] + main[100:]
    given = {"step": number(1), "grad_scale": torch.tensor(1.0), **SETTINGS}
    for _ in range(2):
        triton_adamw_step(params, main, main, main, main, **given)
    assert launched == [(100,), (100,)] * 2


def test_a_table_is_copied_to_the_device_once():
    multi_tensor._on_device.cache_clear()
    rows = [(5, 100), (2**33, 200), (7, 300)]
    first = multi_tensor.build_tensor_table(rows, 1024, torch.device("cpu"))
    assert first.columns.tolist() == [[0, 1, 1 + 2**23], [5, 2**33, 7], [100, 200, 300]]
    assert first[1:] == (3, 2, 2 + 2**23)
    assert multi_tensor.build_tensor_table(rows, 1024, torch.device("cpu")).columns is first.columns
    moved = multi_tensor.build_tensor_table([*rows[:2], (7, 308)], 1024, torch.device("cpu"))
    assert moved.columns[2].tolist() == [100, 200, 308]


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_device():
    state, gradients = arrays("mixed", "cuda"), gradients_of("mixed", 1, "cuda")
    given = {"step": number(1, "cuda"), "grad_scale": torch.tensor(1.0, device="cuda"), **SETTINGS}
    multi_tensor._on_device.cache_clear()
    with forbid_device_sync():
        triton_adamw_step(state[0], state[1], gradients, *state[2:], **given)
