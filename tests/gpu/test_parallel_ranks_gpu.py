"""Two ranks on one GPU, compiled and eager, train what one rank trains: each axis, with the kernels of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_ranks import losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

MODEL = [
    "model=gpt_tiny",
    "data=mock",
    "trainer.accelerator=gpu",
    "trainer.max_steps=4",
    "trainer.val_check_interval=4",
    "trainer.limit_val_batches=2",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "exp_manager.create_checkpoint_callback=false",
    "exp_manager.create_tensorboard_logger=false",
    "model.num_layers=2",
    "model.hidden_size=256",
    "model.ffn_hidden_size=512",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.encoder_seq_length=512",
    "model.micro_batch_size=2",
    "model.global_batch_size=4",
    "model.activation=fast-swiglu",
    "model.bias=false",
    "model.position_embedding_type=rope",
    "model.hidden_dropout=0.1",
    "model.attention_dropout=0.0",
]
T5 = [
    "model=t5_tiny",
    *(key for key in MODEL[1:] if not key.startswith("model.")),
    *("model.seq_length=512", "model.data.seq_length_dec=128", "model.micro_batch_size=2", "model.global_batch_size=4"),
]
EXPERTS = [
    "model.num_moe_experts=4",
    "model.moe_router_topk=2",
    "model.moe_shared_expert_intermediate_size=128",
    "model.moe_input_jitter_eps=0.01",
]
TENSOR = ["model.tensor_model_parallel_size=2"]
SEQUENCE = [*TENSOR, "model.sequence_parallel=true"]
PIPELINE = ["model.pipeline_model_parallel_size=2"]
OURS = "model.attention_backend=triton"
SINGLE = ["trainer.precision=32", "model.compile=false", OURS]
"""fp32, without TensorFloat-32."""


def context(exchange: str) -> list[str]:
    return ["model.context_parallel_size=2", f"model.cp_comm_type={exchange}"]


def expert(dispatcher: str) -> list[str]:
    return ["model.expert_model_parallel_size=2", f"model.moe_token_dispatcher_type={dispatcher}"]


LAYOUTS: dict[str, list[str]] = {
    "data": [],
    "zero1": ["model.optim.name=distributed_fused_adam"],
    "fsdp": ["model.fsdp=true"],
    "tensor": TENSOR,
    "sequence": SEQUENCE,
    "overlap": [*SEQUENCE, "model.ub_tp_comm_overlap=true"],
    "ring": context("p2p"),
    "all_gather": context("all_gather"),
    "a2a": context("a2a"),
    "pipeline": PIPELINE,
    "interleaved": [*PIPELINE, "model.num_layers=4", "model.virtual_pipeline_model_parallel_size=2"],
}
MOE_LAYOUTS: dict[str, list[str]] = {
    "data": [],
    "fsdp": ["model.fsdp=true"],
    "sequence": SEQUENCE,
    "alltoall": expert("alltoall"),
    "allgather": expert("allgather"),
    "alltoall, sequence": [*SEQUENCE, *expert("alltoall")],
    "all_gather": context("all_gather"),
    "alltoall, ring": [*context("p2p"), *expert("alltoall")],
    "pipeline": PIPELINE,
}
T5_PIPELINE = [*PIPELINE, "model.pipeline_model_parallel_split_rank=1"]
PRECISIONS = {
    "fp32": (SINGLE, 2e-5),
    "bf16": (["trainer.precision=bf16-mixed", "model.compile=true"], 2e-2),
    "bf16 weights": (["trainer.precision=bf16", "model.compile=true"], 2e-2),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], list[float]]:
    return {}


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize(
    ("experts", "layout"), [*((False, name) for name in LAYOUTS), *((True, name) for name in MOE_LAYOUTS)]
)
def test_two_ranks_train_what_one_rank_trains(
    experts: bool, layout: str, precision: str, alone: dict[tuple[str, ...], list[float]], tmp_path: Path
) -> None:
    numbers, tolerance = PRECISIONS[precision]
    keys = (MOE_LAYOUTS if experts else LAYOUTS)[layout]
    layers = [key for key in keys if key.startswith("model.num_layers")]
    common = [*MODEL, *numbers, *(EXPERTS if experts else []), *layers]
    if tuple(common) not in alone:
        alone[tuple(common)] = losses(tmp_path / "alone", 1, [*common, "trainer.devices=1"])
    together = losses(tmp_path / "together", 2, [*common, *keys, "trainer.devices=2"])
    assert together == pytest.approx(alone[tuple(common)], rel=tolerance)
    assert "has no effect" not in (tmp_path / "together" / "run.log").read_text()


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_encoder_and_decoder_on_two_ranks_train_what_one_rank_trains(precision: str, tmp_path: Path) -> None:
    numbers, tolerance = PRECISIONS[precision]
    common = [*T5, *(key for key in numbers if key != OURS)]
    alone = losses(tmp_path / "alone", 1, [*common, "trainer.devices=1"])
    together = losses(tmp_path / "together", 2, [*common, *T5_PIPELINE, "trainer.devices=2"])
    assert together == pytest.approx(alone, rel=tolerance)
