"""AdamW of a run: torch's own in fp64, decay groups, clipping, fp32 main weights and accumulation."""

import copy

import pytest
import torch
from torch import nn

from stoker.trainer.optim.adamw import AdamW
from stoker.trainer.optim.base_optimizer import has_weight_decay
from stoker.trainer.optim.gradient_clipping import clip_coefficient, global_norm

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 5)

    def forward(self, ids):
        return self.linear(self.norm(self.table(ids)))


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return Net().to(dtype)


def backward(model, step):
    ids = torch.randint(7, (11,), generator=torch.Generator().manual_seed(step))
    model(ids).square().sum().backward()


def norm_of_gradients(model):
    return global_norm([parameter.grad for parameter in model.parameters()])


def test_five_clipped_steps_equal_torch_adamw_in_fp64():
    ours, theirs = net(), net()
    optimizer = AdamW(ours.named_parameters(), clip_norm=0.5, **SETTINGS)
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    reference = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], **SETTINGS)
    for step in range(5):
        lr = 1e-2 / (step + 1)
        optimizer.set_lr(lr)
        backward(ours, step)
        optimizer.step()
        for group in reference.param_groups:
            group["lr"] = lr
        backward(theirs, step)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-12, atol=0)
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
    assert all(p.grad is None for p in ours.parameters())


@pytest.mark.parametrize("norms_decay", [False, True])
def test_only_matrices_decay_and_norm_weights_on_demand(norms_decay):
    optimizer = AdamW(net().named_parameters(), norms_decay=norms_decay, **SETTINGS)
    decaying = {name for group in optimizer.param_groups if group["weight_decay"] for name in group["names"]}
    assert decaying == {"table.weight", "linear.weight"} | ({"norm.weight"} if norms_decay else set())
    others = ("norm.bias", "attention.head_scale", "score_positions.raw_p", "mlp.down.ia3")
    assert not any(has_weight_decay(name, torch.zeros(3), norms_decay=True) for name in others)


@pytest.mark.parametrize(("clip", "expected"), [(1.0, 0.2), (10.0, 1.0), (0.0, 1.0), (None, 1.0)])
def test_gradients_are_only_ever_scaled_down(clip, expected):
    norm = global_norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
    assert norm == 5.0
    assert clip_coefficient(norm, clip) == pytest.approx(expected, rel=1e-6)


def test_norm_of_bf16_gradients_is_summed_in_fp32():
    gradients = [torch.full((1000,), 0.01, dtype=torch.bfloat16) for _ in range(50)]
    expected = torch.stack([g.double() for g in gradients]).norm()
    torch.testing.assert_close(global_norm(gradients).double(), expected, rtol=1e-6, atol=0)


def test_bf16_weights_follow_fp32_main_weights():
    model = net(torch.bfloat16)
    optimizer = AdamW(model.named_parameters(), main_weights=True, **{**SETTINGS, "lr": 1e-5, "weight_decay": 0.0})
    before = copy.deepcopy(model.state_dict())
    state = {name: piece.local for name, piece in optimizer.local_shards().items()}
    start = state["linear.weight.main"].clone()
    for step in range(20):
        backward(model, step)
        optimizer.step()
    # Steps of 1e-5 vanish in bf16 weights of 0.3 one by one, not in the fp32 ones.
    moved = (state["linear.weight.main"] - start).abs()
    assert moved.max() > 1e-4
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state[f"{name}.main"].bfloat16())
    assert not all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_micro_batches_accumulate_in_fp32():
    model = net(torch.bfloat16)
    optimizer = AdamW(model.named_parameters(), main_weights=True, **SETTINGS)
    weight = model.linear.weight
    small = torch.full_like(weight, 2.0**-10)
    for value in [torch.ones_like(weight), *[small] * 4]:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        weight.grad = value
        optimizer.accumulate()
        assert weight.grad is None
    optimizer.step()
    # In bf16 1 + 2**-10 is 1: the sum would have stayed 1.
    expected = (1 + 4 * 2.0**-10) * weight.numel() ** 0.5
    torch.testing.assert_close(optimizer.grad_norm, torch.tensor(expected), rtol=1e-6, atol=0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.accumulate()
    optimizer.step()
    assert optimizer.grad_norm == 0  # the sum starts anew after every step


def test_a_step_takes_the_sums_or_the_gradients_whichever_are_new():
    model = net(torch.bfloat16)
    optimizer = AdamW(model.named_parameters(), main_weights=True, **SETTINGS)
    backward(model, 0)
    expected = norm_of_gradients(model)
    optimizer.accumulate()
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, expected)
    backward(model, 1)
    expected = norm_of_gradients(model)
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, expected)


def test_a_parameter_without_gradient_is_named():
    optimizer = AdamW(net().named_parameters(), **SETTINGS)
    with pytest.raises(ValueError, match=r"`table\.weight` has no gradient"):
        optimizer.step()


def test_state_is_named_after_the_parameters():
    fp32 = AdamW(net(torch.float32).named_parameters(), **SETTINGS)
    assert "linear.bias.exp_avg_sq" in fp32.local_shards()
    assert not any(name.endswith(".main") for name in fp32.local_shards())
    bf16 = AdamW(net(torch.bfloat16).named_parameters(), main_weights=True, **SETTINGS)
    assert {piece.local.dtype for piece in bf16.local_shards().values()} == {torch.float32}
    pure = AdamW(net(torch.bfloat16).named_parameters(), **SETTINGS)
    assert {piece.local.dtype for piece in pure.local_shards().values()} == {torch.bfloat16}


def test_main_weights_are_recorded_even_where_they_are_the_parameters():
    model = net(torch.float32)
    optimizer = AdamW(model.named_parameters(), main_weights=True, **SETTINGS)
    main = optimizer.local_shards()["linear.weight.main"].local
    assert main.data_ptr() == model.linear.weight.data_ptr()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    model = net()
    optimizer = AdamW(model.named_parameters(), clip_norm=1.0, **SETTINGS)
    backward(model, 0)
    optimizer.step()
    before = copy.deepcopy([*model.parameters(), *(piece.local for piece in optimizer.local_shards().values())])
    backward(model, 1)
    gradient = model.norm.weight.grad
    assert gradient is not None
    gradient[2] = bad
    optimizer.step()
    after = [*model.parameters(), *(piece.local for piece in optimizer.local_shards().values())]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert optimizer.grad_norm is not None
    assert not optimizer.grad_norm.isfinite()
    assert optimizer.step_count == 1
