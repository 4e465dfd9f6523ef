"""Runs that cannot start end before anything is built or written, in lines that name the keys."""

import gc
import os
import weakref

import pytest
import torch
from config_helpers import gpt, load
from resolved import build_data, check_memory, choose_attention
from tiny_run import tiny_config

from stoker.kernels.launch import INTERPRETED
from stoker.models.model_cost import count_parameters, count_slice_parameters
from stoker.models.tensor_parallel import rank_slice
from stoker.trainer.cli.thread_tuning import measure_step_time
from stoker.trainer.config.resolved_run import resolve_run
from stoker.trainer.conversion import load_model
from stoker.trainer.core.run_context import free_previous_runs
from stoker.trainer.data import build_datasets
from stoker.trainer.device.choose_device import choose_device, device_from_option
from stoker.trainer.plan import memory_check
from stoker.trainer.train import run_training
from stoker.trainer.utils import environment
from stoker.trainer.utils.errors import EXIT_BAD_INPUT, EXIT_IO, UserError
from stoker.trainer.utils.host_memory import host_memory, is_out_of_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 10**9},
        {"hidden_size": 10**12},
        {"ffn_hidden_size": 2**63 - 1},
        {"global_batch_size": 2**12, "micro_batch_size": 2**12, "encoder_seq_length": 2**24},
        {"hidden_size": 2**14, "max_position_embeddings": 2**24},
        {"position_embedding_type": "rope", "hidden_size": 2**14, "max_position_embeddings": 2**24},
        {"override_vocab_size": 10**12},
        {"make_vocab_size_divisible_by": 10**12},
        {"global_batch_size": 10**10, "micro_batch_size": 10**10},
        {"global_batch_size": 10**12},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_what_cannot_fit_is_refused_before_anything_is_built(tmp_path, changes):
    with pytest.raises(UserError) as error:
        run_training(tiny_config(tmp_path / "run", **{f"model__{key}": value for key, value in changes.items()}))
    assert error.value.exit_code == EXIT_BAD_INPUT
    first, second = error.value.lines
    assert first.startswith("out of memory: ")
    key, value = list(changes.items())[-1]
    assert f"`{key}` ({value})" in second
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("precision", "bytes_per_parameter"), [("32", 16), ("bf16", 16), ("bf16-true", 8)])
def test_the_bound_is_that_of_weights_gradients_and_optimizer(tmp_path, monkeypatch, precision, bytes_per_parameter):
    changes = {"model__num_layers": 50, "model__override_vocab_size": 259}
    root = tiny_config(tmp_path, trainer__precision=precision, **changes).root
    state = count_parameters(root.model, 259) * bytes_per_parameter
    monkeypatch.setattr(memory_check, "host_memory", lambda: state - 1)
    with pytest.raises(UserError, match="parameters with their gradients"):
        check_memory(root, CPU)
    monkeypatch.setattr(memory_check, "host_memory", lambda: state)
    with pytest.raises(UserError, match="activations of one micro batch"):
        check_memory(root, CPU)
    monkeypatch.setattr(memory_check, "host_memory", lambda: state * 2)
    check_memory(root, CPU)
    monkeypatch.setattr(memory_check, "host_memory", lambda: None)
    check_memory(root, CPU)


@pytest.mark.parametrize(
    ("layout", "bytes_per_parameter"),
    [
        ({}, 16 + 4),
        ({"model__optim__name": "distributed_fused_adam"}, 4 + 12 / 4 + 4 / 4),
        ({"model__fsdp": True}, (16 + 4) / 4),
        ({"model__fsdp": True, "model__fsdp_sharding_strategy": "grad"}, 2 + (14 + 4) / 4),
        (
            {"model__fsdp": True, "model__fsdp_sharding_strategy": "hybrid", "model__fsdp_shard_size": 2},
            (16 + 4) / 2,
        ),
    ],
)
def test_each_process_needs_what_it_holds(tmp_path, monkeypatch, layout, bytes_per_parameter):
    changes = {"model__num_layers": 50, "model__override_vocab_size": 256, "exp_manager__ema": {"enable": True}}
    root = tiny_config(tmp_path, trainer__precision="bf16", model__global_batch_size=8, **changes, **layout).root
    need = count_parameters(root.model, 256) * bytes_per_parameter
    monkeypatch.setattr(memory_check, "host_memory", lambda: 4 * int(need - 100))  # four processes share a host
    with pytest.raises(UserError, match=r"parameters with their gradients .* in each process"):
        check_memory(root, CPU, world_size=4)
    monkeypatch.setattr(memory_check, "host_memory", lambda: 4 * int(need + 100))
    with pytest.raises(UserError, match="activations of one micro batch"):
        check_memory(root, CPU, world_size=4)


def test_a_tensor_parallel_rank_needs_its_part(tmp_path, monkeypatch):
    split = {"model__tensor_model_parallel_size": 2, "model__hidden_dropout": 0.0, "model__attention_dropout": 0.0}
    changes = {"model__num_layers": 50, "model__override_vocab_size": 256, "trainer__precision": "32"}
    root = tiny_config(tmp_path, **changes, **split).root
    part = rank_slice(resolve_run(root).family, 2)
    need = count_slice_parameters(part) * 16
    assert need < 0.6 * count_parameters(root.model, 256) * 16
    for host, message in (
        (need - 100, "parameters with their gradients"),
        (need + 100, "activations of one micro batch"),
    ):
        monkeypatch.setattr(memory_check, "host_memory", lambda host=host: 2 * host)
        with pytest.raises(UserError, match=message):
            check_memory(root, CPU, world_size=2)


def test_the_memory_of_this_machine_is_known():
    assert 2**28 < (host_memory() or 2**30) < 2**50


def test_an_allocation_that_fails_is_an_error_of_the_user(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**50)
    assert is_out_of_memory(failed.value)
    assert not is_out_of_memory(RuntimeError("shapes differ"))

    def fail(*_):
        raise failed.value

    monkeypatch.setattr(build_datasets, "_mock_data", fail)
    with pytest.raises(UserError, match="out of memory on cpu") as error:
        run_training(tiny_config(tmp_path / "run"))
    assert "micro_batch_size" in error.value.lines[1]
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_over_is_held_by_nothing_but_itself(tmp_path):
    """So that the memory of its device is free again before the next one in the process begins."""
    models = []
    for number in range(2):
        result = run_training(tiny_config(tmp_path / str(number), trainer__max_steps=2))
        models.append(weakref.ref(result.model))
        assert result.model is models[-1]()
        del result
        gc.collect()
        assert [model() for model in models] == [None] * len(models)


@pytest.mark.parametrize(("kind", "is_initialized"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_peaks_are_those_of_the_run(monkeypatch, kind, is_initialized):
    """Before CUDA is initialized its allocator has no figures, and would refuse to begin anew."""
    begun = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", begun.append)
    device = torch.device(kind)
    free_previous_runs(device)
    assert begun == ([device] if kind == "cuda" and is_initialized else [])


@pytest.mark.parametrize("choose", [choose_device, device_from_option])
def test_segments_of_device_memory_grow_where_a_gpu_is_chosen(monkeypatch, choose):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(environment.sys, "platform", "linux")
    for kind, expected in (("cpu", None), ("cuda", "expandable_segments:True")):
        for name in environment.ALLOCATOR_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        choose(load(f"trainer.accelerator={kind}").root.trainer if choose is choose_device else kind)
        assert os.environ.get("PYTORCH_ALLOC_CONF") == expected
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")


def test_variables_are_set_for_whoever_trains_from_python(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_OF_A_TEST", "before")
    run_training(tiny_config(tmp_path / "run", env_vars={"STOKER_OF_A_TEST": "1"}, trainer__max_steps=1))
    assert os.environ["STOKER_OF_A_TEST"] == "1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__attention_backend": "sdpa_cudnn"}, "needs a CUDA device"),
        ({"model__data": {"data_impl": "text", "path": "nowhere"}}, "cannot read nowhere"),
        ({"model__data": {"data_impl": "text", "path": "~nobody.at.all/x"}}, "no such home directory"),
        ({"exp_manager__resume_from_checkpoint": "nowhere"}, "no such directory"),
        ({"exp_manager__resume_from_checkpoint": "~nobody.at.all/x"}, "no such home directory"),
    ],
)
def test_what_cannot_start_writes_nothing(tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as error:
        run_training(tiny_config(tmp_path / "run", **changes))
    assert error.value.exit_code == EXIT_BAD_INPUT
    assert not (tmp_path / "run").exists()


def test_a_flag_that_is_no_flag_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("NVTE_FLASH_ATTN", "3")
    with pytest.raises(UserError, match=r"NVTE_FLASH_ATTN.* must be 0 or 1"):
        run_training(tiny_config(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_directory_of_checkpoints_that_cannot_be_written_is_found_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    params = {"dirpath": str(tmp_path / "file")}
    with pytest.raises(UserError, match=r"checkpoint_callback_params\.dirpath") as error:
        run_training(tiny_config(tmp_path / "run", exp_manager__checkpoint_callback_params=params))
    assert error.value.exit_code == EXIT_IO
    assert not (tmp_path / "run").exists()


def test_a_refused_resume_leaves_the_record_of_the_run(tmp_path):
    run_training(tiny_config(tmp_path, trainer__max_steps=1))
    record = (tmp_path / "config.resolved.json").read_text()
    with pytest.raises(UserError, match="does not fit"):
        run_training(tiny_config(tmp_path, model__hidden_size=64))
    assert (tmp_path / "config.resolved.json").read_text() == record


def test_a_checkpoint_that_asks_for_too_large_a_model_is_not_built(tmp_path, monkeypatch):
    run_training(tiny_config(tmp_path, trainer__max_steps=1))
    monkeypatch.setattr(load_model, "host_memory", lambda: 1000)
    with pytest.raises(UserError, match="weights of its configuration need"):
        load_model.load_model(tmp_path, "cpu")


def test_quickstart_measures_no_model_that_cannot_fit(tmp_path):
    root = tiny_config(tmp_path, model__num_layers=10**9).root
    data = build_data(tiny_config(tmp_path).root)
    with pytest.raises(UserError, match="out of memory"):
        measure_step_time(resolve_run(root), data, CPU, 0.0)


@pytest.mark.skipif(not INTERPRETED, reason="on a CPU Triton needs its interpreter")
def test_a_mask_counts_where_the_backend_needs_one(tmp_path, monkeypatch):
    """Documents go to `triton` as lengths and to `unfused` as a mask of length x length."""
    for backend, needs in (("unfused", True), ("triton", False)):
        root = tiny_config(
            tmp_path, model__data__reset_attention_mask=True, model__attention_backend=backend, model__kv_channels=16
        ).root
        length, batch = gpt(root).encoder_seq_length, root.model.micro_batch_size
        found = memory_check._mask_bytes(choose_attention(resolve_run(root), CPU))
        assert found == (batch * length * length * 4 if needs else 0)
