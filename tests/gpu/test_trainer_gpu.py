"""Whole runs on a CUDA device: no host sync inside a step, exact resume, and the same training as on a CPU."""

from typing import Any

import pytest
from run_metrics import logged
from tiny_run import assert_resume_is_exact, tiny_config

from stoker.trainer.train import run_training

pytestmark = pytest.mark.gpu

GPU = {"trainer__accelerator": "gpu"}
NO_DROPOUT = {"model__hidden_dropout": 0.0, "model__attention_dropout": 0.0}
LLAMA = {
    "model__hidden_size": 128,
    "model__ffn_hidden_size": 256,
    "model__num_attention_heads": 4,
    "model__num_query_groups": 2,
    "model__encoder_seq_length": 128,
    "model__normalization": "rmsnorm",
    "model__activation": "swiglu",
    "model__bias": False,
    "model__position_embedding_type": "rope",
    "model__share_embeddings_and_output_weights": False,
}
EXPERTS = {
    "model__num_moe_experts": 8,
    "model__moe_router_topk": 2,
    "model__moe_aux_loss_coeff": 1e-2,
    "model__moe_z_loss_coeff": 1e-3,
}
PACKED = {"data_impl": "mock", "reset_position_ids": True, "reset_attention_mask": True}


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", "bf16-true", "32"])
@pytest.mark.parametrize("global_batch", [2, 6])
@pytest.mark.parametrize("data", ["whole", "packed"])
def test_a_step_never_waits_for_the_device(tmp_path, steps_without_sync, precision, global_batch, data):
    settings: dict[str, Any] = GPU | LLAMA | NO_DROPOUT | {"trainer__precision": precision}
    settings["model__global_batch_size"] = global_batch
    if data == "packed":
        settings["model__data"] = PACKED
    result = run_training(tiny_config(tmp_path, **settings))
    assert steps_without_sync == [3, 4, 5, 6, 7, 8]
    assert result.step == 8


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"model__bias": True, "model__moe_layer_recompute": True, "model__moe_input_jitter_eps": 0.1},
        {"model__moe_expert_capacity_factor": 1.0, "model__moe_dropout": 0.1},
        {"model__moe_router_force_load_balancing": True},
        {"model__moe_expert_capacity_factor": 1.0, "model__moe_pad_expert_input_to_capacity": True},
        {"model__bias": True, "trainer__deterministic": True},
        {"model__moe_router_load_balancing_type": "sinkhorn", "model__moe_aux_loss_coeff": 0.0},
    ],
    ids=["plain", "recompute", "capacity", "forced", "padded", "deterministic", "sinkhorn"],
)
def test_a_step_with_experts_never_waits_for_the_device(tmp_path, steps_without_sync, case, compiled):
    settings = GPU | LLAMA | NO_DROPOUT | EXPERTS | case | {"model__compile": compiled, "trainer__precision": "bf16"}
    assert run_training(tiny_config(tmp_path, **settings)).step == 8
    assert steps_without_sync == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_train_2n_equals_train_n_resume_train_n(tmp_path, monkeypatch, precision):
    """Dropout on; bit for bit, with the attention held to kernels whose backward is deterministic."""
    settings = GPU | LLAMA | {"trainer__precision": precision, "model__attention_backend": "unfused"}
    assert_resume_is_exact(tmp_path, 8, **settings)


def assert_like_the_cpu(tmp_path, settings):
    """The same weights, samples and schedule; fp32 differs by rounding, bf16 by its precision."""
    cpu, fp32, bf16 = tmp_path / "cpu", tmp_path / "fp32", tmp_path / "bf16"
    run_training(tiny_config(cpu, **settings))
    run_training(tiny_config(fp32, **settings, **GPU, trainer__precision="32"))
    run_training(tiny_config(bf16, **settings, **GPU, trainer__precision="bf16"))
    for on_cpu, in_fp32, in_bf16 in zip(logged(cpu, "loss"), logged(fp32, "loss"), logged(bf16, "loss"), strict=True):
        assert in_fp32 == pytest.approx(on_cpu, rel=1e-5)
        assert in_bf16 == pytest.approx(on_cpu, rel=5e-3)


def test_gpu_trains_like_the_cpu(tmp_path):
    settings = LLAMA | NO_DROPOUT | {"model__optim__lr": 1e-3}
    assert_like_the_cpu(tmp_path, settings)


@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_packed_documents_train_like_on_the_cpu(tmp_path, positions):
    """End tokens that chance draws; compiled, in fp32 and bf16."""
    settings = LLAMA | NO_DROPOUT | {"model__optim__lr": 1e-3, "model__data": PACKED}
    settings["model__position_embedding_type"] = positions
    assert_like_the_cpu(tmp_path, settings)


def test_compiled_and_eager_layers_train_alike(tmp_path):
    settings = GPU | LLAMA | NO_DROPOUT | {"trainer__precision": "32"}
    compiled = run_training(tiny_config(tmp_path / "compiled", **settings, model__compile=True))
    eager = run_training(tiny_config(tmp_path / "eager", **settings, model__compile=False))
    assert compiled.model.compiled
    assert not eager.model.compiled
    for ours, theirs in zip(logged(compiled.directory, "loss"), logged(eager.directory, "loss"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
