"""Keys whose effect takes more than one observable of one configuration: each has a story of its own."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from config_harness import (
    AVERAGES,
    CALLBACK,
    CPU,
    DATA,
    MANAGER,
    MODEL,
    OPTIM,
    SAVES,
    SCHED,
    STOPPING,
    STOPS,
    TEXT,
    TOKENIZER,
    TRAINER,
    VALIDATES,
    Changes,
    ConfigHarness,
)
from config_helpers import gpt, load, problems
from deferred_copies import DeferredCopies
from deferred_copies import install as install_deferred_copies
from key_observables import (
    checkpoints,
    first_batch,
    layout,
    rates,
    stepped,
    stopped_by,
    task_batch,
    task_config,
    tokenizer_files,
    tokens_of_text,
    trained,
    training_loss,
    validation_losses,
)
from pytorch_lightning.loggers.logger import DummyLogger
from resolved import build_data
from run_metrics import metric_rows

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models import build
from stoker.models.build import build_model, decide_compile
from stoker.models.config import extensions
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.dispatch.context_calls import ContextSplit
from stoker.models.fp8 import fp8_modules
from stoker.models.layers.attention import Attention
from stoker.models.layers.dropout import DropoutMask
from stoker.models.parallel.collectives import TensorParallel
from stoker.models.parallel.layout import ParallelLayout
from stoker.models.parallel.stages import PipelineSplit
from stoker.models.recompute.per_stage import StageRecompute
from stoker.trainer.callbacks import profiler
from stoker.trainer.callbacks.divergence import DivergedError, LossMonitor
from stoker.trainer.callbacks.early_stopping import EarlyStopping
from stoker.trainer.checkpoint import async_saver
from stoker.trainer.checkpoint.loop_state import EarlyStoppingState, LoopState
from stoker.trainer.checkpoint.reader import find_checkpoint
from stoker.trainer.cli import main
from stoker.trainer.config.dataset_names import BUILT_IN_DATASETS, PAIR_SOURCES
from stoker.trainer.config.resolved_run import ResolvedRun, resolve_run
from stoker.trainer.config.run_config import RunConfig
from stoker.trainer.config.schema.exp_manager import EarlyStoppingParams
from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.core import run_context, training_loop
from stoker.trainer.data.datasets.samples import MockSamples
from stoker.trainer.data.sources.indexed_tokens import IndexedWriter
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer
from stoker.trainer.distributed import node_agent
from stoker.trainer.distributed.copy_engine import build_collectives
from stoker.trainer.distributed.placement import Placement
from stoker.trainer.distributed.placement import resolve_placement as place_processes
from stoker.trainer.distributed.process_group import DistributedContext
from stoker.trainer.evaluation.held_out_loss import EvaluationResult
from stoker.trainer.lightning import lightning_module
from stoker.trainer.loggers import logger_backends
from stoker.trainer.loggers.logger_backends import LoggedRun
from stoker.trainer.optim import optimizer_factory as optim_build
from stoker.trainer.optim.ema import EMA
from stoker.trainer.plan import run_inputs
from stoker.trainer.plan.hardware import parse_gpu
from stoker.trainer.plan.run_plan import gpu_target, make_plan
from stoker.trainer.plan.traffic import step_traffic
from stoker.trainer.train import train_as_rank
from stoker.trainer.utils.errors import UserError

pytestmark = pytest.mark.usefixtures("without_plots", "small_pystd")


SCENARIOS: dict[str, Callable[[ConfigHarness], None]] = {}


def story(*keys: str) -> Callable[[Callable[[ConfigHarness], None]], Callable[[ConfigHarness], None]]:
    """Register a function that shows the effect of these keys."""

    def note(told: Callable[[ConfigHarness], None]) -> Callable[[ConfigHarness], None]:
        SCENARIOS.update(dict.fromkeys(keys, told))
        return told

    return note


@story("env_vars")
def variables_are_set_for_training(harness: ConfigHarness) -> None:
    harness.monkeypatch.setenv("STOKER_TEST", "")
    harness.monkeypatch.delenv("STOKER_TEST")
    seen: list[str | None] = []
    harness.monkeypatch.setattr("stoker.trainer.train.train", lambda _: seen.append(os.environ.get("STOKER_TEST")) or 0)
    assert main.main(["train", "data=mock"]) == 0
    assert main.main(["train", "data=mock", "env_vars.STOKER_TEST=true"]) == 0
    assert seen == [None, "1"]


@story("trainer.devices", "trainer.num_nodes")
def processes_are_placed(harness: ConfigHarness) -> None:
    def placed(changes: Changes, **environ: str) -> tuple[int, int, int]:
        found = place_processes(harness.root(changes).trainer, environ)
        return found.world_size, found.ranks_per_node, found.node_rank

    assert placed({}) == (1, 1, 0)
    assert placed({TRAINER + "devices": 3}) == (3, 3, 0)
    meeting = {"MASTER_ADDR": "first", "MASTER_PORT": "29500", "NODE_RANK": "1"}
    assert placed({TRAINER + "devices": 3, TRAINER + "num_nodes": 2}, **meeting) == (6, 3, 1)
    with pytest.raises(UserError, match="MASTER_ADDR"):
        placed({TRAINER + "num_nodes": 2})


@story("model.fsdp", "model.fsdp_shard_size")
def parameters_are_cut(harness: ConfigHarness) -> None:
    cut = {MODEL + "fsdp": True}
    hybrid = {**cut, MODEL + "fsdp_sharding_strategy": "hybrid"}
    found = [
        layout(harness, {}),
        layout(harness, {OPTIM + "name": "distributed_fused_adam"}),
        layout(harness, cut),
        layout(harness, {**hybrid, MODEL + "fsdp_shard_size": 2}),
    ]
    assert [(each.replicas, each.shards) for each in found] == [(4, 1), (1, 4), (1, 4), (2, 2)]
    assert len({str(each) for each in found}) == len(found)


@story("model.optim.overlap_param_sync")
def weights_are_gathered_in_the_forward_pass(harness: ConfigHarness) -> None:
    def gathers(changes: Changes) -> list[str]:
        root = harness.root({OPTIM + "name": "distributed_fused_adam", TRAINER + "devices": 2, **changes})
        run = resolve_run(root, world_size=2, capability=(9, 0))
        plan = make_plan(run, gpu_target(run, parse_gpu("h100")))
        return [each.during for each in step_traffic(plan.inputs, plan.memory.layers) if each.kind == "all-gather"]

    assert gathers({OPTIM + "overlap_param_sync": False}) == ["update"]
    assert gathers({OPTIM + "overlap_param_sync": True}) == gathers({}) == ["forward"]


@story(
    "model.tensor_model_parallel_size",
    "model.sequence_parallel",
    "model.ub_tp_comm_overlap",
    "model.tp_comm_overlap_ag",
    "model.tp_comm_overlap_rs",
    "model.context_parallel_size",
    "model.hierarchical_context_parallel_sizes",
    "model.expert_model_parallel_size",
)
def ranks_share_a_replica(harness: ConfigHarness) -> None:
    def mesh(**keys: Any) -> ParallelLayout:
        changes = {TRAINER + "devices": 4, **{MODEL + name: value for name, value in keys.items()}}
        return resolve_run(harness.root(changes), world_size=4).mesh

    assert mesh() == ParallelLayout(data=4)
    assert mesh(tensor_model_parallel_size=2) == ParallelLayout(data=2, tensor=2)
    sharded = mesh(tensor_model_parallel_size=2, sequence_parallel=True)
    assert sharded == ParallelLayout(data=2, tensor=2, sequence=True)
    sequence = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "ub_tp_comm_overlap": True}
    assert mesh(**sequence) == replace(sharded, overlap_gather=True, overlap_scatter=True)
    assert mesh(**sequence, tp_comm_overlap_ag=False) == replace(sharded, overlap_scatter=True)
    assert mesh(**sequence, tp_comm_overlap_rs=False) == replace(sharded, overlap_gather=True)
    assert mesh(context_parallel_size=2) == ParallelLayout(data=2, context=2)
    assert mesh(expert_model_parallel_size=2, num_moe_experts=4) == ParallelLayout(data=4, expert=2)
    keys = {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2], "cp_comm_type": "a2a+p2p"}
    root = harness.root({TRAINER + "devices": 4, **{MODEL + name: value for name, value in keys.items()}})
    assert resolve_run(root, world_size=4).context_split == ContextSplit(4, "a2a+p2p", 2)
    assert resolve_run(root).context_split is None


@story("model.reduce_amax")
def ranks_agree_on_scales(harness: ConfigHarness) -> None:
    def reduces(agree: bool) -> set[bool]:
        changes = {MODEL + "fp8": True, MODEL + "reduce_amax": agree, MODEL + "hidden_size": 32}
        keys = harness.root(changes).model
        model = build_model(
            keys,
            vocab_size=64,
            device="meta",
            dtype=torch.float32,
            flags=AttentionFlags(),
            micro_batch_size=1,
            batch_spec=BatchSpec(seq_length=8),
            tensor_parallel=TensorParallel(0, 2, "group"),
        )
        layers: list[Any] = list(fp8_modules(model).values())
        return {layer.fp8.reduce is not None for layer in layers}

    assert reduces(True) == {True}
    assert reduces(False) == {False}


@story("model.fp8_params")
def weights_are_kept_in_fp8(harness: ConfigHarness) -> None:
    (found,) = (
        stack.fp8
        for stack in resolve_run(harness.root({MODEL + "fp8": True, MODEL + "fp8_params": True})).family.stacks
    )
    assert found is not None
    assert found.keeps_weights
    problem = problems("model.fp8=true", "model.fp8_params=true", "trainer.precision=32")["model.fp8_params"]
    assert "fp32 main weights, which a run with `precision` (32) does not have" in problem.rule


@story("model.fp8_dot_product_attention")
def attention_multiplies_in_fp8(harness: ConfigHarness) -> None:
    def cores(on: bool) -> list[bool]:
        fp8 = {MODEL + name: True for name in ("fp8", "transformer_engine")} | {MODEL + "hidden_size": 32}
        root = harness.root(fp8 | {MODEL + "fp8_dot_product_attention": on})
        assert resolve_run(root).family.stacks[0].attention.fp8 == on
        model = build_model(
            root.model,
            vocab_size=64,
            device="meta",
            dtype=torch.float32,
            flags=AttentionFlags(),
            micro_batch_size=1,
            batch_spec=BatchSpec(seq_length=8),
        )
        return [module.fp8_core is not None for module in model.modules() if isinstance(module, Attention)]

    assert set(cores(True)) == {True}
    assert set(cores(False)) == {False}


@story("model.fp8_hybrid")
def gradients_have_a_format(harness: ConfigHarness) -> None:
    (found,) = (stack.fp8 for stack in resolve_run(harness.root({MODEL + "fp8": True})).family.stacks)
    assert found is not None
    assert found.recipe.backward == "e5m2"
    problem = problems("model.fp8=true", "model.fp8_hybrid=false")["model.fp8_hybrid"]
    assert problem.rule.startswith("`fp8_hybrid` (False) or `fp8_e4m3` (False) must be True")


@story(
    "model.pipeline_model_parallel_size",
    "model.virtual_pipeline_model_parallel_size",
    "model.pipeline_model_parallel_split_rank",
    "model.num_layers_in_first_pipeline_stage",
    "model.num_layers_in_last_pipeline_stage",
    "model.account_for_embedding_in_pipeline_split",
    "model.account_for_loss_in_pipeline_split",
    "model.num_micro_batches_with_partial_activation_checkpoints",
    "model.activations_checkpoint_layers_per_pipeline",
)
def ranks_share_the_layers(harness: ConfigHarness) -> None:
    def run(ranks: int = 2, **keys: Any) -> ResolvedRun:
        keys = {"num_layers": 4, "pipeline_model_parallel_size": ranks, **keys}
        changes = {TRAINER + "devices": 4, **{MODEL + name: value for name, value in keys.items()}}
        return resolve_run(harness.root(changes), world_size=4)

    def split(resolved: ResolvedRun) -> PipelineSplit:
        assert resolved.pipeline is not None
        return resolved.pipeline

    def layers(ranks: int = 2, **keys: Any) -> list[int]:
        resolved = run(ranks, **keys)
        return [len(stage.layers) for stage in split(resolved).stages(resolved.family.stacks[0].num_layers)]

    def recomputed(rank: int, **keys: Any) -> list[int]:
        """Layers of a rank that are recomputed in each of four micro batches."""
        block: dict[str, Any] = {"granularity": "full", "method": "block", "num_layers": 1}
        resolved = run(**{f"activations_checkpoint_{name}": value for name, value in block.items()}, **keys)
        stage, recompute = split(resolved).stages(4)[rank], resolved.family.stacks[0].recompute
        assert recompute is not None
        decision = StageRecompute(recompute, split(resolved), rank)
        return [decision.layers(stage, micro_batch, 4) for micro_batch in range(4)]

    assert run(1).pipeline is None
    assert run().mesh == ParallelLayout(data=2, pipeline=2)
    assert layers() == [2, 2]
    assert layers(4) == layers(virtual_pipeline_model_parallel_size=2) == [1, 1, 1, 1]
    assert layers(num_layers_in_first_pipeline_stage=1) == [1, 3]
    assert layers(num_layers_in_last_pipeline_stage=1) == [3, 1]
    assert layers(num_layers=3, account_for_embedding_in_pipeline_split=True) == [1, 2]
    assert layers(num_layers=3, account_for_loss_in_pipeline_split=True) == [2, 1]
    t5 = load(
        "model=t5_tiny",
        "data=mock",
        "model.pipeline_model_parallel_size=2",
        "model.pipeline_model_parallel_split_rank=1",
        "trainer.devices=2",
    )
    assert split(resolve_run(t5.root, world_size=2)) == PipelineSplit(ranks=2, encoder_ranks=1)
    assert recomputed(0) == recomputed(1) == [1, 1, 1, 1]
    assert recomputed(1, activations_checkpoint_layers_per_pipeline=1) == [0, 0, 0, 0]
    assert recomputed(0, num_micro_batches_with_partial_activation_checkpoints=1) == [1, 2, 1, 2]


@story("trainer.process_timeout")
def a_process_that_waits_gives_up(harness: ConfigHarness) -> None:
    timeouts: list[float] = []

    def join(*place: int, store: Any, timeout: float) -> Any:
        timeouts.append(timeout)
        raise UserError("enough")

    harness.monkeypatch.setattr("stoker.trainer.train.init_distributed", join)
    harness.monkeypatch.setenv("RANK", "0")
    harness.monkeypatch.setenv("WORLD_SIZE", "2")
    for changes in ({}, {TRAINER + "process_timeout": 7.0}):
        document = harness.document(changes)
        config = RunConfig(RootBlock.model_validate(document), document=document)
        with pytest.raises(UserError, match="enough"):
            train_as_rank(config, Placement(2, 2, rank=0))
    assert timeouts == [600.0, 7.0]


@story("trainer.min_nodes", "trainer.max_restarts")
def a_run_goes_on_with_fewer_nodes(harness: ConfigHarness) -> None:
    """Both go to torch's agent as they are; `test_distributed_agent.py` has what it does with them."""
    agents: list[tuple[int, int, int]] = []

    class EnoughError(Exception):
        pass

    def rendezvous(store: Any, fewest: int, most: int, timeout: float) -> Any:
        agents.append((fewest, most, 0))
        return None

    def loop(agent: Any, spec: Any, **_: Any) -> None:
        agents[-1] = (*agents[-1][:2], spec.max_restarts)
        raise EnoughError

    harness.monkeypatch.setattr(node_agent, "build_rendezvous", rendezvous)
    harness.monkeypatch.setattr(node_agent.SimpleElasticAgent, "__init__", loop)
    for changes in ({}, {TRAINER + "min_nodes": 2, TRAINER + "max_restarts": 5}):
        config = RunConfig(harness.root({TRAINER + "num_nodes": 4, **changes}), document={})
        store: Any = None
        with pytest.raises(EnoughError):
            node_agent.NodeAgent(config, Placement(4, 1), store, print, ())
    assert agents == [(4, 4, 0), (2, 4, 5)]


@story("trainer.step_timeout")
def a_step_that_hangs_ends(harness: ConfigHarness) -> None:
    limits: list[float | None] = []
    watch = training_loop.Watchdog

    def record(timer: Any, timeout: float | None, *rest: Any) -> Any:
        limits.append(timeout)
        return watch(timer, timeout, *rest)

    harness.monkeypatch.setattr(training_loop, "Watchdog", record)
    for changes in ({}, {TRAINER + "step_timeout": 9.0}, {TRAINER + "step_timeout": None}):
        harness.metrics(changes)
    assert limits == [300.0, 9.0, None]


@story("model.rampup_batch_size")
def the_batch_grows(harness: ConfigHarness) -> None:
    grows = harness.metrics({MODEL + "rampup_batch_size": [2, 2, 4]})
    assert [row["consumed_samples"] for row in grows if "loss" in row] == [2, 4, 8, 12]


@story(CALLBACK + "async_save")
def checkpoints_are_written_beside_training(harness: ConfigHarness) -> None:
    names: list[str] = []
    write = async_saver.write_checkpoint

    def record(*arguments: Any) -> Path:
        names.append(threading.current_thread().name)
        return write(*arguments)

    harness.monkeypatch.setattr(async_saver, "write_checkpoint", record)
    for beside in (False, True):
        kept = checkpoints(harness, {**SAVES, CALLBACK + "async_save": beside, CALLBACK + "save_top_k": -1})
        assert kept == ["step-1", "step-2", "step-3", "step-4"]
    assert names == ["MainThread"] * 4 + ["checkpoint"] * 4


@story(MANAGER + "resume_from_checkpoint", MANAGER + "resume_if_exists", MANAGER + "resume_ignore_no_checkpoint")
def runs_go_on(harness: ConfigHarness) -> None:
    saves = {MANAGER + "create_checkpoint_callback": True}
    first = harness.run({**saves, TRAINER + "max_steps": 2})
    assert find_checkpoint(first.directory)[0].state.step == 2

    def steps(changes: Changes, directory: Path | None = None) -> list[int]:
        return [row["step"] for row in metric_rows(harness.run(changes, directory).directory)]

    assert steps({}) == [1, 2, 3, 4]
    assert steps({MANAGER + "resume_from_checkpoint": str(first.directory)}) == [3, 4]
    assert steps({MANAGER + "resume_if_exists": True}, first.directory) == [1, 2, 3, 4]
    with pytest.raises(UserError, match="already holds checkpoints"):
        harness.run({MANAGER + "resume_if_exists": False}, first.directory)
    with pytest.raises(UserError, match="resume_ignore_no_checkpoint"):
        harness.run({MANAGER + "resume_ignore_no_checkpoint": False})


@story(CALLBACK + "dirpath")
def checkpoints_go_where_they_should(harness: ConfigHarness) -> None:
    elsewhere = harness.folder / "elsewhere"
    harness.run({MANAGER + "create_checkpoint_callback": True, CALLBACK + "dirpath": str(elsewhere)})
    assert [path.name for path in elsewhere.glob("step-*")] == ["step-4"]


@story(CALLBACK + "monitor", CALLBACK + "mode")
def the_smallest_validation_loss_is_kept(harness: ConfigHarness) -> None:
    measured = iter([3.0, 1.0, 2.0, 4.0])

    def evaluate(*_: Any, **__: Any) -> EvaluationResult:
        return EvaluationResult(loss=next(measured), tokens=1, bytes=0)

    harness.monkeypatch.setattr(training_loop, "evaluate", evaluate)
    keeps_one = {**VALIDATES, TRAINER + "val_check_interval": 1, CALLBACK + "save_top_k": 1}
    assert checkpoints(harness, {**keeps_one, CALLBACK + "save_last": False}) == ["step-2"]


@story(STOPPING + "monitor", STOPPING + "mode", STOPPING + "strict", STOPPING + "check_finite")
def early_stopping_watches_its_metric(harness: ConfigHarness) -> None:
    assert "val_loss" in str(stopped_by(harness, STOPS))
    assert "(loss " in str(stopped_by(harness, {**STOPS, STOPPING + "monitor": "reduced_train_loss"}))
    below = {**STOPS, STOPPING + "patience": 9, STOPPING + "stopping_threshold": 0.1}
    assert [stopped_by(harness, {**below, STOPPING + "mode": mode}) is None for mode in ("min", "max")] == [True, False]
    absent = {**STOPS, STOPPING + "monitor": "bits_per_byte", TRAINER + "limit_val_batches": 0}
    with pytest.raises(UserError, match="was not measured"):
        harness.run(absent)
    assert stopped_by(harness, {**absent, STOPPING + "strict": False}) is None
    for wish, stops in ((True, True), (False, False)):
        params = EarlyStoppingParams.model_validate({"check_finite": wish})
        assert (
            EarlyStopping(params, EarlyStoppingState.model_validate({})).check(float("nan"))[0] is not None
        ) == stops


@story(CALLBACK + "train_time_interval")
def checkpoints_come_by_the_clock(harness: ConfigHarness) -> None:
    timed = {CALLBACK + "save_top_k": -1, CALLBACK + "train_time_interval": "00:00:00:00"}
    assert checkpoints(harness, timed) == ["step-1", "step-2", "step-3", "step-4"]


@story(MANAGER + "files_to_copy")
def files_are_copied(harness: ConfigHarness) -> None:
    directory = harness.run({MANAGER + "files_to_copy": [str(harness.text)]}).directory
    assert (directory / "files" / "text.txt").read_text() == harness.text.read_text()
    with pytest.raises(UserError, match="files_to_copy"):
        harness.run({MANAGER + "files_to_copy": [str(harness.folder / "missing")]})


@story(MANAGER + "ema.cpu_offload")
def the_average_lies_in_host_memory(harness: ConfigHarness) -> None:
    weight = torch.zeros(2, device="meta")
    for offload in (True, False):
        average = EMA({"w": torch.zeros(2)}, decay=0.5, cpu_offload=offload)
        assert average.local_shards()["w"].local.device.type == "cpu"
    assert EMA({"w": weight}, decay=0.5).local_shards()["w"].local.device.type == "meta"
    assert validation_losses(harness, AVERAGES) == validation_losses(
        harness, {**AVERAGES, MANAGER + "ema.cpu_offload": True}
    )


WANDB = ("project", "name", "entity", "group", "job_type", "tags", "notes", "save_dir", "id", "offline")
MLFLOW = ("experiment_name", "run_name", "tracking_uri", "save_dir", "prefix", "tags", "artifact_location", "run_id")
EVENTS = ("max_queue", "flush_secs", "filename_suffix")


@story(
    *(f"{MANAGER}{switch}" for switch in ("create_wandb_logger", "create_mlflow_logger")),
    *(f"{MANAGER}wandb_logger_kwargs.{name}" for name in WANDB),
    *(f"{MANAGER}mlflow_logger_kwargs.{name}" for name in MLFLOW),
    *(f"{MANAGER}summary_writer_kwargs.{name}" for name in EVENTS),
)
def loggers_get_their_settings(harness: ConfigHarness) -> None:
    """Each setting reaches its logger; what the loggers do with it is in test_trainer_loggers.py."""
    made: dict[str, Any] = {}
    blocks = {"wandb": "wandb_logger_kwargs", "mlflow": "mlflow_logger_kwargs", "tensorboard": "summary_writer_kwargs"}

    class Logger:
        def __init__(self, run: LoggedRun, directory: Path, resumed_at: int, block: str) -> None:
            made[block] = getattr(run.keys, block).model_dump()

        def log(self, step: int, metrics: Any, group: str) -> None: ...

        def close(self, *, failed: bool) -> None: ...

    for name, block in blocks.items():
        backend = logger_backends.BACKENDS[name]
        fake = backend._replace(open=partial(Logger, block=block))
        harness.monkeypatch.setitem(logger_backends.BACKENDS, name, fake)
    harness.monkeypatch.setattr(logger_backends.importlib.util, "find_spec", lambda _: True)
    on = {f"create_{name}_logger": True for name in ("wandb", "mlflow", "tensorboard")}
    harness.run(
        {MANAGER + switch: value for switch, value in on.items()} | {MANAGER + "wandb_logger_kwargs.project": "p"}
    )
    assert made["wandb_logger_kwargs"]["project"] == "p"
    assert set(made["wandb_logger_kwargs"]) == set(WANDB)
    assert set(made["mlflow_logger_kwargs"]) == set(MLFLOW)
    assert set(made["summary_writer_kwargs"]) == set(EVENTS)


MEMORY = "model.memory_profile."


@story(*(MEMORY + name for name in ("enabled", "start_step", "end_step", "rank", "output_path")))
def memory_is_recorded(harness: ConfigHarness) -> None:
    asked: list[tuple[Any, ...]] = []
    harness.monkeypatch.setattr(profiler, "MemorySnapshotRecorder", lambda *given: asked.append(given))
    keys = {MEMORY + "enabled": True, MEMORY + "start_step": 2, MEMORY + "end_step": 3, MEMORY + "rank": 1}
    root = harness.root({**keys, MEMORY + "output_path": str(harness.folder)})
    for rank in (0, 1):
        profiler.build_profilers(root.trainer, root.model.memory_profile, harness.folder, CPU, print, rank)
    assert [given[:3] for given in asked] == [(harness.folder, 2, 3)]
    with pytest.raises(UserError, match="memory_profile"):
        harness.run(keys)


OFFLOADING = MODEL + "cpu_offloading"


@story(*(OFFLOADING + end for end in ("", "_num_layers", "_activations", "_weights")))
def layers_lie_in_host_memory(harness: ConfigHarness) -> None:
    auto = {OFFLOADING: True, MODEL + "num_layers": 4, TRAINER + "accelerator": "auto", TRAINER + "max_steps": 1}
    if not torch.cuda.is_available():
        assert "`model.cpu_offloading` (True) has no effect on cpu" in harness.printed(auto)
    made: list[DeferredCopies] = []
    install_deferred_copies(harness.monkeypatch)
    harness.monkeypatch.setattr(
        build, "copy_engine_factory", lambda device: lambda: (made.append(DeferredCopies()), made[-1])[1]
    )

    def sent(changes: Changes) -> int:
        """Bytes that a forward copies to the host of a pretended GPU."""
        changes = {MODEL + "num_layers": 4, **changes}
        made.clear()
        tokens = torch.arange(8).repeat(2, 1)
        harness.model(changes).loss(tokens, tokens, 1.0)
        return sum(size for copies in made for name, size in copies.events if name == "send")

    on = {OFFLOADING: True, OFFLOADING + "_num_layers": 2}
    both, none = sent(on), sent({**on, OFFLOADING: False})
    activations, weights = (sent({**on, f"{OFFLOADING}_{other}": False}) for other in ("weights", "activations"))
    assert none == 0 < min(activations, weights)
    assert both == activations + weights
    assert sent({**on, OFFLOADING + "_num_layers": 1}) * 2 == both
    assert sent({OFFLOADING: True}) * 2 == both * 3  # all layers but one


@story(MODEL + "cpu_offloading_optimizer")
def the_optimizer_lies_in_host_memory(harness: ConfigHarness) -> None:
    harness.monkeypatch.setattr(optim_build, "PinnedStateCopyEngine", lambda device: (device, "copies"))
    on, off = (harness.root({MODEL + "cpu_offloading_optimizer": on}).model for on in (True, False))
    cuda = torch.device("cuda", 0)
    assert optim_build.host_copy_engine(on, cuda) == (cuda, "copies")
    assert optim_build.host_copy_engine(off, cuda) is None
    assert optim_build.host_copy_engine(on, CPU) is None
    auto = {MODEL + "cpu_offloading_optimizer": True, TRAINER + "accelerator": "auto"}
    assert "`model.cpu_offloading_optimizer` (True) has no effect on cpu" in harness.printed(auto)


@story(MODEL + "copy_engine_collectives")
def copy_engines_are_taken_or_missed(harness: ConfigHarness) -> None:
    harness.monkeypatch.setattr(DistributedContext, "all_gather_text", lambda ranks, text: [text] * ranks.world_size)

    def build(asked: bool | None) -> object:
        root = harness.root({MODEL + "copy_engine_collectives": asked, TRAINER + "devices": 2})
        return build_collectives(DistributedContext(0, 2), CPU, root.model.copy_engine_collectives)

    assert build(None) is build(False) is None
    with pytest.raises(UserError, match="on one host, that read"):
        build(True)


@story(MODEL + "enable_cuda_graph")
def micro_batches_are_recorded(harness: ConfigHarness) -> None:
    made: list[Any] = []
    for part in (run_context, run_inputs):
        harness.monkeypatch.setattr(part, "uses_cuda_graph", lambda run, *_: run.model.enable_cuda_graph)
    harness.monkeypatch.setattr(training_loop, "CapturedMicroBatches", lambda step, *_: made.append(step) or step)
    harness.run({MODEL + "enable_cuda_graph": True, TRAINER + "accelerator": "auto"})
    assert len(made) == 1


@story(TRAINER + "max_skipped_steps", TRAINER + "loss_spike_threshold")
def steps_are_watched(harness: ConfigHarness) -> None:
    bad, good = (float("nan"), 1.0), (1.0, 1.0)
    policy = LossMonitor(1, None, LoopState.model_validate({}))
    policy.update(1, [bad, good, bad])
    with pytest.raises(DivergedError, match="step 4"):
        policy.update(4, [bad])
    losses = [(1.0 + 0.01 * (step % 7), 1.0) for step in range(150)] + [(3.0, 1.0)] * 20
    assert [
        len(LossMonitor(1, limit, LoopState.model_validate({})).update(1, losses)) for limit in (4.0, 1e6, None)
    ] == [
        1,
        0,
        0,
    ]


@story(MODEL + "hidden_dropout")
def embeddings_attention_and_mlp_drop(harness: ConfigHarness) -> None:
    rates: list[float] = []

    def apply(mask: DropoutMask, values: torch.Tensor, rate: float, residual: torch.Tensor | None = None) -> Any:
        rates.append(rate)
        return values if residual is None else residual + values

    harness.monkeypatch.setattr(DropoutMask, "apply", apply)
    training_loss(harness, {MODEL + "hidden_dropout": 0.2, MODEL + "num_layers": 2})
    assert rates == [0.2] * (1 + 2 * 2)


@story(MODEL + "compile")
def null_compiles_on_a_gpu(harness: ConfigHarness) -> None:
    choices = [decide_compile(wish, "cuda", (2, 12), uses_rng=False)[0] for wish in (None, True, False)]
    assert choices == [True, True, False]


@story(MODEL + "seed")
def dropout_is_seeded(harness: ConfigHarness) -> None:
    seeds: set[int] = set()
    harness.monkeypatch.setattr(lightning_module, "micro_batch_seed", lambda seed, *_: seeds.add(seed) or seed)
    harness.run({MODEL + "seed": 5})
    assert seeds == {5}


@story(MODEL + "restore_from_path")
def a_run_begins_where_another_ended(harness: ConfigHarness) -> None:
    first = harness.run({"exp_manager.create_checkpoint_callback": True})
    assert trained(harness, {}) != trained(harness, {MODEL + "restore_from_path": str(first.directory)})


@story(TOKENIZER + "type", TOKENIZER + "vocab_file", TOKENIZER + "merge_file")
def tokenizers_are_read_from_files(harness: ConfigHarness) -> None:
    files = tokenizer_files(harness)
    folder = harness.folder / "tokenizer"
    megatron = {TOKENIZER + "library": "megatron", **files, TOKENIZER + "type": "GPT2BPETokenizer"}
    merged = tokens_of_text(harness, megatron)
    assert merged != tokens_of_text(harness, {**megatron, TOKENIZER + "merge_file": str(folder / "fewer.txt")})
    other = json.loads((folder / "vocab.json").read_text())
    other["to"], other["be"] = other["be"], other["to"]
    (folder / "other.json").write_text(json.dumps(other))
    assert merged != tokens_of_text(harness, {**megatron, TOKENIZER + "vocab_file": str(folder / "other.json")})
    huggingface = {TOKENIZER + "library": "huggingface", TOKENIZER + "type": files[TOKENIZER + "type"]}
    assert merged != tokens_of_text(harness, huggingface)
    text = ["data=text", f"model.data.path={harness.text}"]
    refused = problems(*text, "model.tokenizer.library=megatron", "model.tokenizer.type=BertWordPieceCase")
    assert TOKENIZER + "type" in refused
    assert TOKENIZER + "merge_file" in problems(*text, "tokenizer=gpt2", "model.tokenizer.vocab_file=v")


@story(TOKENIZER + "model")
def a_tokenizer_model_is_a_file_too(harness: ConfigHarness) -> None:
    path = tokenizer_files(harness)[TOKENIZER + "type"]
    library = {TOKENIZER + "library": "huggingface"}
    by_model = tokens_of_text(harness, {**library, TOKENIZER + "model": path})
    assert by_model == tokens_of_text(harness, {**library, TOKENIZER + "type": path})
    both = ["tokenizer=huggingface", f"model.tokenizer.type={path}", f"model.tokenizer.model={path}"]
    assert TOKENIZER + "type" in problems("data=text", f"model.data.path={harness.text}", *both)
    with pytest.raises(UserError, match="downloads no tokenizers"):
        tokens_of_text(harness, {**library, TOKENIZER + "model": "meta-llama/Llama-3.1-8B"})


@story(
    TOKENIZER + "additional_special_tokens",
    TOKENIZER + "special_tokens.eos_token",
    TOKENIZER + "special_tokens.pad_token",
)
def special_tokens_are_named_and_added(harness: ConfigHarness) -> None:
    path = tokenizer_files(harness)[TOKENIZER + "type"]
    base = {**TEXT, DATA + "path": str(harness.text), TOKENIZER + "library": "huggingface", TOKENIZER + "type": path}

    def built(**special: Any) -> Any:
        keys = {TOKENIZER + key: value for key, value in special.items()}
        tokenizer = build_data(harness.root({**base, **keys})).tokenizer
        return tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id

    assert built() == (259, 257, 257)
    assert built(additional_special_tokens=["<a>", "<b>"]) == (261, 257, 257)
    assert built(special_tokens={"eos_token": "be"}) == (259, 258, 257)
    assert built(special_tokens={"pad_token": "to"}) == (259, 257, 256)


@story(TOKENIZER + "special_tokens.mask_token")
def bert_hides_tokens_behind_the_named_one(harness: ConfigHarness) -> None:
    path = tokenizer_files(harness)[TOKENIZER + "type"]
    bert = {DATA + "dataset_type": "bert", TOKENIZER + "library": "huggingface", TOKENIZER + "type": path}
    for special, name in (({}, "<extra_id_0>"), ({"mask_token": "<hide>"}, "<hide>")):
        built = build_data(task_config(harness, {**bert, TOKENIZER + "special_tokens": special}))
        hidden = built.tokenizer.token_id(name)
        assert hidden is not None
        assert (built.train.batch(0, 8)["tokens"] == hidden).any()
        assert built.tokenizer.token_id("<hide>") == (hidden if special else None)


@story(DATA + "path")
def text_is_read_from_there(harness: ConfigHarness) -> None:
    other = harness.folder / "other.txt"
    other.write_text("Whether 'tis nobler in the mind to suffer " * 20)
    batches = [first_batch(harness, {**TEXT, DATA + "path": str(path)}) for path in (harness.text, other)]
    assert batches[0] != batches[1]


def tokens_on_disk(harness: ConfigHarness, name: str, first: int) -> str:
    """A set of 40 documents of 10 tokens, counted up from `first`."""
    with IndexedWriter(harness.folder / name, "u2") as writer:
        for number in range(40):
            writer.add_document(range(first + 2 * number, first + 2 * number + 10))
        writer.finish()
    return str(harness.folder / name)


@story(DATA + "data_impl")
def sources_differ(harness: ConfigHarness) -> None:
    files = {
        "text": {DATA + "path": str(harness.text)},
        "mmap": {DATA + "data_prefix": tokens_on_disk(harness, "a", 3)},
    }
    streams = [name for name in BUILT_IN_DATASETS if name not in PAIR_SOURCES]
    found = [first_batch(harness, {DATA + "data_impl": name, **files.get(name, {})}) for name in streams]
    pairs = {DATA + "dataset_type": "seq2seq"}
    found += [task_batch(harness, pairs), task_batch(harness, {**pairs, DATA + "data_impl": "pystd_docstring"})]
    assert all(found.count(batch) == 1 for batch in found)
    assert "did you mean model.data.data_impl=mmap?" in problems("model.data.data_impl=mmpa")[DATA + "data_impl"].fix
    assert "use text" in problems("model.data.data_impl=text_mmap")[DATA + "data_impl"].rule


@story(DATA + "data_prefix", DATA + "shuffle_documents", DATA + "index_mapping_dir")
def tokens_come_from_there(harness: ConfigHarness) -> None:
    a, b = tokens_on_disk(harness, "a", 3), tokens_on_disk(harness, "b", 150)
    folder = harness.folder / "index"

    def drawn(prefix: Any, **more: Any) -> list[list[int]]:
        changes = {DATA + "data_impl": "mmap", DATA + "data_prefix": prefix}
        return first_batch(harness, {**changes, **{DATA + name: value for name, value in more.items()}}, 20)

    first, second, both = drawn(a), drawn(b), drawn([0.25, a, 0.75, b])
    assert sum(min(row) >= 150 for row in both) == 15
    assert drawn({"train": b, "validation": a}, splits_string="1") != second, "not cut"
    assert drawn(a, shuffle_documents=False) != first
    assert drawn(a, index_mapping_dir=str(folder)) == first
    assert list(folder.glob("*.npy"))


@story(DATA + "dataset_kwargs")
def installed_data_get_their_arguments(harness: ConfigHarness) -> None:
    def samples(data: Any, split: str, sequence_length: int, tokenizer: Any, seed: int) -> Any:
        top = data["dataset_kwargs"]["top"]
        return MockSamples(top, sequence_length, seed, 1000) if split == "train" else None

    harness.monkeypatch.setitem(extensions._registered["dataset"], "mine", samples)
    changes = {DATA + "data_impl": "mine", DATA + "path": None}
    batches = [first_batch(harness, {**changes, DATA + "dataset_kwargs": {"top": top}}) for top in (10, 20)]
    assert max(map(max, batches[0])) < 10 <= max(map(max, batches[1]))
    loaded = load("model.data.data_impl=mine", "model.data.dataset_kwargs.top=5").root.model.data
    assert loaded.dataset_kwargs == {"top": 5}


@story(TOKENIZER + "kwargs", OPTIM + "kwargs", SCHED + "kwargs", MODEL + "loss", TRAINER + "validation_metrics")
def own_components_get_their_settings(harness: ConfigHarness) -> None:
    def register(kind: str, component: Any) -> None:
        harness.monkeypatch.setitem(extensions._registered[kind], "mine", component)  # pyrefly: ignore[bad-index]

    class Shifted(ByteTokenizer):
        def __init__(self, shift: int) -> None:
            super().__init__(shift)
            self._FIRST_BYTE = 3 + shift

    register("tokenizer", Shifted)
    register("optimizer", torch.optim.SGD)
    register("schedule", lambda step, max_steps, lr, min_lr, factor: lr * factor**step)
    register("loss", lambda logits, labels: logits.square().mean(-1))
    register("metric", lambda logits, labels: (logits.argmax(-1) == labels).float())
    own = {TOKENIZER + "library": "mine", DATA + "data_impl": "text", DATA + "path": str(harness.text)}
    drawn = [first_batch(harness, {**own, TOKENIZER + "kwargs": {"shift": shift}})[0] for shift in (0, 5)]
    assert [token + 5 for token in drawn[0]] == drawn[1]
    sched = {SCHED + "name": "mine", SCHED + "kwargs": {"factor": 0.5}}
    assert rates(harness, {**sched, OPTIM + "lr": 0.8}) == [0.8, 0.4, 0.2, 0.1]
    weights = [
        stepped(harness, {OPTIM + "name": "mine", OPTIM + "kwargs": {"momentum": momentum}}) for momentum in (0.0, 0.9)
    ]
    assert weights[0] != weights[1]
    plain = {**VALIDATES, TRAINER + "max_steps": 1}
    lines = harness.metrics({**plain, TRAINER + "validation_metrics": ["mine"]})
    (measured,) = [line["val_mine"] for line in lines if "val_mine" in line]
    assert 0 <= measured <= 1
    losses = [harness.metrics({**plain, MODEL + "loss": name})[0]["loss"] for name in (None, "mine")]
    assert losses[1] < 3 < losses[0]


@story(TRAINER + "callbacks", MANAGER + "loggers")
def own_callbacks_and_loggers_are_called(harness: ConfigHarness) -> None:
    seen: list[str] = []

    class Called(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append("callback")

    class Log(DummyLogger):
        def log_metrics(self, *arguments: Any, **named: Any) -> None:
            seen.append("logger")

    harness.monkeypatch.setitem(extensions._registered["callback"], "mine", Called)
    harness.monkeypatch.setitem(extensions._registered["logger"], "mine", Log)
    harness.metrics({TRAINER + "max_steps": 1})
    assert not seen
    harness.metrics({TRAINER + "max_steps": 1, TRAINER + "callbacks": ["mine"], MANAGER + "loggers": ["mine"]})
    assert {"callback", "logger"} == set(seen)


@story(DATA + "seq_length")
def a_second_length_is_that_of_samples(harness: ConfigHarness) -> None:
    both = ["data=mock", "model.encoder_seq_length=32", "model.position_embedding_type=learned_absolute"]
    assert load(*both, "model.data.seq_length=32").root.model.data.seq_length == 32
    assert list(problems(*both, "model.data.seq_length=64")) == [DATA + "seq_length"]
    shorter = gpt(load(*both, "model.data.seq_length=16").root)
    assert (shorter.data.seq_length, shorter.encoder_seq_length, shorter.max_position_embeddings) == (16, 16, 32)
    assert len(first_batch(harness, {DATA + "seq_length": 4})[0]) == 4


@pytest.mark.parametrize("told", dict.fromkeys(SCENARIOS.values()), ids=lambda told: told.__name__)
def test_scenario(told: Callable[[ConfigHarness], None], harness: ConfigHarness) -> None:
    told(harness)
