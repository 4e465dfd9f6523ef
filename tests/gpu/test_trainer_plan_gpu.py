"""The plan of short runs beside what the allocator of a GPU measures."""

import gc
from pathlib import Path

import pytest
import torch
from config_helpers import load
from resolved import resolved_on

from stoker.trainer.plan.run_plan import local_target, make_plan
from stoker.trainer.train import run_training

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

RECOMPUTE = "model.activations_checkpoint"
SHAPE = [
    "trainer=gpu",
    "data=mock",
    "trainer.max_steps=2",
    "trainer.limit_val_batches=0",
    "exp_manager.create_checkpoint_callback=False",
    "exp_manager.create_tensorboard_logger=False",
    "model.micro_batch_size=4",
    "model.global_batch_size=4",
    "model.override_vocab_size=32000",
]
GPT = ["model=llama_1b", *SHAPE, "model.num_layers=8", "model.hidden_size=1024", "model.ffn_hidden_size=2816"]
FULL = [f"{RECOMPUTE}_granularity=full", f"{RECOMPUTE}_method=uniform"]
RUNS = {
    "none": GPT,
    "two micro batches": [*GPT, "model.global_batch_size=8"],
    "autocast": [*GPT, "model.megatron_amp_O2=False"],
    "as written": [*GPT, "model.compile=False"],
    "cheap": [*GPT, f"{RECOMPUTE}_modules=[norm,mlp_activation]"],
    "full": [*GPT, *FULL, f"{RECOMPUTE}_num_layers=1"],
    "chunks": [*GPT, *FULL, f"{RECOMPUTE}_num_layers=4"],
    "scores": [*GPT, "model.attention_backend=unfused", "model.encoder_seq_length=1024"],
    "offload": [*GPT, "model.cpu_offloading=True", "model.cpu_offloading_num_layers=4"],
    "optimizer on the host": [*GPT, "model.cpu_offloading_optimizer=True"],
    "experts": [*GPT, "model.num_moe_experts=8", "model.moe_router_topk=2", "model.ffn_hidden_size=1024"],
    "t5": ["model=t5_v1_1_base", *SHAPE, "model.seq_length=2048", "model.data.seq_length_dec=512"],
}


@pytest.mark.parametrize("name", RUNS)
def test_the_peak_is_met(name: str, tmp_path: Path) -> None:
    config = load(*RUNS[name], f"exp_manager.explicit_log_dir={tmp_path / 'run'}")
    device = torch.device("cuda", 0)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats(device)
    run = resolved_on(config.root, device)
    plan = make_plan(run, local_target(run, device), vocab_size=32000)
    run_training(config)
    measured = torch.cuda.max_memory_allocated(device) - before
    assert plan.allocated == pytest.approx(measured, rel=0.08), plan.memory.peak.where
    log = (tmp_path / "run" / "run.log").read_text()
    assert "plan: " in log
    assert "memory at the peak: allocated" in log
