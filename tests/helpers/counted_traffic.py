"""Bytes of every collective of a training step, counted in forked ranks beside those of the plan."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from forked_ranks import fork_ranks
from torch.utils._python_dispatch import TorchDispatchMode

FEW_BYTES = 32
"""Collectives of fewer bytes, of losses, norms and counts, are not planned."""
KINDS = {
    "all_reduce": ("all-reduce", 0), "allreduce_": ("all-reduce", 0),
    "all_gather_into_tensor": ("all-gather", None), "_allgather_base_": ("all-gather", 0),
    "reduce_scatter_tensor": ("reduce-scatter", 0), "_reduce_scatter_base_": ("reduce-scatter", 1),
    "all_to_all_single": ("all-to-all", 0), "alltoall_base_": ("all-to-all", 1), "send": ("send", 0),
}  # fmt: skip
"""Kind of each operation, and its argument that is the whole tensor; None for its result."""
NOT_COUNTED = {"recv_", "wait_tensor", "barrier", "broadcast_", "allgather_", "monitored_barrier_"}


class Sent(NamedTuple):
    """Tensor of a collective of the model itself, which are functional operations."""

    group: tuple[int, ...]
    kind: str
    shape: tuple[int, ...]
    is_floating: bool


class CollectiveCounter(TorchDispatchMode):
    """Adds up the bytes of collectives by (ranks of the group, kind), of torch's functional and other operations."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Counter[str] = Counter()
        self.sent: list[Sent] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, (*args, *(kwargs or {}).values()), result)
        return result

    def _count(self, func: Any, arguments: Any, result: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if name not in KINDS:
            assert name in NOT_COUNTED, f"{func} is not counted"
            return
        kind, place = KINDS[name]
        if name == "all_to_all_single" and sum(map(bool, arguments[2])) == 1:  # to the next rank of a ring
            kind = "send"
        tensors = result if place is None else arguments[place]
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        ranks = _group_ranks(arguments)
        if size >= FEW_BYTES and len(ranks) > 1:
            self.sizes[f"{ranks} {kind}"] += size
        if func.namespace == "_c10d_functional" and len(ranks) > 1:
            self.sent += [Sent(ranks, kind, tuple(each.shape), each.is_floating_point()) for each in tensors]


def _group_ranks(arguments: Any) -> tuple[int, ...]:
    import torch.distributed as dist

    module: Any = dist.distributed_c10d
    for argument in arguments:
        if isinstance(argument, str):
            if argument in ("sum", "max"):
                continue
            group = module._resolve_process_group(argument)
        elif type(argument).__name__ == "ScriptObject" and "ProcessGroup" in str(argument._type()):
            group = dist.ProcessGroup.unbox(argument)
        else:
            continue
        return tuple(dist.get_process_group_ranks(group))
    raise AssertionError(f"no group among {arguments}")


def compare(directory: str, size: int, cases: list[dict[str, Any]]) -> list[dict[str, dict[str, float]]]:
    """Take one step of each case, changes of `tiny_run.tiny_document`, on `size` ranks.

    Returns:
        For each case the planned bytes by "(ranks) kind", of the groups of rank 0, and those counted in the ranks of
        the group: their mean, since only all ranks together send as many rows to experts as are planned. With a
        pipeline, those of the first rank of each stage, after "stage s: "; stages send each other what they planned.
    """
    found = fork_ranks(directory, size, partial(_rank, Path(directory), size, cases))
    results: list[dict[str, dict[str, float]]] = []
    for number in range(len(cases)):
        counted, planned, stages = {}, {}, found[0][number]["stages"]["number"]
        for stage in range(stages):
            first, last = stage * size // stages, (stage + 1) * size // stages
            name = f"stage {stage}: " if stages > 1 else ""
            planned |= {f"{name}{key}": sent for key, sent in found[first][number]["planned"].items()}
            for key, own in found[first][number]["counted"].items():
                members = json.loads(f"[{key[1 : key.index(')')].rstrip(',')}]")
                counted[f"{name}{key}"] = own
                if first <= min(members) <= max(members) < last:
                    total = sum(found[rank][number]["counted"].get(key, 0) for rank in members)
                    counted[f"{name}{key}"] = total / len(members)
        results.append({"counted": counted, "planned": planned})
    return results


def _rank(directory: Path, size: int, cases: list[dict[str, Any]], rank: int) -> list[dict[str, dict[str, int]]]:
    import eager_fp8_experts  # noqa: F401
    from torch._C._distributed_c10d import FileStore

    from stoker.trainer.distributed.process_group import init_distributed, shutdown_distributed

    torch.set_num_threads(1)
    ranks = init_distributed(rank, size, rank, store=FileStore(f"{directory}/store", size), timeout=600)
    found = [_compare_step(directory / f"run-{number}", ranks, changes) for number, changes in enumerate(cases)]
    ranks.barrier()
    shutdown_distributed()
    return found


def _compare_step(directory: Path, ranks: Any, changes: dict[str, Any]) -> dict[str, dict[str, int]]:
    from tiny_run import tiny_config

    from stoker.trainer.config.resolved_run import resolve_run
    from stoker.trainer.lightning.lightning_module import LanguageModule
    from stoker.trainer.plan.run_plan import local_target, make_plan
    from stoker.trainer.plan.traffic import axis_ranks, planned_bytes
    from stoker.trainer.train import run_training

    training_step, module_class = LanguageModule.training_step, LanguageModule
    counted: Counter[str] = Counter()
    vocab_sizes: list[int] = []
    models: list[Any] = []
    sent: list[Sent] = []

    def count(module: Any, batch: Any, batch_idx: int) -> None:
        with CollectiveCounter() as counter:
            training_step(module, batch, batch_idx)
            module.wait_for_weights()  # a CPU gathers updated ones when they are waited for
        counted.update(counter.sizes)
        vocab_sizes.append(module.model.vocab_size)
        models.append(module.model)
        sent.extend(counter.sent)

    quick: dict[str, Any] = {
        "trainer__max_steps": 1, "trainer__val_check_interval": 1, "trainer__limit_val_batches": 0,
        "exp_manager__create_checkpoint_callback": False, "exp_manager__checkpoint_callback_params": {},
        "exp_manager__resume_if_exists": False,
    }  # fmt: skip
    module_class.training_step = count  # pyrefly: ignore[bad-assignment]
    try:
        config = tiny_config(directory, **(quick | changes))
        run_training(config, ranks)
    finally:
        module_class.training_step = training_step
    run = resolve_run(config.root, world_size=ranks.world_size)
    _check_sent(sent, run, ranks.rank)
    _check_experts(models[0], run.mesh, ranks.rank)
    plan = make_plan(run, local_target(run, torch.device("cpu")), vocab_size=vocab_sizes[0])
    own = plan.ranks[run.mesh.coordinates(ranks.rank).pipeline]
    planned: Counter[str] = Counter()
    for (axis, kind), size in planned_bytes(own.inputs, own.memory.layers).items():
        planned[f"{axis_ranks(own.inputs, axis)} {kind}"] += size  # by the group, which axes may share
    return {
        "counted": dict(counted),
        "planned": dict(planned),
        "stages": {"number": run.mesh.pipeline},
    }


def _check_sent(sent: list[Sent], run: Any, rank: int) -> None:
    """Check that no logits are sent, nor hidden states among context-parallel ranks, keys only if all are gathered.

    The local vocabulary is a multiple of 7 and the hidden size of 5, which no other size is but numbers of rows that
    are sent to experts. With experts context-parallel ranks may be those that exchange tokens.
    """
    context = set(run.mesh.group_of(rank, "context"))
    split = run.context_split
    assert sent or run.mesh.model_ranks == run.mesh.pipeline
    for each in sent:
        assert not each.shape or each.shape[-1] % 7, each
        assert each.kind == "all-to-all" or math.prod(each.shape) % 7, each
        if split is not None and run.mesh.expert == 1 and context.issuperset(each.group):
            assert math.prod(each.shape) % 5, each
            assert each.kind != "all-gather" or not each.is_floating or split.exchange == "all_gather", each


def _check_experts(model: Any, mesh: Any, rank: int) -> None:
    """Check that the rank holds its share of the experts of every layer, and no other."""
    from stoker.models.moe.moe_layer import find_moe_layers
    from stoker.models.parallel.partition import partitions_of

    parts = partitions_of(model)
    for prefix, layer in find_moe_layers(model).items():
        number = len(layer.router.weight) // mesh.expert
        for name, parameter in layer.experts.named_parameters(recurse=False):
            assert len(parameter) == number, (name, parameter.shape)
            if mesh.expert > 1:
                (held,) = parts[f"{prefix}.experts.{name}"].ranges()
                assert (held.start, held.size) == (rank % mesh.expert * number, number), (name, held)
