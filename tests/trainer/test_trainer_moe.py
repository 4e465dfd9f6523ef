"""Experts in training: losses whose gradients count once, the figures of their load, the expert bias."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from gpt_builder import build_gpt
from run_metrics import exact_rows
from tiers import cases, extra, full_only
from tiny_run import EAGER_ON_GPU, final_hashes, tiny_config
from torch import nn
from uneven_samples import UnevenSamples

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.config.gpt import GPTKeys
from stoker.models.moe.moe_layer import find_moe_layers
from stoker.trainer.callbacks import expert_load
from stoker.trainer.callbacks.expert_load import ExpertLoadMetrics
from stoker.trainer.checkpoint.loop_state import LoopState
from stoker.trainer.checkpoint.reader import model_tensors
from stoker.trainer.config.run_precision import RunPrecision
from stoker.trainer.conversion.load_model import load_model
from stoker.trainer.data.batch_sampler import BatchSchedule, BatchSizeRampUp, RankBatchSampler
from stoker.trainer.data.dataloader import PrefetchingDataLoader
from stoker.trainer.distributed.process_group import DistributedContext
from stoker.trainer.lightning.expert_balance import ExpertBalancer
from stoker.trainer.lightning.lightning_module import LanguageModule
from stoker.trainer.lightning.lightning_trainer import fit
from stoker.trainer.loggers.progress_bar import format_step
from stoker.trainer.loggers.step_report import StepReport
from stoker.trainer.optim.sgd import SGD
from stoker.trainer.train import run_training

pytestmark = pytest.mark.usefixtures("without_plots")

CPU = torch.device("cpu")
AUX, Z = 0.5, 0.25
GEOMETRY = {
    "num_layers": 3,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 2,
    "encoder_seq_length": 16,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "num_moe_experts": 4,
    "moe_layer_freq": [1, 0, 1],
    "moe_aux_loss_coeff": AUX,
    "moe_z_loss_coeff": Z,
}
"""Coefficients so large that a loss counted twice, or not at all, is plain to see."""
BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


class Silent(pl.Callback):
    pass


def model_of(micro_batch_size, **changes):
    keys = GPTKeys.model_validate(GEOMETRY | changes)
    return build_gpt(
        keys,
        vocab_size=100,
        device=CPU,
        dtype=torch.float64,
        flags=AttentionFlags(),
        micro_batch_size=micro_batch_size,
    )


def trained(micro_batch_size, steps=1, *, plan=None, bias_rate: float | None = None, **changes):
    """A module after some steps of gradient descent with a rate of 1: each changes the weights by the gradients."""
    plan = plan or BatchSchedule(12)
    model = model_of(micro_batch_size, **changes)
    layers = find_moe_layers(model)
    rates = dict.fromkeys(layers, bias_rate) if bias_rate is not None else {}
    module = LanguageModule(
        model,
        SGD(model.named_parameters(), lr=1.0, momentum=0.0, weight_decay=0.0),
        lambda step: 1.0,
        PrefetchingDataLoader(UnevenSamples(), RankBatchSampler(plan, micro_batch_size), CPU),
        RunPrecision("test", "fp64"),
        seed=1,
        expert_balancer=ExpertBalancer(
            layers, lambda step: plan.batch_size(step) // micro_batch_size, bias_rates=rates, ranks=DistributedContext()
        ),
    )
    fit(module, Silent(), steps, CPU, DistributedContext())
    module.dataloader.close()
    return module


def reference(micro_batch_size):
    """The gradients of the first step by plain autograd, and the losses of the routers, from their formulas.

    The LM loss over the targets of the global batch, plus the mean over micro batches of the losses of both routers:
    coefficient * E / (k T^2) * sum over experts of (sum of probabilities * count), and the mean squared log-sum-exp.
    """
    model = model_of(micro_batch_size)
    model.train()
    layers = find_moe_layers(model)
    for layer in layers.values():
        layer.loss_share.zero_()  # nothing is injected: what is added to the loss here is all there is
    seen = []
    for layer in layers.values():
        layer.router.register_forward_pre_hook(lambda router, inputs: seen.append((router, inputs[0])))
    samples, total, figures = UnevenSamples(), [], []
    counts = {router: torch.zeros(4) for router in (layer.router for layer in layers.values())}
    labels = samples.batch(0, 12).labels
    targets = (labels != -100).sum()
    for first in range(0, 12, micro_batch_size):
        seen.clear()
        batch = samples.batch(first, micro_batch_size)
        loss = model.batch_loss({"tokens": batch.tokens, "labels": batch.labels}, targets)
        total.append(loss)
        for router, tokens in seen:
            logits = tokens @ router.weight.T
            probabilities = logits.softmax(dim=1)
            count = nn.functional.one_hot(logits.topk(2).indices, 4).sum(dim=(0, 1))
            aux = 4 / (2 * len(tokens) ** 2) * (probabilities.sum(dim=0) * count).sum()
            z = logits.logsumexp(dim=1).square().mean()
            total.append((AUX * aux + Z * z) * micro_batch_size / 12)
            entropy = -(probabilities * probabilities.log()).sum(dim=1).mean()
            figures.append([aux.item(), z.item(), entropy.item()])
            counts[router] += count
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(torch.stack(total).sum(), list(parameters.values()), allow_unused=True)
    return model, dict(zip(parameters, gradients, strict=True)), torch.tensor(figures).mean(dim=0), counts.values()


# ---------------------------------------------------------------- gradients and values, counted once


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("micro_batch_size", cases([12, 6, 3], fast=1))
def test_losses_of_the_router_count_once(micro_batch_size, recompute):
    start, gradients, figures, counts = reference(micro_batch_size)
    module = trained(micro_batch_size, moe_layer_recompute=recompute)
    before, after = dict(start.named_parameters()), dict(module.model.named_parameters())
    assert before.keys() == after.keys()
    for name, gradient in gradients.items():
        expected = torch.zeros_like(before[name]) if gradient is None else gradient
        torch.testing.assert_close(before[name] - after[name], expected, rtol=1e-9, atol=1e-12, msg=name)
    read = ExpertLoadMetrics(find_moe_layers(module.model), ranks=DistributedContext()).collect(1, restart=True)()
    logged = [read[name] for name in ("load_balancing_loss", "z_loss", "router_entropy")]
    assert logged == pytest.approx(figures.tolist(), rel=1e-6)
    shares = [(count / count.sum()).tolist() for count in counts]
    assert read["expert_share_min"] == pytest.approx(min(map(min, shares)))
    assert read["expert_share_max"] == pytest.approx(max(map(max, shares)))
    variations = torch.stack([count.std(correction=0) / count.mean() for count in counts])
    assert read["load_cv"] == pytest.approx(variations.mean().item())


def test_the_share_follows_a_growing_batch():
    plan = BatchSchedule(12, ramp_up=BatchSizeRampUp(start=4, increment=4, samples=24, final=12))
    assert [plan.batch_size(step) for step in range(6)] == [4, 4, 4, 8, 8, 12]
    seen = []
    original = ExpertBalancer.before_step

    def spied(self, step, *others):
        original(self, step, *others)
        seen.append([layer.loss_share.item() for layer in self._layers])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertBalancer, "before_step", spied)
        trained(2, 6, plan=plan)
    expected = [0.5, 0.5, 0.5, 0.25, 0.25, 1 / 6]
    assert seen == [[pytest.approx(share)] * 2 for share in expected]


def test_validation_does_not_count_and_a_report_begins_anew():
    module = trained(6, steps=2)
    layers = find_moe_layers(module.model)
    load = ExpertLoadMetrics(layers, ranks=DistributedContext())
    statistics = [layer.statistics.clone() for layer in layers.values()]
    assert [layer[:4].sum().item() for layer in statistics] == [2 * 12 * 16 * 2] * 2
    assert [layer[-1].item() for layer in statistics] == [4.0, 4.0], "two steps of two micro batches"
    module.model.eval()
    with torch.no_grad():
        batch = UnevenSamples().batch(0, 6)
        module.model.batch_loss({"tokens": batch.tokens, "labels": batch.labels}, torch.ones(()))
    for layer, before in zip(layers.values(), statistics, strict=True):
        assert torch.equal(layer.statistics, before)
    assert load.collect(2, restart=True)()["load_cv"] > 0
    assert not any(layer.statistics.any() for layer in layers.values())
    assert load.collect(3, restart=True)() == {}


# ---------------------------------------------------------------- the figures


def counted(*values):
    """Layers that hold these statistics."""
    found = find_moe_layers(model_of(12, num_layers=2, moe_layer_freq=1))
    for layer, statistics in zip(found.values(), values, strict=True):
        layer.statistics.copy_(torch.tensor(statistics))
    return found


EVEN = (4.0, 4.0, 4.0, 4.0, 2.0, 6.0, 2.5, 0.0, 16.0, 2.0)
UNEVEN = (16.0, 0.0, 0.0, 0.0, 8.0, 10.0, 0.5, 4.0, 16.0, 2.0)


def test_figures_of_known_counts():
    layers = counted(EVEN, UNEVEN)
    load = ExpertLoadMetrics(layers, ranks=DistributedContext(), per_layer=list(layers)[1:])
    assert load.collect(1, restart=True)() == pytest.approx(
        {
            "load_balancing_loss": 2.5,
            "z_loss": 4.0,
            "load_cv": math.sqrt(3) / 2,
            "expert_share_min": 0.0,
            "expert_share_max": 1.0,
            "expert_share_mean": 0.25,
            "dropped_fraction": 0.125,
            "router_entropy": 0.75,
            "moe/load_balancing_loss_layer_1": 4.0,
            "moe/z_loss_layer_1": 5.0,
            "moe/load_cv_layer_1": math.sqrt(3),
            "moe/expert_share_min_layer_1": 0.0,
            "moe/expert_share_max_layer_1": 1.0,
            "moe/expert_share_mean_layer_1": 0.25,
            "moe/dropped_fraction_layer_1": 0.25,
            "moe/router_entropy_layer_1": 0.25,
        }
    )


def test_a_mean_goes_on_over_other_reports_and_over_processes():
    whole = ExpertLoadMetrics(counted(EVEN, UNEVEN), ranks=DistributedContext())
    whole.collect(1, restart=False)()
    state = LoopState.model_validate_json(json.dumps({"expert_load": whole.sums})).expert_load
    for name, statistics in zip(whole._layers, (UNEVEN, EVEN), strict=True):
        whole._layers[name].statistics.copy_(torch.tensor(statistics))
    resumed = ExpertLoadMetrics(counted(UNEVEN, EVEN), ranks=DistributedContext(), state=state)
    figures = whole.collect(2, restart=True)()
    assert figures == resumed.collect(2, restart=True)()
    assert figures["load_cv"] == pytest.approx(math.sqrt(3) / 2), "of 20, 4, 4, 4 in both layers"
    assert figures["load_balancing_loss"] == pytest.approx(2.5)
    assert whole.sums == ()
    other = ExpertLoadMetrics(
        counted(EVEN, UNEVEN), ranks=DistributedContext(), state=((1.0, 2.0),)
    )  # of another model
    assert other.collect(1, restart=True)()["load_balancing_loss"] == pytest.approx(2.5)


def test_a_layer_whose_sums_are_not_finite_is_left_out():
    broken = (*EVEN[:5], math.nan, *EVEN[6:])
    figures = ExpertLoadMetrics(counted(broken, UNEVEN), ranks=DistributedContext()).collect(1, restart=True)()
    assert (figures["z_loss"], figures["load_cv"]) == (pytest.approx(5.0), pytest.approx(math.sqrt(3)))


def test_a_layer_that_saw_padding_alone_has_no_figures():
    nothing = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0)
    assert ExpertLoadMetrics(counted(nothing, nothing), ranks=DistributedContext()).collect(1, restart=True)() == {}
    assert ExpertLoadMetrics(counted(nothing, UNEVEN), ranks=DistributedContext()).collect(1, restart=True)()[
        "z_loss"
    ] == pytest.approx(5.0)


def test_the_step_line_has_one_short_figure_of_experts():
    plain = StepReport(step=3, loss=5.0, grad_norm=1.0, lr=0.1, consumed_samples=8)
    assert "CV" not in format_step(plain, 10, None)
    report = StepReport(step=3, loss=5.0, grad_norm=1.0, lr=0.1, consumed_samples=8, experts={"load_cv": 0.1234})
    assert "  load CV  0.12" in format_step(report, 10, None)
    assert report.to_metrics()["load_cv"] == 0.1234


# ---------------------------------------------------------------- the expert bias


def of_bias(layer):
    """Bias and counts of a layer that has them."""
    assert layer.expert_bias is not None
    assert layer.step_counts is not None
    return layer.expert_bias, layer.step_counts


def test_the_bias_goes_up_where_an_expert_had_too_little():
    layers = find_moe_layers(model_of(12, **BIAS))
    rates = dict(zip(layers, (0.5, 0.25), strict=True))
    balance = ExpertBalancer(layers, lambda step: 1, bias_rates=rates, ranks=DistributedContext())
    (first, first_counts), (second, second_counts) = map(of_bias, layers.values())
    first_counts.copy_(torch.tensor([0.0, 2.0, 2.0, 4.0]))
    second_counts.copy_(torch.tensor([9.0, 1.0, 1.0, 1.0]))
    balance.after_update(torch.tensor(1.0))
    assert first.tolist() == [0.5, 0.0, 0.0, -0.5]
    assert second.tolist() == [-0.25, 0.25, 0.25, 0.25]
    assert not first_counts.any()
    assert not second_counts.any()
    first_counts.fill_(1.0)[0] = 5.0
    balance.after_update(torch.tensor(math.nan))  # a step that is skipped changes nothing, and is forgotten
    assert first.tolist() == [0.5, 0.0, 0.0, -0.5]
    assert not first_counts.any()


def test_the_bias_counts_the_whole_global_batch_once_and_is_in_the_checkpoint():
    whole, split = (trained(size, bias_rate=0.125, **BIAS) for size in (12, 3))
    for name, layer in find_moe_layers(whole.model).items():
        bias, _ = of_bias(layer)
        assert bias.abs().max() == 0.125
        assert torch.equal(bias, of_bias(find_moe_layers(split.model)[name])[0])
        assert bias is model_tensors(whole.model)[f"{name}.expert_bias"]


MOE = {
    "model__num_layers": 2,
    "model__num_moe_experts": 4,
    "model__moe_aux_loss_coeff": 1e-2,
    "model__moe_z_loss_coeff": 1e-3,
    "model__moe_input_jitter_eps": 0.1,
    "model__moe_router_score_function": "sigmoid",
    "model__moe_router_enable_expert_bias": True,
    "exp_manager__ema": {"enable": True, "decay": 0.9},
    "exp_manager__checkpoint_callback_params": {"save_top_k": -1, "every_n_train_steps": 3},
}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    directory = tmp_path_factory.mktemp("moe") / "unbroken"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_load, "has_matplotlib", lambda: False)
        run_training(tiny_config(directory, **MOE, exp_manager__create_csv_logger=True))
    return directory


@pytest.mark.parametrize("stopped", [*extra(3), 5], ids={3: "at a report", 5: "between reports"}.get)
def test_a_resumed_run_is_bit_exact(unbroken, tmp_path, stopped):
    directory = tmp_path / "resumed"
    run_training(tiny_config(directory, **{**MOE, "trainer__max_steps": stopped}))
    run_training(tiny_config(directory, **MOE))
    manifests = [json.loads((run / "checkpoints/step-6/manifest.json").read_text()) for run in (directory, unbroken)]
    ours, theirs = (
        {name: file["sha256"] for name, file in manifest["files"].items() if name.endswith(".safetensors")}
        for manifest in manifests
    )
    assert ours == theirs
    assert set(ours) == {"model.safetensors", "optimizer.safetensors", "ema.safetensors"}
    assert final_hashes(directory, 6) == final_hashes(unbroken, 6)
    ours, theirs = ([line for line in exact_rows(run) if line["step"] > stopped] for run in (directory, unbroken))
    assert ours == [pytest.approx(line, rel=1e-6) for line in theirs]  # the fp32 sums of the load begin anew
    assert [line["loss"] for line in ours if "loss" in line] == [line["loss"] for line in theirs if "loss" in line]
    maps = [json.loads((run / "expert_load.json").read_text()) for run in (directory, unbroken)]
    assert maps[0] == maps[1]
    assert [row["step"] for row in maps[0]["rows"]] == [2, 3, 4, 6, 8]
    assert [sum(map(sum, row["tokens"])) for row in maps[0]["rows"]] == [4 * 16 * 2 * 2 * n for n in (2, 1, 1, 2, 2)]


def test_biases_are_in_the_weights_and_nowhere_else(unbroken):
    headers = {}
    for kind in ("model", "optimizer", "ema"):
        data = (unbroken / f"checkpoints/step-6/{kind}.safetensors").read_bytes()
        headers[kind] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    biases = {kind: [name for name in header if "expert_bias" in name] for kind, header in headers.items()}
    assert biases == {"model": [f"decoder.layers.{n}.mlp.expert_bias" for n in (0, 1)], "optimizer": [], "ema": []}
    assert headers["model"][biases["model"][0]]["dtype"] == "F32"


def test_figures_reach_metrics_and_loggers(unbroken):
    report = next(line for line in exact_rows(unbroken) if line["step"] == 8)
    assert {"load_balancing_loss", "z_loss", "load_cv", "dropped_fraction", "router_entropy"} <= report.keys()
    assert not any(name.startswith("moe/") for name in report), "nobody asked for every layer"
    assert "load_cv" in (unbroken / "metrics.csv").read_text().partition("\n")[0]


def test_a_dense_model_has_no_figures_of_experts(tmp_path, capsys):
    run_training(tiny_config(tmp_path, trainer__max_steps=2, exp_manager__create_checkpoint_callback=False))
    assert not any("load" in name or "router" in name for line in exact_rows(tmp_path) for name in line)
    assert not list(tmp_path.glob("expert_load*"))
    assert "CV" not in capsys.readouterr().out


def test_without_matplotlib_a_run_says_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(expert_load, "has_matplotlib", lambda: False)
    run_training(tiny_config(tmp_path, **MOE, trainer__max_steps=2, trainer__limit_val_batches=0))
    assert capsys.readouterr().out.count("pip install 'stoker[plots]'") == 1
    assert [path.name for path in tmp_path.glob("expert_load*")] == ["expert_load.json"]


STACK = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2, "num_moe_experts": 4}
T5 = {
    "family": "t5",
    "seq_length": 16,
    "encoder": STACK | {"moe_per_layer_logging": True, "moe_layer_freq": [0, 1]},
    "decoder": STACK | {"num_moe_experts": 2, "moe_per_layer_logging": True, "moe_frequency": 2},
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "data": {"data_impl": "mock", "seq_length_dec": 12},
    "optim": {"lr": 1e-2, "sched": {"max_steps": 100, "warmup_steps": 2}},
}


def test_a_t5_tells_its_stacks_apart(tmp_path, capsys):
    run_training(tiny_config(tmp_path, model=T5, trainer__max_steps=2))
    said = capsys.readouterr().out
    assert "  load CV  " in said
    assert "experts of the encoder 4, 1 for each token, in 1 of 2 layers; balancing sinkhorn" in said
    assert "experts of the decoder 2, 1 for each token, in 1 of 2 layers; balancing sinkhorn" in said
    report = exact_rows(tmp_path)[-2]
    assert {"moe/z_loss_encoder_layer_1", "moe/z_loss_decoder_layer_1"} <= report.keys()
    assert sum("moe/z_loss" in name for name in report) == 2
    document = json.loads((tmp_path / "expert_load.json").read_text())
    assert document["layers"] == ["encoder.layers.1.mlp", "decoder.layers.1.mlp"]
    assert document["experts"] == [4, 2]


def test_a_checkpoint_answers_with_its_bias(unbroken):
    trained = load_model(unbroken / "checkpoints" / "step-6", "cpu")
    layers = find_moe_layers(trained.model)
    biases = [of_bias(layer)[0] for layer in layers.values()]
    assert all(bias.any() for bias in biases)
    tokens = torch.arange(16)[None]
    before = trained.model(tokens)
    for bias in biases:
        bias.zero_().narrow(0, 0, 1).fill_(100.0)  # everything to the first expert
    assert not torch.equal(trained.model(tokens), before)
    assert not any(layer.statistics.any() for layer in layers.values())


@full_only
def test_compiled_layers_count_as_plain_ones(unbroken, tmp_path):
    run_training(tiny_config(tmp_path, **{**MOE, "model__compile": True}))
    ours, theirs = (
        [line["load_balancing_loss"] for line in exact_rows(run) if "load_cv" in line] for run in (tmp_path, unbroken)
    )
    assert ours == pytest.approx(theirs, rel=0.05)  # compiled code draws other dropout masks and jitter
    maps = [json.loads((run / "expert_load.json").read_text())["rows"] for run in (tmp_path, unbroken)]
    assert [sum(map(sum, row["tokens"])) for row in maps[0]] == [sum(map(sum, row["tokens"])) for row in maps[1]]


@full_only
def test_the_study_of_the_load(tmp_path):
    script = Path(__file__).parents[2] / "scripts" / "moe_balance.py"
    command = [sys.executable, str(script), "--steps", "20", "--seeds", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "| without (coefficient 0) |" in done.stdout
    document = json.loads((tmp_path / "moe_balance.json").read_text())
    assert [(run["kind"], run["step"]) for run in document["runs"]] == [
        (kind, [1, 10, 20]) for kind in ("with", "without")
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("global_batch", [2, 6])
def test_recorded_micro_batches_count_and_balance_as_plain_ones(tmp_path, global_batch):
    runs = []
    for recorded in (False, True):
        directory = tmp_path / f"recorded-{recorded}"
        changes = {
            "model__global_batch_size": global_batch,
            "model__enable_cuda_graph": recorded,
        }
        run_training(tiny_config(directory, **{**MOE, **EAGER_ON_GPU, **changes}))
        runs.append((final_hashes(directory, 6), exact_rows(directory)))
    assert runs[0] == runs[1]
