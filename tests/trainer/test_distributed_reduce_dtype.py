"""`model.fsdp_grad_reduce_dtype` is what gradients of bf16 weights are summed in, whatever else is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from config_helpers import load
from resolved import build_data, build_model, gpu_target, make_plan
from tiers import cases
from tiny_run import tiny_config
from torch import Tensor

from stoker.trainer.config.resolved_run import resolve_run
from stoker.trainer.core import training_state
from stoker.trainer.data.datasets.samples import batch_tensors
from stoker.trainer.distributed import ddp
from stoker.trainer.distributed.data_parallel import grad_reduce_dtype
from stoker.trainer.distributed.ddp import ReplicatedDataParallel
from stoker.trainer.distributed.process_group import DistributedContext
from stoker.trainer.plan.hardware import parse_gpu

CPU = torch.device("cpu")


class TwoRanks:
    """Stands in for two processes with the same samples, of which this is the second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dtypes: set[torch.dtype] = set()
        monkeypatch.setattr(dist, "get_rank", lambda *_: 1)
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)
        monkeypatch.setattr(ddp, "reduce_scatter_single", self._reduce_scatter)

    def _all_reduce(self, tensor: Tensor, group: object = None) -> None:
        self.dtypes.add(tensor.dtype)
        tensor.mul_(2)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, group: object = None) -> None:
        self.dtypes.add(tensor.dtype)
        output.copy_(2 * tensor[tensor.shape[0] // 2 :])


@pytest.mark.parametrize("micro_batches", cases([1, 2], fast=1))
@pytest.mark.parametrize("asked", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", cases(["fused_adam", "distributed_fused_adam"], fast=1))
@pytest.mark.parametrize("precision", ["bf16", "bf16-true", "32"])
def test_gradients_are_summed_in_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, optimizer: str, asked: str, micro_batches: int
) -> None:
    ranks = TwoRanks(monkeypatch)
    root = tiny_config(
        tmp_path,
        trainer__precision=precision,
        trainer__devices=2,
        model__fsdp_grad_reduce_dtype=asked,
        model__optim__name=optimizer,
        model__num_layers=1,
        model__hidden_dropout=0.0,
        model__attention_dropout=0.0,
    ).root
    run = resolve_run(root, world_size=2)
    layout = run.layout
    assert layout is not None
    data = build_data(root)
    alone, model = (build_model(root, data) for _ in range(2))
    optimizer_of_run = training_state.build_optimizer(run, model)
    replicas = DistributedContext(dist.get_rank(), 2)
    parallel = ReplicatedDataParallel(
        layout, CPU, grad_reduce_dtype(root.model, next(model.parameters()).dtype), replicas
    )
    parallel.attach(model, optimizer_of_run)
    fields = batch_tensors(data.train.batch(0, 2))
    parallel.before_step(micro_batches)
    for _ in range(micro_batches):
        model.batch_loss(fields, torch.tensor(16.0)).backward()
    alone.batch_loss(fields, torch.tensor(16.0)).backward()

    assert ranks.dtypes == {torch.float32 if precision == "32" or asked == "fp32" else torch.bfloat16}
    kept = optimizer_of_run.gradients.sums
    for weight, other in zip(model.parameters(), alone.parameters(), strict=True):
        found, expected = kept.get(weight, weight.grad), other.grad
        assert found is not None
        assert expected is not None
        own = parallel.local_shard(found).local if weight.shape[0] % layout.shards == 0 else found
        part = parallel.local_shard(expected).local if weight.shape[0] % layout.shards == 0 else expected
        assert torch.allclose(own.float(), 2.0 * micro_batches * part.float(), rtol=0.02, atol=1e-6)


@pytest.mark.parametrize(
    ("precision", "idle"), [("bf16", False), ("bf16-true", False), ("null", True), ("bf16-mixed", True), ("32", True)]
)
def test_weights_that_are_not_bf16_are_summed_as_they_are(precision: str, idle: bool) -> None:
    given = ["trainer.devices=2", f"trainer.precision={precision}", "model.fsdp_grad_reduce_dtype=bf16"]
    batch = ["model.micro_batch_size=2", "model.global_batch_size=4"]
    findings = load("model=gpt_tiny", "data=mock", "trainer.accelerator=cpu", *given, *batch).findings
    said = "`fsdp_grad_reduce_dtype` has no effect with weights"
    assert any(finding.message.startswith(said) for finding in findings if finding.level == "warning") == idle


def test_the_plan_counts_what_is_kept_and_copied() -> None:
    """By NCCL: without main weights bf16 keeps no sums; what is summed in another dtype is copied for a while."""

    def planned(precision: str, asked: str, micro_batches: int) -> Any:
        given = [f"trainer.precision={precision}", f"model.fsdp_grad_reduce_dtype={asked}", "trainer.devices=2"]
        given += ["model.copy_engine_collectives=false", f"model.global_batch_size={8 * micro_batches}"]
        root = load("experiment=llama_1b_bench", *given).root
        return make_plan(root, gpu_target(root, parse_gpu("h100")), world_size=2).memory

    layer = planned("bf16-true", "bf16", 1).layers[0].memory.num_parameters
    for precision, asked, micro_batches, sums, copy in (
        ("bf16", "fp32", 1, True, 0),
        ("bf16", "fp32", 2, True, 0),
        ("bf16", "bf16", 1, False, 0),
        ("bf16", "bf16", 2, True, 2),
        ("bf16-true", "fp32", 1, False, 4),
        ("bf16-true", "bf16", 1, False, 0),
    ):
        memory, same = (
            planned(precision, key, micro_batches) for key in (asked, "fp32" if precision == "bf16" else "bf16")
        )
        assert (memory.persistent.gradient_sums > 0) == sums
        of_layers = [
            next(moment for moment in each.moments if moment.where.startswith("layer 3,")).working
            for each in (memory, same)
        ]
        assert of_layers[0] - of_layers[1] == copy * layer
