"""Dynamic loss scale of fp16: its rule, skipped steps, resume, and losses close to fp32."""

import json
import math
from typing import Any

import pytest
import torch
from distributed_runs import Planted, difference
from run_metrics import metric_rows
from tiers import TIER, extra
from tiny_run import tiny_config

from stoker.models.gpt import GPT
from stoker.trainer.callbacks.divergence import DivergedError, LossMonitor
from stoker.trainer.checkpoint.loop_state import LoopState
from stoker.trainer.lightning.lightning_module import LanguageModule, StepMetrics
from stoker.trainer.optim.adamw import AdamW
from stoker.trainer.optim.loss_scale import LossScale
from stoker.trainer.optim.sgd import SGD
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import UserError

CPU = torch.device("cpu")
INF = math.inf


def scales(initial, interval, hysteresis, finite):
    """Scale after each step, which is finite (1) or not (0)."""
    scale, found = LossScale(initial, interval, hysteresis, CPU), []
    for step in finite:
        scale.update(torch.tensor(step == "1"))
        found.append(scale.scale.item())
    return found


@pytest.mark.parametrize(
    ("hysteresis", "finite", "expected"),
    [
        (1, "0111011", [4, 4, 4, 8, 4, 4, 4]),
        (2, "001111", [8, 4, 4, 4, 8, 8]),
        # good steps do not renew the tolerance, only growth does
        (2, "010111010", [8, 8, 4, 4, 4, 8, 8, 8, 4]),
        (1, "00000", [4, 2, 1, 1, 1]),
        (3, "0000", [8, 8, 4, 2]),
        (1, "110110111", [8, 8, 4, 4, 4, 2, 2, 2, 4]),
    ],
)
def test_the_scale_follows_the_rule_of_megatron(hysteresis, finite, expected):
    assert scales(8, 3, hysteresis, finite) == expected


def reference(finite, scale, interval, hysteresis):
    growth, tolerated = 0, hysteresis
    for step in finite:
        if not step:
            growth, tolerated = 0, tolerated - 1
            scale = max(scale * 0.5, 1.0) if tolerated <= 0 else scale
        else:
            growth += 1
            if growth == interval:
                growth, tolerated, scale = 0, hysteresis, scale * 2.0
        yield scale


@pytest.mark.parametrize("seed", range(3))
def test_long_sequences_and_states_in_between(seed):
    generator = torch.Generator().manual_seed(seed)
    finite = (torch.rand(300, generator=generator) < 0.8).tolist()
    interval, hysteresis = 2 + seed, 1 + seed
    scale = LossScale(64.0, interval, hysteresis, CPU)
    for step, expected in zip(finite, reference(finite, 64.0, interval, hysteresis), strict=True):
        scale.update(torch.tensor(step))
        assert scale.scale.item() == expected
        state, scale = scale.state(), LossScale(1.0, interval, hysteresis, CPU)
        scale.load(type(state).model_validate_json(state.model_dump_json()))


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_a_scaled_gradient_makes_the_same_step(make):
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)) for _ in range(2)]
    scale = LossScale(2.0**20, 1000, 1, CPU)
    optimizers = [
        make([("w.weight", weight)], lr=0.1, clip_norm=0.5, loss_scale=each)
        for weight, each in zip(weights, (None, scale), strict=True)
    ]
    for step in range(4):
        gradient = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        for weight, factor in zip(weights, (1.0, scale.scale.item()), strict=True):
            weight.grad = gradient * factor
        for optimizer in optimizers:
            optimizer.step()
        if step == 1:  # an overflow, of the scaled gradient alone
            before, updates = weights[1].clone(), optimizers[1].step_count
            weights[1].grad = torch.full((3, 4), INF)
            optimizers[1].step()
            assert torch.equal(weights[1], before)
            assert optimizers[1].step_count == updates
            assert scale.scale == 2.0**19
    assert torch.equal(*weights)
    assert torch.equal(optimizers[0].grad_norm, optimizers[1].grad_norm)


def test_moments_of_fp16_weights_are_fp32():
    weight = torch.nn.Parameter(torch.full((4, 4), 0.5, dtype=torch.float16))
    optimizer = AdamW([("w.weight", weight)], lr=0.01, weight_decay=0.0, loss_scale=LossScale(2.0**16, 9, 1, CPU))
    weight.grad = torch.full((4, 4), 2.0**16 * 1e-6, dtype=torch.float16)  # 1e-12 squared, 0 in fp16
    optimizer.step()
    assert optimizer.local_shards()["w.weight.exp_avg_sq"].local.dtype == torch.float32
    torch.testing.assert_close(weight.detach(), torch.full((4, 4), 0.49, dtype=torch.float16), rtol=2e-3, atol=0)


# ---------------------------------------------------------------- what is said of skipped steps


def test_overflows_are_told_and_are_no_divergence():
    monitor = LossMonitor(2, None, LoopState.model_validate({}))
    steps = [StepMetrics(5.0, INF, 2.0 ** (30 - n)) for n in range(6)] + [StepMetrics(4.0, 1.0, 2.0**24)]
    (line,) = monitor.update(1, steps)
    assert line == "6 steps from 1 on were skipped: gradients overflowed in fp16; the loss scale of step 7 was 16777216"
    assert (monitor.skipped_steps, monitor.consecutive_skipped_steps) == (6, 0)
    assert monitor.mean_loss(restart=True) == pytest.approx(34 / 7)
    with pytest.raises(DivergedError, match="step 10: loss nan"):  # which no scale helps against
        monitor.update(8, [StepMetrics(math.nan, INF, 4.0)] * 3)
    with pytest.raises(DivergedError, match=r"at step 2: .* even with the smallest loss scale \(1\)"):
        LossMonitor(9, None, LoopState.model_validate({})).update(1, [(1.0, 1.0, 1.0), (1.0, INF, 1.0)])


FP16 = {
    "trainer__precision": "16",
    "trainer__max_steps": 12,
    "trainer__val_check_interval": 6,
    "trainer__log_every_n_steps": 1,
    "model__native_amp_init_scale": 2.0**22,
    "model__native_amp_growth_interval": 3,
    "exp_manager__checkpoint_callback_params": {"save_top_k": -1},
}


def steps_of(directory):
    return [row for row in metric_rows(directory) if "lr" in row]


@pytest.mark.parametrize("precision", ["16", *extra("16-mixed", "16-true")])
def test_a_resumed_run_is_exact_with_overflows_before_and_after(tmp_path, precision):
    changes = FP16 | {"trainer__precision": precision, "exp_manager__ema": {"enable": True, "decay": 0.9}}
    run_training(tiny_config(tmp_path / "whole", **changes))
    start = tmp_path / "whole" / "checkpoints" / "step-6"
    resumed = {"exp_manager__resume_from_checkpoint": str(start)}
    run_training(tiny_config(tmp_path / "resumed", **changes, **resumed))
    for kind in ("model", "optimizer", "ema"):
        ends = [tmp_path / name / "checkpoints" / "step-12" for name in ("whole", "resumed")]
        assert difference(ends[0], ends[1], kind) == 0
    names = ("step", "loss", "grad_norm", "loss_scale", "skipped_steps", "lr")
    whole, second = ([[row[name] for name in names] for row in steps_of(tmp_path / d)] for d in ("whole", "resumed"))
    assert whole[6:] == second
    found = {row["loss_scale"] for row in steps_of(tmp_path / "whole")}
    skipped = [row["skipped_steps"] for row in steps_of(tmp_path / "whole")]
    assert len(found) > 2
    assert 0 < skipped[5] < skipped[11] < 12, "overflows on one side only, or nothing else"
    state = json.loads((start / "state.json").read_text())["loss_scale"]
    assert state["scale"] == whole[6][3]


def test_a_planted_overflow_changes_nothing_and_a_scale_at_its_minimum_ends_the_run(tmp_path, monkeypatch):
    training_step: Any = LanguageModule.training_step
    overflow: Any = Planted
    weights: list[list[torch.Tensor]] = []

    def step(module, batch, index):
        training_step(module, batch, index)
        weights.append([parameter.clone() for parameter in module.model.parameters()])

    real, planted = GPT._loss, {2}

    def loss(model, *arguments):
        value = real(model, *arguments)
        return overflow.apply(value, float("inf")) if len(weights) in planted else value

    monkeypatch.setattr(LanguageModule, "training_step", step)
    monkeypatch.setattr(GPT, "_loss", loss)
    changes = FP16 | {"trainer__max_steps": 5, "model__native_amp_init_scale": 2, "model__hysteresis": 1}
    run_training(tiny_config(tmp_path / "one", **changes))
    rows = steps_of(tmp_path / "one")
    assert [row["skipped_steps"] for row in rows] == [0, 0, 1, 1, 1]
    assert [row["loss_scale"] for row in rows] == [2, 2, 2, 1, 1]
    assert all(row["loss"] for row in rows), "the loss of a skipped step is as good as any"
    assert all(map(torch.equal, weights[1], weights[2]))
    assert not all(map(torch.equal, weights[2], weights[3]))
    assert "step 3 was skipped: gradients overflowed in fp16" in (tmp_path / "one" / "run.log").read_text()
    weights.clear()
    planted.update(range(2, 99))
    with pytest.raises(UserError) as error:
        run_training(tiny_config(tmp_path / "end", **changes))
    assert error.value.lines[0].startswith("training diverged at step 4: gradients overflow in fp16 even with")


@pytest.mark.parametrize("precision", ["16", *extra("16-mixed", "16-true")])
def test_fp16_trains_close_to_fp32(tmp_path, precision):
    losses, steps = {}, 20 if TIER == "fast" else 40
    for name, changes in ((precision, {"model__native_amp_init_scale": 65536}), (32, {})):
        quiet = {"trainer__val_check_interval": steps, "trainer__max_steps": steps, "trainer__log_every_n_steps": 1}
        params = {"exp_manager__checkpoint_callback_params": {"save_top_k": 0, "save_last": False}}
        model = {"model__data": {"data_impl": "mock"}, "model__optim": {"lr": 1e-3, "sched": {"warmup_steps": 2}}}
        run_training(tiny_config(tmp_path / str(name), trainer__precision=name, **quiet, **params, **model, **changes))
        losses[name] = [row["loss"] for row in steps_of(tmp_path / str(name))]
    assert losses[precision] == pytest.approx(losses[32], rel=2e-3)
    assert losses[precision] != losses[32]
