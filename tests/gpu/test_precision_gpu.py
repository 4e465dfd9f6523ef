"""fp16 on a CUDA device: weights, autocast and loss scale, compiled and as CUDA graphs; an fp32 residual stream."""

from typing import Any

import pytest
import torch
from gpt_builder import build_gpt
from run_metrics import metric_rows
from tiny_run import assert_resume_is_exact, final_hashes, tiny_config

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.config.gpt import GPTKeys
from stoker.trainer.train import run_training

pytestmark = pytest.mark.gpu

FP16 = {
    "trainer__accelerator": "gpu",
    "trainer__max_steps": 14,
    "trainer__val_check_interval": 14,
    "trainer__log_every_n_steps": 1,
    "model__native_amp_init_scale": 2.0**28,
    "model__native_amp_growth_interval": 4,
    "model__hysteresis": 1,
    "model__hidden_size": 128,
    "model__ffn_hidden_size": 256,
    "model__num_attention_heads": 2,
    "model__encoder_seq_length": 128,
    "model__normalization": "rmsnorm",
    "model__activation": "swiglu",
    "model__bias": False,
    "model__position_embedding_type": "rope",
    "model__hidden_dropout": 0.0,
    "model__attention_dropout": 0.0,
    "model__optim": {"lr": 1e-3, "sched": {"max_steps": 100, "warmup_steps": 2}},
}
PRECISIONS = ["16", "16-mixed", "16-true"]


def figures(directory):
    rows = metric_rows(directory)
    return [
        [row.get(name) for name in ("loss", "grad_norm", "loss_scale", "skipped_steps")] for row in rows if "lr" in row
    ]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_cuda_graphs_skip_the_same_steps_and_reach_the_same_bits(tmp_path, precision):
    """The graph is captured while the scale still falls, and reads the scale of its step."""
    found = {}
    for graph in (False, True):
        directory = tmp_path / str(graph)
        changes = {"trainer__precision": precision, "model__enable_cuda_graph": graph, "model__compile": True}
        run_training(tiny_config(directory, **(FP16 | changes)))
        found[graph] = figures(directory), final_hashes(directory, 14)
    assert found[True] == found[False]
    skipped: list[Any] = [row[3] for row in found[True][0]]
    assert 4 < skipped[-1] < 12, "the scale falls beyond the warm-up of the graph, and steps follow"


def test_fp16_trains_close_to_fp32_and_never_waits(tmp_path, steps_without_sync):
    changes = {"model__native_amp_init_scale": 2.0**12, "trainer__log_every_n_steps": 14}
    losses = {}
    for precision in ("32", *PRECISIONS):
        directory = tmp_path / precision
        result = run_training(tiny_config(directory, **(FP16 | changes | {"trainer__precision": precision})))
        assert result.validation is not None
        losses[precision] = result.validation.loss
    assert len(steps_without_sync) >= 4 * 8
    for precision in PRECISIONS:
        assert losses[precision] == pytest.approx(losses["32"], rel=5e-3)
        assert losses[precision] != losses["32"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_resume_is_exact_while_the_scale_changes(tmp_path, precision):
    changes = FP16 | {
        "trainer__precision": precision,
        "trainer__deterministic": True,
        "model__attention_backend": "triton",
        "trainer__val_check_interval": 7,
    }
    whole, halves = assert_resume_is_exact(tmp_path, 14, **changes)
    assert figures(whole) == figures(halves)
    assert len({row[2] for row in figures(whole)}) > 3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_fp32_residual_stream_is_as_exact_as_a_narrow_one(dtype, compiled):
    keys = {
        "num_layers": 3, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4,
        "encoder_seq_length": 256, "hidden_dropout": 0.0, "attention_dropout": 0.0, "normalization": "rmsnorm",
        "activation": "swiglu", "bias": False, "position_embedding_type": "rope", "compile": compiled,
    }  # fmt: skip
    tokens = torch.randint(0, 90, (2, 256), generator=torch.Generator().manual_seed(0)).cuda()
    gradients = {}
    for name, wide in (("exact", False), ("narrow", False), ("wide", True)):
        exact = name == "exact"
        model = build_gpt(
            GPTKeys.model_validate({**keys, "fp32_residual_connection": wide, "compile": compiled and not exact}),
            vocab_size=90, device="cuda", dtype=torch.float64 if exact else dtype, flags=AttentionFlags(),
            micro_batch_size=2,
        )  # fmt: skip
        if exact:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype).double()
        model.train().loss(tokens, tokens, 0.5).backward()
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        gradients[name] = torch.cat([gradient.double().flatten() for gradient in found])
    error = {name: ((found - gradients["exact"]).norm() / gradients["exact"].norm()).item()
             for name, found in gradients.items()}  # fmt: skip
    assert error["wide"] <= 1.05 * error["narrow"]
    assert error["narrow"] < (0.1 if dtype == torch.bfloat16 else 0.02)
