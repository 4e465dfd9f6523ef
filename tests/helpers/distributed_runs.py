"""Multi-rank training runs on gloo; the ranks are forked from a process that has imported torch.

Tests use `DistributedRuns`; the functions below it run in the ranks. Every rank writes a record of its samples.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from fork_server import ForkServer
from tiers import TIER
from tiny_run import tiny_config
from torch import Tensor

SECONDS = 1800
"""Timeout of a run."""
BATCH = 12 if TIER == "fast" else 24
"""Samples of a step, in micro batches of 2."""
EXACT: dict[str, Any] = {
    "trainer__precision": "64",
    "trainer__max_steps": 3,
    "trainer__val_check_interval": 3,
    "trainer__log_every_n_steps": 1,
    "trainer__limit_val_batches": 0.0137,
    "trainer__gradient_clip_val": 0.05,
    "model__num_layers": 2,
    "model__global_batch_size": BATCH,
    "exp_manager__checkpoint_callback_params": {"save_top_k": -1},
}
"""fp64 with dropout, accumulation, and clipping below every gradient norm; 12 micro batches for 1, 2, 3, 4 or 6 ranks,
in the fast tier 6 for 1, 2 or 3.

Validation has 7 micro batches, which do not divide evenly over several ranks."""


class DistributedRuns:
    """Start runs of any number of ranks, one after the other.

    Args:
        folder: parent of the run directories.
        forks: fork server.
    """

    def __init__(self, folder: Path, forks: ForkServer) -> None:
        self.folder = folder
        self._forks = forks

    def run(self, name: str, ranks: int = 1, **changes: Any) -> Path:
        """Train and return the run directory.

        Args:
            name: of the run; a run of the same name is reused.
            ranks: number of ranks.
            changes: of `EXACT`, in the format of `tiny_run.tiny_document`; in addition `registers` is a module to
                import first, `captured` runs layers by a substitute for CUDA graphs, `offloads` lets a CPU offload to
                fake host memory, `late` treats it as asynchronous to the host, `told` is a (rank, step) that receives
                SIGTERM, and `planted` a (rank, step, value, place) with gradients of inf or NaN: all of them ("loss"),
                one element of the first that is cast to fp8 in a linear layer ("cast"), or one of the shard that the
                rank updates ("shard").
        """
        directory = self.folder / name
        if not directory.exists():
            codes = self._forks.call("distributed_runs", "train", str(directory), ranks, EXACT | changes)
            assert not any(codes), f"{name}: exit codes by rank {codes}"
        return directory


def step(directory: Path, number: int) -> Path:
    """Return the checkpoint of a step."""
    return directory / "checkpoints" / f"step-{number}"


def records(directory: Path) -> list[dict[str, Any]]:
    """Return the record of each rank."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob("rank-*.json"))]


def samples_by_step(directory: Path) -> list[list[list[int]]]:
    """Return the checksums of the samples of every step, in the order of micro batches over all ranks.

    Each micro batch must have been taken by all ranks of one replica of the model, and by no others.
    """
    found = records(directory)
    steps: list[dict[str, list[list[int]]]] = [{} for _ in found[0]["steps"]]
    for record in found:
        for step, parts in zip(steps, record["steps"], strict=True):
            for number, sums in parts.items():
                step.setdefault(number, []).append(sums)
    for step in steps:
        for sums in step.values():
            assert len(sums) == found[0]["model_ranks"], "a micro batch of some ranks of a replica, or of two replicas"
            assert all(each == sums[0] for each in sums), "ranks of one replica have different samples"
    return [[step[str(number)][0] for number in range(len(step))] for step in steps]


def tensors(checkpoint: Path, kind: str) -> dict[str, Tensor]:
    """Return the full tensors of one kind of checkpoint file, assembled from the shards in all files."""
    from stoker.trainer.checkpoint.sharded_safetensors import open_full_tensors

    paths = sorted(checkpoint.glob(f"{kind}[-.]*safetensors"))
    assert paths, f"no {kind} in {checkpoint}"
    with open_full_tensors(paths) as full:  # each element must be there once
        return {name: full.read(name).clone() for name in full.specs}


def difference(checkpoint: Path, other: Path, kind: str) -> float:
    """Return the largest relative difference, by norm, of any tensor in two checkpoints."""
    first, second = tensors(checkpoint, kind), tensors(other, kind)
    assert first.keys() == second.keys()
    return max(
        ((second[name] - tensor).norm() / tensor.norm().clamp(min=1e-30)).item() for name, tensor in first.items()
    )


# ---------------------------------------------------------------- run in the ranks


class Planted(torch.autograd.Function):
    """Identity with gradients of one value."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: float) -> Tensor:
        ctx.value = value
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(gradients[0], ctx.value), None


class UnevenTargets:
    """Samples with many ignored labels, so that ranks have very different numbers of targets, in one step even none.

    In sample i, labels from index (i * i) % (S + 1) on are ignored; in those of the second step of `EXACT`, every other
    pair of samples has none.
    """

    def __init__(self, samples: Any) -> None:
        self._all = samples
        self.samples = samples.samples
        self.sequence_length = samples.sequence_length

    def batch(self, first: int, count: int) -> Any:
        from stoker.trainer.data.datasets.samples import batch_tensors

        fields = batch_tensors(self._all.batch(first, count))
        labels = fields["labels"].clone()
        for row, position in enumerate(range(first, first + count)):
            empty = BATCH <= position < 2 * BATCH and position % 4 > 1
            labels[row, 0 if empty else position * position % (labels.shape[1] + 1) :] = -100
        return {**fields, "labels": labels}


def _train(directory: Path, ranks: Any, changes: dict[str, Any]) -> dict[str, Any]:
    from dataclasses import replace

    from stoker.trainer.callbacks import expert_load, train_loop
    from stoker.trainer.core import run_context
    from stoker.trainer.lightning.lightning_module import LanguageModule
    from stoker.trainer.train import run_training

    build_data, training_step = run_context.build_data, LanguageModule.training_step
    module_class: Any = LanguageModule
    steps: list[dict[int, list[int]]] = []
    targets: list[int] = []

    def build_uneven(*arguments: Any, **named: Any) -> Any:
        data = build_data(*arguments, **named)
        return replace(data, train=UnevenTargets(data.train))

    sigterm_at, planted = changes.pop("told", None), changes.pop("planted", None)
    scales: list[float] = []

    def record(module: Any, batch: Any, batch_idx: int) -> None:
        if sigterm_at == [ranks.rank, len(steps) + 1]:
            signal.raise_signal(signal.SIGTERM)
        sums: dict[int, list[int]] = {}
        micro_batches = batch.micro_batches()
        loader = module.dataloader
        if loader._batches.shard is not None:  # the whole samples, of which context-parallel ranks have some tokens
            place, samples = loader._parts.micro_batches(module.step), loader._batches.samples
            size = place.micro_batch_size
            micro_batches = ((n, samples.batch(place.first_sample + n * size, size)) for n in place.indices)
        for number, fields in micro_batches:
            rows = torch.cat([field.long() for _, field in sorted(fields.items())], dim=1).numpy()
            sums[number] = [zlib.crc32(row.tobytes()) for row in rows]
        steps.append(sums)
        targets.append(int(batch.num_targets))
        skips = planted is not None and planted[1] == len(steps)
        if skips:
            module.wait_for_weights()  # as all that reads weights between steps
        state = {name: shard.local.clone() for name, shard in _state(module).items()} if skips else {}
        optimizer = module.unwrapped_optimizer
        here = planted[2:] if planted is not None and skips and planted[0] == ranks.rank else None
        with nullcontext() if here is None else plant(module, *here):
            training_step(module, batch, batch_idx)
        for name, shard in _state(module).items() if skips else ():
            assert torch.equal(shard.local, state[name]), f"{name} has changed in a skipped step"
        if optimizer.loss_scale is not None:
            scales.append(optimizer.loss_scale.scale.item())

    if module := changes.pop("registers", None):
        importlib.import_module(module)
    if changes.pop("captured", False):
        import recorded_graphs

        recorded_graphs.use_recorded_graphs()
    if changes.pop("offloads", False):
        import deferred_copies

        deferred_copies.install()
    if changes.pop("copy_engines", False):
        _use_copy_engines(directory)
    if changes.get("model__moe_token_dispatcher_type") == "flex":
        _use_peer_memory(directory)
    if changes.pop("traced", False):  # split into forward and backward graphs, but run by plain operations
        torch.compile = partial(torch.compile, backend="aot_eager")
        changes["model__compile"] = True
    if changes.pop("late", False):
        train_loop.is_async = lambda device: True
    expert_load.has_matplotlib = lambda: False  # drawing a figure takes longer than the run
    run_context.build_data = build_uneven
    module_class.training_step = record
    config = tiny_config(directory, **changes)
    result = run_training(config, ranks)
    assert result.exit_code == (143 if sigterm_at else 0)
    validation = result.validation
    values = [validation.loss, validation.tokens, validation.bytes] if validation else None
    keys = config.root.model
    model_ranks = keys.tensor_model_parallel_size * keys.context_parallel_size * keys.pipeline_model_parallel_size
    return {"steps": steps, "targets": targets, "validation": values, "model_ranks": model_ranks, "scales": scales}


def _use_copy_engines(directory: Path) -> None:
    """Exchange weights and gradients by copy engines' collectives, with memory of the host."""
    from host_memory import HostMemory

    from stoker.trainer.core import training_state
    from stoker.trainer.distributed import copy_engine

    def build(ranks: Any, device: torch.device, asked: bool | None) -> copy_engine.CopyEngineCollectives:
        first = ranks.all_gather_text(str(torch.distributed.get_rank()))[0]
        folder = directory.with_name(f"{directory.name}.memory{first}")
        folder.mkdir(exist_ok=True)
        num_bytes = copy_engine.CopyEngineCollectives.inbox_bytes(ranks.world_size)
        return copy_engine.CopyEngineCollectives(HostMemory(folder, ranks.rank, ranks.world_size, num_bytes))

    copy_engine.SLOT_BYTES = 1 << 16
    training_state.build_collectives = build


def _use_peer_memory(directory: Path) -> None:
    """Exchange tokens of experts through memory of the host."""
    from host_memory import HostMemory

    from stoker.trainer.core import training_state

    def find(ranks: Any, device: torch.device) -> Any:
        first, numbers = ranks.all_gather_text(str(torch.distributed.get_rank()))[0], count()

        def allocate(num_bytes: int) -> HostMemory:
            folder = directory.with_name(f"{directory.name}.rows{first}-{next(numbers)}")
            folder.mkdir(exist_ok=True)
            return HostMemory(folder, ranks.rank, ranks.world_size, num_bytes)

        return allocate

    training_state.find_peer_memory = find


@contextmanager
def plant(module: Any, value: float, place: str) -> Iterator[None]:
    """Give gradients of a step a value, where `DistributedRuns.run` says."""
    from stoker.kernels.fp8 import linear

    model, optimizer, quantize = module.model, module.unwrapped_optimizer, linear.quantize
    left = [value]

    def cast(source: Any, form: Any, *arguments: Any, **options: Any) -> Any:
        if form == "e5m2" and left:
            source = source.clone()
            source[0, 0] = left.pop()
        return quantize(source, form, *arguments, **options)

    if place == "loss":
        loss, model._loss = model._loss, lambda *arguments: Planted.apply(loss(*arguments), value)
    elif place == "shard":
        optimizer._norm_and_scale = partial(_norm_with, value, optimizer)
    else:
        linear.quantize = cast
    yield
    assert place != "cast" or not left, "no layer on this rank"
    linear.quantize = quantize
    for part, name in ((model, "_loss"), (optimizer, "_norm_and_scale")):
        part.__dict__.pop(name, None)


def _norm_with(value: float, optimizer: Any, gradients: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """Return norm and scale of gradients, one of which gets an element of this value."""
    for group, found in zip(optimizer.param_groups, gradients, strict=True):
        for name, gradient in zip(group["names"], found, strict=True):
            if name.endswith(("mlp.up.weight", "experts.up")):
                gradient.view(-1)[0] = value
                return type(optimizer)._norm_and_scale(optimizer, gradients)
    raise AssertionError("no layer on this rank")


def _state(module: Any) -> dict[str, Any]:
    """Return the rank's shards of weights and optimizer state; of weights that are kept in fp8 the bits of it."""
    from stoker.models.fp8 import weights_in_fp8
    from stoker.trainer.utils.local_shard import local_shards

    weights: dict[str, Any] = dict(module.model.named_parameters())
    in_fp8: dict[Tensor, Any] = {**weights_in_fp8(module.model)}
    for name, weight in weights.items():
        if weight in in_fp8:
            weights[name] = in_fp8[weight].cast.rows.data.view(torch.uint8)
    return local_shards(module.model, weights) | module.unwrapped_optimizer.local_shards()


def _rank(directory: Path, size: int, rank: int, changes: dict[str, Any]) -> None:
    from torch._C._distributed_c10d import FileStore

    from stoker.trainer.distributed.process_group import DistributedContext, init_distributed, shutdown_distributed

    torch.set_num_threads(1)
    store = FileStore(f"{directory}.store", size) if size > 1 else None
    ranks = DistributedContext() if size == 1 else init_distributed(rank, size, rank, store=store, timeout=600)
    record = _train(directory, ranks, changes)
    ranks.barrier()
    shutdown_distributed()
    (directory / f"rank-{rank}.json").write_text(json.dumps(record))


def _fork(*job: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _rank(*job)
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _wait(pids: list[int]) -> list[int]:
    """Return the exit codes; if a rank fails or the timeout expires, kill the others."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + SECONDS
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.01)
        if time.monotonic() > deadline or (pid and codes[pid] > 0):
            for left in set(pids) - codes.keys():
                os.kill(left, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def train(directory: str, size: int, changes: dict[str, Any]) -> list[int]:
    """Train on `size` ranks, in a process without threads; return their exit codes."""
    return _wait([_fork(Path(directory), size, rank, changes) for rank in range(size)])
