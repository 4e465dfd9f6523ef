"""Collectives by copy engines, with memory of the host in place of that of GPUs."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import fork_ranks
from host_memory import HostMemory
from resolved import build_data
from tiers import cases, extra
from tiny_run import tiny_config
from torch._C._distributed_c10d import FileStore

from stoker.models.parallel.layout import ParallelLayout
from stoker.trainer.config.resolved_run import resolve_run
from stoker.trainer.core import training_state
from stoker.trainer.data.datasets.samples import batch_tensors
from stoker.trainer.distributed import copy_engine, symmetric_memory
from stoker.trainer.distributed.copy_engine import CopyEngineCollectives
from stoker.trainer.distributed.gathered_weights import GatheredWeights
from stoker.trainer.distributed.mesh import build_mesh
from stoker.trainer.distributed.process_group import DistributedContext
from stoker.trainer.plan.hardware import parse_gpu
from stoker.trainer.plan.layers import layers_in_order
from stoker.trainer.plan.run_inputs import collect_inputs
from stoker.trainer.plan.run_plan import gpu_target
from stoker.trainer.plan.traffic import planned_bytes
from stoker.trainer.utils.local_shard import local_tensor

CPU = torch.device("cpu")

SHAPES = [(12, 5), (48, 4), (12,), (96,), (24, 3), (60, 7)]
"""The second and the fourth are joined, and the fifth where its share has a multiple of 8 elements."""
ROUNDS = 3


def collectives(directory: Path, rank: int, size: int) -> CopyEngineCollectives:
    return CopyEngineCollectives(HostMemory(directory, rank, size, CopyEngineCollectives.inbox_bytes(size)))


def tensors_of(rank: int, round_: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * round_ + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("size", cases([2, 3, 4], fast=2))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_sums_and_gathers_are_those_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, dtype: torch.dtype
) -> None:
    # pieces of a few rows: tensors are cut, and every slot is used many times
    monkeypatch.setattr(copy_engine, "SLOT_BYTES", size * 256)

    def on_rank(rank: int) -> float:
        torch.set_num_threads(1)
        peers, worst = collectives(tmp_path, rank, size), 0.0
        for number in range(ROUNDS):
            every = [tensors_of(other, number, dtype) for other in range(size)]
            sums = peers.reduce_scatter(every[rank])
            wide = torch.promote_types(dtype, torch.float32)
            wholes = [torch.zeros(shape, dtype=wide) for shape in SHAPES]
            peers.all_gather(sums, wholes)
            for index, whole in enumerate(wholes):
                expected = torch.stack([each[index].to(wide) for each in every]).sum(0)
                mine = expected.chunk(size)[rank]
                worst = max(worst, float((whole - expected).abs().max()), float((sums[index] - mine).abs().max()))
                assert sums[index].shape == mine.shape
            for outputs in (wholes, every[rank]):  # the second in place
                expected = [sum(each[index].to(wide) for each in every) for index in range(len(SHAPES))]
                for output in wholes:
                    output.zero_()
                peers.all_reduce(every[rank], outputs)
                for output, total in zip(outputs, expected, strict=True):
                    worst = max(worst, float((output - total.to(output.dtype)).abs().max()))  # pyrefly: ignore[missing-attribute]
        return worst

    assert fork_ranks(str(tmp_path), size, on_rank) == [0.0] * size


LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"model__optim__name": "distributed_fused_adam"},
    "grad": {"model__fsdp": True, "model__fsdp_sharding_strategy": "grad"},
    "full": {"model__fsdp": True, "model__num_layers": 5},  # more than memory of gathered weights has slots
    "recompute": {
        "model__fsdp": True,
        "model__num_layers": 5,
        "model__activations_checkpoint_granularity": "full",
        "model__activations_checkpoint_method": "uniform",
        "model__activations_checkpoint_num_layers": 2,
    },
    "chunks": {
        "model__fsdp": True,
        "model__num_layers": 5,
        "model__activations_checkpoint_granularity": "full",
        "model__activations_checkpoint_method": "uniform",
        "model__activations_checkpoint_num_layers": 4,  # recomputed together, with more weights than the least slots
    },
    "uneven rows": {"model__ffn_hidden_size": 33},
    "uneven zero1": {"model__ffn_hidden_size": 33, "model__optim__name": "distributed_fused_adam"},
    "uneven": {"model__fsdp": True, "model__num_layers": 5, "model__ffn_hidden_size": 33},
}


@pytest.mark.parametrize("layout", ["chunks", *cases([name for name in LAYOUTS if name != "chunks"], fast=1)])
@pytest.mark.parametrize("precision", ["bf16", *extra("64")])
def test_training_is_that_of_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, precision: str) -> None:
    monkeypatch.setattr(copy_engine, "SLOT_BYTES", 2 * 1024)

    def on_rank(rank: int) -> dict[str, list[float]]:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=FileStore(f"{tmp_path}/store", 2), rank=rank, world_size=2)
        count, made = iter(range(10)), []

        def build(ranks: DistributedContext, device: torch.device, asked: bool | None) -> CopyEngineCollectives:
            folder = tmp_path / str(next(count))
            folder.mkdir(exist_ok=True)
            made.append(collectives(folder, rank, 2))
            return made[-1]

        weights = {}
        builders: dict[str, Any] = {"gloo": lambda *_: None, "copy engines": build}
        for name, builder in builders.items():
            training_state.build_collectives = builder
            weights[name] = train(tmp_path / f"{name} {rank}", rank, precision, LAYOUTS[layout])
        dist.destroy_process_group()
        assert made
        assert all(each._pieces > 0 for each in made)
        return weights

    for found in fork_ranks(str(tmp_path), 2, on_rank):
        # two ranks: a sum of two numbers has one rounding in any order; bf16 gradients are summed in fp32 either way
        assert found["copy engines"] == found["gloo"]


@pytest.mark.parametrize(
    "layout", cases([*(name for name in LAYOUTS if not name.startswith("uneven")), "bf16 sums"], fast=2)
)
def test_training_sends_the_planned_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    changes, sent = LAYOUTS.get(layout, {"model__fsdp_grad_reduce_dtype": "bf16"}), Counter[str]()
    gather = GatheredWeights.gather

    def counted(weights: GatheredWeights, unit: Any) -> Any:
        sent["all-gather"] += sum(each._unsharded_param.nbytes for each in unit.fsdp_params)
        return gather(weights, unit)

    monkeypatch.setattr(GatheredWeights, "gather", counted)

    def on_rank(rank: int) -> dict[str, int]:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=FileStore(f"{tmp_path}/store", 2), rank=rank, world_size=2)
        names = iter(range(10))

        def build(ranks: DistributedContext, device: torch.device, asked: bool | None) -> CopyEngineCollectives:
            folder = tmp_path / str(next(names))
            folder.mkdir(exist_ok=True)
            return CountedCollectives(HostMemory(folder, rank, 2, CopyEngineCollectives.inbox_bytes(2)), sent)

        training_state.build_collectives = build
        train(tmp_path / str(rank), rank, "bf16", changes, validates=False)
        dist.destroy_process_group()
        return dict(sent)

    planned: Counter[str] = Counter()
    for micro_batches in STEPS:
        more = {"trainer__precision": "bf16", "trainer__devices": 2, "model__micro_batch_size": 2}
        root = tiny_config(tmp_path / "plan", **more, model__global_batch_size=4 * micro_batches, **changes).root
        run = resolve_run(root, world_size=2)
        inputs = collect_inputs(run, gpu_target(run, parse_gpu("h100")), vocab_size=build_data(root).vocab_size)
        for (axis, kind), size in planned_bytes(inputs, layers_in_order(inputs)).items():
            assert axis == "data"
            planned[kind] += size
    assert fork_ranks(str(tmp_path), 2, on_rank) == [dict(planned)] * 2


class CountedCollectives(CopyEngineCollectives):
    """Adds up the bytes of whole tensors, by kind."""

    def __init__(self, memory: HostMemory, sent: Counter[str]) -> None:
        super().__init__(memory)
        self._sent = sent

    def reduce_scatter(self, tensors: Any, *arguments: Any, **more: Any) -> list[torch.Tensor]:
        self._sent["reduce-scatter"] += sum(tensor.nbytes for tensor in tensors)
        return super().reduce_scatter(tensors, *arguments, **more)

    def all_reduce(self, tensors: Any, outputs: Any) -> None:
        self._sent["all-reduce"] += sum(tensor.nbytes for tensor in tensors)
        super().all_reduce(tensors, outputs)

    def gather_of(self, parts: Any, wholes: Any) -> Callable[[], None]:
        gather, num_bytes = super().gather_of(parts, wholes), sum(whole.nbytes for whole in wholes)

        def counted() -> None:
            self._sent["all-gather"] += num_bytes
            gather()

        return counted


STEPS = (1, 2, 1)
"""Micro batches of each step."""


def test_experts_that_no_other_rank_has_are_plain_parameters(tmp_path: Path) -> None:
    keys = {
        "fsdp": True,
        "num_moe_experts": 4,
        "expert_model_parallel_size": 2,
        "moe_token_dispatcher_type": "alltoall",
    }
    root = tiny_config(tmp_path, trainer__devices=2, **{f"model__{key}": value for key, value in keys.items()}).root

    def on_rank(rank: int) -> dict[str, list[str]]:
        dist.init_process_group("gloo", store=FileStore(f"{tmp_path}/store", 2), rank=rank, world_size=2)
        mesh = build_mesh(ParallelLayout(data=2, expert=2), None, DistributedContext(rank, 2))
        run = resolve_run(root, world_size=2)
        parallel = training_state.build_data_parallel(run, CPU, mesh)
        model = training_state.build_model(run, 50, CPU, data_parallel=parallel, mesh=mesh)
        kinds: dict[str, list[str]] = {"experts": [], "others": []}
        for name, parameter in model.named_parameters():
            kinds["experts" if ".experts." in name else "others"].append(type(parameter).__name__)
        dist.destroy_process_group()
        return kinds

    for kinds in fork_ranks(str(tmp_path), 2, on_rank):
        assert set(kinds["experts"]) == {"Parameter"}, "FSDP2 would copy them and their gradients"
        assert set(kinds["others"]) == {"DTensor"}


def test_ranks_that_meet_write_to_all_others_before_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def batch(stream: int, number: int, address: int, flags: int) -> int:
        found = (symmetric_memory._MemoryOperation * number).from_address(address)
        seen.append((stream, flags, [(each.operation, each.address, each.value, each.flags) for each in found]))
        return 0

    monkeypatch.setattr(symmetric_memory, "_batch_function", lambda: batch)
    monkeypatch.setattr(symmetric_memory.PeerMemory, "_stream", 7)
    memory = object.__new__(symmetric_memory.PeerMemory)
    memory.rank, memory._pointers = 1, [1000, 2000, 3000]
    memory._arrays = {}
    for value in (1, 2):
        memory.meet(value)
        operations = [(2, 1064), (2, 3064), (1, 2000), (1, 2128)]  # CUDA: 2 writes, 1 waits
        assert seen.pop() == (7, 0, [(*each, value, 0) for each in operations])
    assert ctypes.sizeof(symmetric_memory._MemoryOperation) == 48, "as CUstreamBatchMemOpParams"


def train(
    directory: Path, rank: int, precision: str, changes: dict[str, Any], *, validates: bool = True
) -> list[float]:
    """Train steps of one and of two micro batches; return this rank's weights."""
    changes = {"model__hidden_dropout": 0.0, "model__attention_dropout": 0.0, **changes}
    root = tiny_config(directory, trainer__precision=precision, trainer__devices=2, **changes).root
    run, mesh = resolve_run(root, world_size=2), build_mesh(ParallelLayout(data=2), None, DistributedContext(rank, 2))
    data = build_data(root)
    parallel = training_state.build_data_parallel(run, CPU, mesh)
    assert parallel is not None
    model = training_state.build_model(run, data.vocab_size, CPU, data_parallel=parallel, mesh=mesh)
    optimizer = training_state.build_optimizer(run, model, parallel, mesh)
    parallel.attach(model, optimizer)
    for step, micro_batches in enumerate(STEPS):
        if validates:
            with torch.no_grad():
                model.batch_loss(batch_tensors(data.train.batch(0, 2)), torch.tensor(32.0))
            parallel.reshard()
        parallel.before_step(micro_batches)
        for number in range(micro_batches):
            fields = batch_tensors(data.train.batch(8 * step + 4 * number + 2 * rank, 2))
            model.batch_loss(fields, torch.tensor(32.0)).backward()
            if micro_batches > 1 and not parallel.accumulates_gradients:
                optimizer.accumulate()
        parallel.before_update()
        optimizer.step()
        parallel.after_update()
    parallel.wait_for_weights()
    return torch.cat([local_tensor(weight.detach()).double().flatten() for weight in model.parameters()]).tolist()
