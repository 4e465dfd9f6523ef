"""SGD, Adafactor and Muon: equal to torch's and Hugging Face's, with clipping, main weights, skipped steps, resume."""

import copy
import json
from pathlib import Path

import pytest
import torch
import yaml
from gpt_builder import build_gpt
from optimizer_cases import OPTIMIZER_FACTORIES, backward, net
from tiers import cases, extra, full_only, looped
from tiny_run import tiny_config
from torch import nn

import stoker
from stoker.kernels.attention.flags import read_flags
from stoker.trainer.config.schema.optim import OptimBlock, build_schedule
from stoker.trainer.config.schema.root import ModelBlock, RootBlock
from stoker.trainer.optim.adafactor import Adafactor
from stoker.trainer.optim.adamw import AdamW
from stoker.trainer.optim.muon import COEFFICIENTS, Muon, is_hidden_matrix, orthogonalize, rate_factor
from stoker.trainer.optim.optimizer_factory import (
    build_optimizer,
    fused_projection_rows,
    min_state_elements,
    recorded_settings,
)
from stoker.trainer.optim.sgd import SGD
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import UserError

SCHED = {"name": "WarmupHoldAnnealLinear", "max_steps": 50, "warmup_steps": 2, "hold_steps": 1}


def close(ours, theirs, **tolerance):
    for (name, mine), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def groups(model, weight_decay):
    """As `decays` cuts them."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def train_both(ours, optimizer, theirs, reference, steps=6):
    """The same clipped steps at falling rates."""
    for step in range(steps):
        lr = 1e-2 / (step + 1)
        optimizer.set_lr(lr)
        for group in reference.param_groups:
            group["lr"] = lr
        backward(ours, step)
        optimizer.step()
        backward(theirs, step)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.3)
        reference.step()
        reference.zero_grad()


# ---------------------------------------------------------------- oracles


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_equals_torch(momentum, nesterov):
    ours, theirs = net(), net()
    optimizer = SGD(
        ours.named_parameters(), lr=1e-2, momentum=momentum, nesterov=nesterov, weight_decay=0.1, clip_norm=0.3
    )
    reference = torch.optim.SGD(groups(theirs, 0.1), lr=1e-2, momentum=momentum, nesterov=nesterov)
    train_both(ours, optimizer, theirs, reference)
    close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("beta1", "scale_parameter"), [(None, True), (0.9, False), *extra((None, False), (0.9, True))])
def test_adafactor_equals_hugging_face(beta1, scale_parameter):
    optimization = pytest.importorskip("transformers.optimization")
    ours, theirs = net(), net()
    keys = {"beta1": beta1, "scale_parameter": scale_parameter, "clip_threshold": 0.7, "decay_rate": -0.6}
    optimizer = Adafactor(ours.named_parameters(), lr=1e-2, weight_decay=0.1, clip_norm=0.3, **keys)
    reference = optimization.Adafactor(groups(theirs, 0.1), lr=1e-2, relative_step=False, **keys)
    train_both(ours, optimizer, theirs, reference)
    close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_adafactor_with_its_relative_step_equals_hugging_face():
    """T5's own: the rate from the step and the size of each weight, nothing else."""
    optimization = pytest.importorskip("transformers.optimization")
    ours, theirs = net(), net()
    optimizer = Adafactor(ours.named_parameters(), lr=1e-2)
    keys = OptimBlock.model_validate({"name": "adafactor", "relative_step": True, "warmup_init": True})
    schedule = build_schedule(keys, 100)
    reference = optimization.Adafactor(groups(theirs, 0.0), relative_step=True, warmup_init=True, scale_parameter=True)
    for step in range(6):
        optimizer.set_lr(schedule(step))
        backward(ours, step)
        optimizer.step()
        backward(theirs, step)
        reference.step()
        reference.zero_grad()
    close(ours, theirs, rtol=1e-11, atol=1e-13)


class AdamWScale:
    """nanoT5's AdamWScale in words, with eps where torch's AdamW has it: after the correction of the bias."""

    def __init__(self, parameters, weight_decay):
        self.parameters = [
            (p, weight_decay * (p.ndim > 1), torch.zeros_like(p), torch.zeros_like(p)) for p in parameters
        ]
        self.param_groups = [{"lr": 0.0}]
        self.steps = 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        lr = self.param_groups[0]["lr"]
        for p, weight_decay, mean, square in self.parameters:
            rms = p.norm() / p.numel() ** 0.5
            mean.mul_(0.9).add_(p.grad, alpha=0.1)
            square.mul_(0.98).addcmul_(p.grad, p.grad, value=0.02)
            direction = (mean / (1 - 0.9**self.steps)) / ((square / (1 - 0.98**self.steps)).sqrt() + 1e-8)
            p.copy_(p * (1 - lr * weight_decay) - lr * max(1e-3, rms.item()) * direction)

    def zero_grad(self):
        for p, *_ in self.parameters:
            p.grad = None


def test_adamw_with_scaled_rates_is_nano_t5s():
    ours, theirs = net(), net()
    for model in (ours, theirs):
        nn.init.zeros_(model.up.bias)  # moves by the least size
    optimizer = AdamW(ours.named_parameters(), lr=1e-2, weight_decay=0.1, scale_parameter=True, clip_norm=0.3)
    train_both(ours, optimizer, theirs, AdamWScale(list(theirs.parameters()), 0.1))
    close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert ours.up.bias.abs().max() > 0


def test_parts_of_a_fused_weight_have_sizes_of_their_own():
    """One weight of two parts moves as the two weights would."""
    torch.manual_seed(1)
    parts = [nn.Parameter(torch.randn(rows, 5, dtype=torch.float64) * size) for rows, size in ((3, 1.0), (4, 100.0))]
    fused = nn.Parameter(torch.cat([part.detach() for part in parts]))
    keys = {"lr": 1e-2, "scale_parameter": True, "weight_decay": 0.0}
    together = AdamW([("x.qkv", fused)], fused={"qkv": (3, 4)}, **keys)
    apart = AdamW([(str(number), part) for number, part in enumerate(parts)], **keys)
    for _ in range(3):
        gradient = torch.randn(7, 5, dtype=torch.float64)
        fused.grad, parts[0].grad, parts[1].grad = gradient, gradient[:3], gradient[3:]
        together.step()
        apart.step()
    torch.testing.assert_close(fused.detach(), torch.cat([part.detach() for part in parts]), rtol=1e-12, atol=0)


def test_adafactor_equals_torch():
    ours, theirs = net(), net()
    optimizer = Adafactor(ours.named_parameters(), lr=1e-2, clip_norm=0.3)
    # torch's multiplies by the size of the weight always, and caps the rate at 1 / sqrt(step).
    reference = torch.optim.Adafactor(groups(theirs, 0.0), lr=1e-2, eps=(1e-30, 1e-3), d=1.0, beta2_decay=-0.8)
    train_both(ours, optimizer, theirs, reference)
    close(ours, theirs, rtol=1e-11, atol=1e-13)


class TorchMuon:
    """torch.optim.Muon for the hidden matrices, torch.optim.AdamW for the rest."""

    def __init__(self, model, **keys):
        matrices = [p for name, p in model.named_parameters() if name in ("up.weight", "down.weight")]
        tables = [p for name, p in model.named_parameters() if name in ("token_embedding.weight", "head.weight")]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        self.muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, **keys)
        self.adamw = torch.optim.AdamW(
            [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=1e-2,
            betas=(0.9, 0.98),
        )
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]

    def step(self):
        self.muon.step()
        self.adamw.step()

    def zero_grad(self):
        self.muon.zero_grad()
        self.adamw.zero_grad()


@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_equals_torch(rule, nesterov):
    ours, theirs = net(torch.float32), net(torch.float32)
    keys = {"adjust_lr_fn": rule, "nesterov": nesterov, "momentum": 0.9, "ns_steps": 4}
    optimizer = Muon(ours.named_parameters(), lr=1e-2, weight_decay=0.1, clip_norm=0.3, **keys)
    train_both(ours, optimizer, theirs, TorchMuon(theirs, **keys))
    # The iteration is in bf16; a step moves a weight by about 1e-2.
    close(ours, theirs, rtol=0, atol=3e-4)


def test_newton_schulz_is_a_polynomial_of_the_singular_values():
    matrix = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    for ours, expected in ((matrix, left @ values.diag() @ right), (matrix.T, right.T @ values.diag() @ left.T)):
        torch.testing.assert_close(orthogonalize(ours, 5), expected, rtol=1e-10, atol=1e-12)
    assert 0.6 < values.min() < values.max() < 1.3
    assert not orthogonalize(torch.zeros(2, 3), 5).any()


def test_a_matched_step_is_as_large_as_adamws():
    for rows, columns in ((64, 64), (128, 32), (32, 128)):
        step = orthogonalize(torch.randn(rows, columns, dtype=torch.float64), 5)
        size = (step * rate_factor("match_rms_adamw", rows, columns)).square().mean().sqrt()
        assert 0.12 < size < 0.25
    assert rate_factor("original", 100, 25) == 2.0
    assert rate_factor("original", 25, 100) == 1.0


def test_muon_moves_hidden_matrices_only():
    assert is_hidden_matrix("decoder.layers.0.attention.output.weight", (4, 4))
    for name in ("token_embedding.weight", "position_embedding.weight", "head.weight"):
        assert not is_hidden_matrix(name, (4, 4))
    assert not is_hidden_matrix("decoder.layers.0.attention.qkv.bias", (4,))


def test_parts_of_a_fused_weight_are_orthogonalised_each():
    def step(parts):
        weight = nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
        gradient = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        gradient[2:] *= 1e-3  # beside the first part the others would hardly move
        weight.grad = gradient
        Muon([("a.qkv.weight", weight)], lr=1.0, weight_decay=0.0, fused={"qkv.weight": parts}).step()
        return weight.detach(), gradient

    whole, _ = step((6,))
    fused, gradient = step((2, 2, 2))
    for first in (0, 2, 4):
        part = gradient[first : first + 2]
        alone = -orthogonalize(part, 5) * rate_factor("match_rms_adamw", 2, 4)
        torch.testing.assert_close(fused[first : first + 2], alone, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(whole, fused, rtol=0.1)


# ---------------------------------------------------------------- what all have from the base


each = pytest.mark.parametrize("kind", OPTIMIZER_FACTORIES)


def everything(model, optimizer):
    return [*model.parameters(), *(piece.local for piece in optimizer.local_shards().values())]


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(kind, dtype, bad):
    model = net(dtype)
    optimizer = OPTIMIZER_FACTORIES[kind](model.named_parameters(), clip_norm=1.0, main_weights=dtype == torch.bfloat16)
    for broken in (True, False, True):  # before there is any state, and after
        before = copy.deepcopy(everything(model, optimizer))
        backward(model, 0)
        if broken:
            gradient = model.up.weight.grad
            assert gradient is not None
            gradient[3, 2] = bad
        optimizer.step()
        same = [torch.equal(*pair) for pair in zip(before, everything(model, optimizer), strict=True)]
        assert all(same) is broken
    assert all(tensor.isfinite().all() for tensor in everything(model, optimizer))


@each
def test_bf16_weights_follow_fp32_main_weights(kind):
    model, wide = net(torch.bfloat16), net(torch.bfloat16).float()
    optimizer = OPTIMIZER_FACTORIES[kind](model.named_parameters(), main_weights=True)
    reference = OPTIMIZER_FACTORIES[kind](wide.named_parameters())
    for step in range(3):
        backward(model, step)
        for narrow, other in zip(model.parameters(), wide.parameters(), strict=True):
            assert narrow.grad is not None
            other.grad = narrow.grad.float()
        optimizer.step()
        reference.step()
    pieces = optimizer.local_shards()
    for name, parameter in model.named_parameters():
        main = pieces[f"{name}.main"].local
        assert torch.equal(parameter, main.bfloat16())
        torch.testing.assert_close(main, wide.get_parameter(name), rtol=1e-6, atol=1e-7)


@each
def test_pure_bf16_has_state_of_its_own_width_and_learns(kind):
    model = net(torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    optimizer = OPTIMIZER_FACTORIES[kind](model.named_parameters())
    backward(model, 0)
    optimizer.step()
    assert not torch.equal(before["up.weight"], model.up.weight)
    assert not any(name.endswith(".main") for name in optimizer.local_shards())


@each
def test_state_copied_over_goes_on_bit_for_bit(kind):
    first = net(torch.float32)
    optimizer = OPTIMIZER_FACTORIES[kind](first.named_parameters(), clip_norm=0.3)
    for step in range(3):
        backward(first, step)
        optimizer.step()
    second = copy.deepcopy(first)
    resumed = OPTIMIZER_FACTORIES[kind](second.named_parameters(), clip_norm=0.3)
    resumed.step_count = optimizer.step_count
    with torch.no_grad():
        for name, piece in resumed.local_shards().items():
            saved = optimizer.local_shards()[name]
            assert piece.shape == saved.shape
            piece.local.copy_(saved.local)
    for step in range(3, 6):
        for model, own in ((first, optimizer), (second, resumed)):
            backward(model, step)
            own.step()
    close(second, first, rtol=0, atol=0)


@each
def test_it_learns(kind):
    model = net(torch.float32)
    optimizer = OPTIMIZER_FACTORIES[kind](model.named_parameters(), clip_norm=1.0)
    generator = torch.Generator().manual_seed(0)
    rates = {"sgd": 0.3, "adafactor": 0.1, "scaled": 0.1}
    losses = []
    for step in range(80):
        optimizer.set_lr(rates.get(kind, 1e-2) * (1 - step / 80))
        ids = torch.randint(7, (64,), generator=generator)
        loss = nn.functional.cross_entropy(model(ids), (ids * 3 + 1) % 7)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < 0.4 < 1.5 < losses[0]


def test_nesterov_needs_momentum():
    with pytest.raises(ValueError, match=r"`momentum` \(0\.0\) must be larger than 0"):
        SGD(net().named_parameters(), lr=1.0, nesterov=True)


# ---------------------------------------------------------------- from the keys


def root(**optim):
    return RootBlock.model_validate({"model": {"num_attention_heads": 4, "num_query_groups": 2, "optim": optim}})


@looped(
    ("name", "kind"),
    [
        ("adamw", AdamW),
        ("fused_adam", AdamW),
        ("megatron_fused_adam", AdamW),
        ("distributed_fused_adam", AdamW),
        ("mcore_distributed_optim", AdamW),
        ("sgd", SGD),
        ("adafactor", Adafactor),
        ("muon", Muon),
    ],
)
def test_names_mean_optimizers(name, kind):
    optimizer = build_optimizer(root(name=name).model, net().named_parameters(), main_weights=False)
    assert type(optimizer) is kind


def test_keys_reach_the_optimizer():
    sgd = build_optimizer(root(name="sgd", momentum=0.5, nesterov=True).model, net().named_parameters())
    assert isinstance(sgd, SGD)
    assert (sgd.momentum, sgd.nesterov) == (0.5, True)
    muon = build_optimizer(root(name="muon", ns_steps=3, betas=[0.5, 0.6]).model, net().named_parameters())
    assert isinstance(muon, Muon)
    assert (muon.momentum, muon.nesterov, muon.ns_steps, muon.adjust_lr_fn) == (0.95, True, 3, "match_rms_adamw")
    assert (muon.param_groups[0]["betas"], muon.param_groups[0]["eps"]) == ([0.5, 0.6], 1e-8)
    factored = build_optimizer(root(name="adafactor", decay_rate=-0.5).model, net().named_parameters())
    assert isinstance(factored, Adafactor)
    assert (tuple(factored.eps), factored.decay_rate, factored.beta1) == ((1e-30, 1e-3), -0.5, None)


def test_fused_weights_are_cut_where_the_model_cuts_them():
    keys = RootBlock.model_validate(
        {
            "model": {
                "hidden_size": 32,
                "ffn_hidden_size": 24,
                "num_attention_heads": 4,
                "num_query_groups": 2,
                "activation": "swiglu",
            }
        }
    ).model
    assert fused_projection_rows(keys) == {"attention.qkv.weight": (32, 16, 16), "mlp.up.weight": (24, 24)}
    assert list(fused_projection_rows(root().model)) == ["attention.qkv.weight"]


def test_a_checkpoint_records_the_keys_that_act():
    recorded = recorded_settings(
        root(name="muon", lr=0.1, sched={"name": "WarmupPolicy", "warmup_ratio": 0.1}).model.optim, 50
    )
    assert recorded["optim.name"] == "muon"
    assert recorded["optim.lr"] == 0.1
    assert recorded["optim.momentum"] == 0.95
    assert (recorded["optim.sched.name"], recorded["optim.sched.warmup_steps"]) == ("WarmupPolicy", 5)
    assert "optim.clip_threshold" not in recorded
    assert recorded_settings(root(name="fused_adam").model.optim, 9) == recorded_settings(
        root(name="adamw").model.optim, 9
    )
    relative = recorded_settings(root(name="adafactor", relative_step=True, warmup_init=True).model.optim, 9)
    assert (relative["optim.relative_step"], relative["optim.warmup_init"]) == ("True", "True")
    assert not any("sched" in key for key in relative)


def gpt(optim):
    keys = RootBlock.model_validate(
        {
            "model": {
                "num_layers": 2,
                "hidden_size": 64,
                "ffn_hidden_size": 128,
                "num_attention_heads": 4,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "optim": optim,
            }
        }
    ).model
    assert isinstance(keys, ModelBlock)
    model = build_gpt(
        keys,
        vocab_size=300,
        device=torch.device("cpu"),
        dtype=torch.float32,
        flags=read_flags(),
        micro_batch_size=4,
        seq_length=32,
    )
    return keys, model


@looped(
    "optim",
    [
        {"name": "adamw"},
        {"name": "sgd"},
        {"name": "sgd", "momentum": 0.9},
        {"name": "adafactor"},
        {"name": "adafactor", "beta1": 0.9},
        {"name": "muon"},
    ],
)
def test_the_memory_of_the_state_is_known(optim):
    keys, model = gpt(optim)
    optimizer = build_optimizer(keys, model.named_parameters())
    kept = sum(piece.local.numel() for piece in optimizer.local_shards().values())
    counted = min_state_elements(keys, 300)
    small = sum(sum(p.shape) for p in model.parameters())  # vectors: factored moments, norms and biases
    assert counted <= kept <= counted + 2 * small


TEXT = (
    "First Citizen: Before we proceed any further, hear me speak. All: Speak, speak. First Citizen: You are all "
    "resolved rather to die than to famish? All: Resolved. resolved. First Citizen: First, you know Caius Marcius is "
    "chief enemy to the people. All: We know it, we know it. First Citizen: Let us kill him, and we will have corn at "
    "our own price. "
)


@full_only
@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
def test_a_gpt_learns_some_shakespeare_with_its_preset(name):
    preset = yaml.safe_load((Path(stoker.__file__).parent / "conf" / "optim" / f"{name}.yaml").read_text())
    steps, lr = 90, float(preset.get("lr", 1e-3))
    keys, model = gpt({**preset, "lr": lr, "sched": {**preset["sched"], "min_lr": lr / 10, "max_steps": steps}})
    optimizer = build_optimizer(keys, model.named_parameters(), clip_norm=1.0)
    schedule = build_schedule(keys.optim, steps)
    tokens = torch.tensor(list(TEXT.encode()))
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(tokens) - 33, (4, 1), generator=generator)
        window = tokens[starts + torch.arange(33)]
        loss = model.loss(window[:, :-1], window[:, 1:], 4 * 32)
        loss.backward()
        losses.append(loss.item())
        optimizer.set_lr(schedule(step))
        optimizer.step()
    end = sum(losses[-5:]) / 5
    assert losses[0] > 5.5  # ln 300
    assert end < 3.2, end  # knowing the frequencies of the letters alone gives 3.05


@pytest.mark.parametrize(
    "optim", cases([{"name": "sgd"}, {"name": "adafactor", "beta1": 0.5}, {"name": "muon"}], fast=1)
)
def test_a_resumed_run_ends_bit_equal_and_another_optimizer_is_refused(optim, tmp_path):
    def run(directory, steps, **keys):
        config = tiny_config(tmp_path / directory, trainer__max_steps=steps, model__optim={**keys, "sched": SCHED})
        run_training(config)
        manifest = json.loads((tmp_path / directory / "checkpoints" / f"step-{steps}" / "manifest.json").read_text())
        return {name: file["sha256"] for name, file in manifest["files"].items() if name.endswith(".safetensors")}

    whole = run("whole", 4, **optim)
    run("broken", 2, **optim)
    assert run("broken", 4, **optim) == whole
    with pytest.raises(UserError, match=f"holds the state of {optim['name']}, but `model.optim.name` is adamw"):
        run("broken", 6, name="fused_adam")
