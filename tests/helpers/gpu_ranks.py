"""Training runs of forked ranks: on a GPU each with NCCL, on one GPU through host memory, without a GPU on gloo.

Tests use `train_all` through the fixture `forks`, benchmarks `train_each`; what is below runs in the ranks, which live
until a run fails.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from run_metrics import metric_rows

GRACE_SECONDS = 3.0
"""Time in which the others end after a rank has failed."""
Callbacks = Callable[["Job", int], list[Any]]
"""Lightning callbacks of a job and a rank."""


class Job(NamedTuple):
    """A training run.

    Attributes:
        size: number of ranks.
        directory: run directory; beside it, each rank writes its output to `DIRECTORY.rank-N.log`.
        overrides: keys of the run, the same on all ranks.
    """

    size: int
    directory: str
    overrides: list[str]

    def log(self, rank: int) -> Path:
        """Return the output of a rank."""
        return Path(f"{self.directory}.rank-{rank}.log")


class _Rank(NamedTuple):
    """A process that runs jobs, and its answers: a line of JSON for each, its error or ""."""

    number: int
    process: int
    answers: Any


def train_all(results: str, jobs: list[list[Any]], seconds: float) -> None:
    """Run trainings as `train_each`; append [directory, error] of each to a file.

    Args:
        results: the file.
        jobs: each as a `Job`.
        seconds: timeout of each.
    """
    for job, error in train_each([Job(*job) for job in jobs], seconds):
        with open(results, "a") as file:
            file.write(json.dumps([job.directory, error]) + "\n")


def train_each(
    jobs: list[Job], seconds: float, callbacks: Callbacks = lambda job, rank: []
) -> Iterator[tuple[Job, str]]:
    """Run trainings one after the other, in a process without threads and CUDA; yield each with its error.

    Args:
        jobs: the trainings.
        seconds: timeout of each, after which the stack traces of the ranks are the error.
        callbacks: further callbacks of each training.

    Yields:
        Job and error, "" without.
    """
    todo = list(jobs)
    while todo:
        # DTensor keeps what it has derived from a mesh, for equal meshes of later process groups too
        last = next((number for number, job in enumerate(todo) if _shards(job)), len(todo))
        now = todo[: last + 1]
        ranks = [_fork(rank, now, callbacks) for rank in range(max(job.size for job in now))]
        ended = False
        try:
            for job in now:
                todo.pop(0)
                error = "\n".join(_errors(ranks[: job.size], job, seconds))
                yield job, error
                if error:
                    break
            else:
                ended = True
        finally:
            for rank in ranks:
                if not ended:
                    os.kill(rank.process, signal.SIGKILL)
                os.waitpid(rank.process, 0)
                rank.answers.close()


def _shards(job: Job) -> bool:
    return job.size > 1 and "model.fsdp=true" in job.overrides


def _errors(ranks: list[_Rank], job: Job, seconds: float) -> list[str]:
    """Wait for the answers of the ranks; return their errors."""
    left, errors = {rank.answers: rank for rank in ranks}, []
    ends = time.monotonic() + seconds
    while left and (remaining := ends - time.monotonic()) > 0:
        for answers in select.select(list(left), [], [], remaining)[0]:
            rank, line = left.pop(answers), answers.readline()
            error = json.loads(line) if line else f"it died\n{_tail(job.log(rank.number))}"
            if error:
                errors.append(f"rank {rank.number}: {error}")
                ends = min(ends, time.monotonic() + GRACE_SECONDS)
    for rank in left.values():
        os.kill(rank.process, signal.SIGABRT)  # faulthandler writes the stack traces
    time.sleep(2.0 if left else 0.0)
    return errors + [f"rank {rank.number} did not end\n{_tail(job.log(rank.number))}" for rank in left.values()]


def rows(directory: Path, *names: str) -> dict[tuple[int, str], float]:
    """Return these metrics of a run by (step, name)."""
    return {(row["step"], name): row[name] for row in metric_rows(directory) for name in names if name in row}


def _tail(log: Path) -> str:
    """Return the end of the output of a rank, of stack traces the innermost frames."""
    lines = log.read_text(errors="replace").split("Extension modules:")[0].splitlines()
    threads = [number for number, line in enumerate(lines) if line.startswith(("Thread 0x", "Current thread 0x"))]
    if threads:
        return "\n".join(line for first in threads for line in lines[first : first + 12])
    return "\n".join(lines[-25:])


# ---------------------------------------------------------------- run in the ranks


def _fork(rank: int, jobs: list[Job], callbacks: Callbacks) -> _Rank:
    read_end, write_end = os.pipe()
    if pid := os.fork():
        os.close(write_end)
        return _Rank(rank, pid, open(read_end, "rb", buffering=0))
    code = 1
    try:
        faulthandler.enable(file=2)
        if not torch.cuda.is_available():  # traced as a whole and split into forward and backward as on a GPU
            torch.compile = partial(torch.compile, backend="aot_eager")
        for number, job in enumerate(jobs):
            if rank < job.size:
                error = _run(rank, number, job, callbacks)
                os.write(write_end, json.dumps(error).encode() + b"\n")
                if error:
                    time.sleep(2 * GRACE_SECONDS)  # a process that ends takes the others down
                    break
        code = 0
    finally:
        os._exit(code)


def _run(rank: int, number: int, job: Job, callbacks: Callbacks) -> str:
    """Run a job; return its error."""
    job.log(rank).parent.mkdir(parents=True, exist_ok=True)
    output = os.open(job.log(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    error = ""
    try:
        _train(rank, number, job, callbacks)
    except BaseException:
        traceback.print_exc()
        error = "\n".join(traceback.format_exc().splitlines()[-12:])
    sys.stdout.flush()
    sys.stderr.flush()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return error


def _train(rank: int, number: int, job: Job, callbacks: Callbacks) -> None:
    from stoker.trainer.config.load import load_run_config
    from stoker.trainer.distributed.process_group import DistributedContext, shutdown_distributed
    from stoker.trainer.train import run_training

    torch.set_num_threads(1)
    config = load_run_config(None, None, [*job.overrides, f"exp_manager.explicit_log_dir={job.directory}"])
    ranks = DistributedContext() if job.size == 1 else _join(rank, number, job)
    assert run_training(config, ranks, callbacks=callbacks(job, rank)).exit_code == 0
    ranks.barrier()
    shutdown_distributed()


def _join(rank: int, number: int, job: Job) -> Any:
    """Initialize the process group of a rank."""
    from torch._C._distributed_c10d import FileStore

    from stoker.trainer.distributed.process_group import DistributedContext, init_distributed

    # names of groups, by which symmetric memory keeps its own, differ from those of earlier jobs of other ranks
    dist.distributed_c10d._world.group_count = 1000 * number
    store = FileStore(f"{job.directory}.store", job.size)
    devices = torch.cuda.device_count()
    if devices == 0 or devices >= job.size:
        ranks = init_distributed(rank, job.size, rank, store=store, timeout=600)
    else:
        torch.cuda.set_device(0)
        _share_one_device()
        dist.init_process_group("host", store=store, rank=rank, world_size=job.size)
        ranks = DistributedContext(rank, job.size, 0)
    return ranks


@cache
def _share_one_device() -> None:
    import host_group

    from stoker.trainer.distributed import mesh

    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    host_group.register()
    mesh.devices_share_memory = lambda devices: True  # one device does with itself
    _share_memory_through_gloo()


def _share_memory_through_gloo() -> None:
    """Let products that overlap with communication find each other's memory through gloo groups of the same ranks."""
    from stoker.models.parallel import collectives, overlap
    from stoker.trainer.distributed import mesh

    named, gloo = mesh._group_name, {}

    def name_groups(groups: Any, ranks: Any) -> str:
        name = named(groups, ranks)
        created: Any = {members: dist.new_group(list(members), backend="gloo") for members in groups}
        gloo[name] = next(group.group_name for members, group in created.items() if ranks.rank in members)
        return name

    mesh._group_name = name_groups
    collectives.gather_and_multiply = lambda rows, matrix, group: overlap.gather_and_multiply(rows, matrix, gloo[group])
    collectives.multiply_and_scatter = lambda rows, matrix, group: overlap.multiply_and_scatter(
        rows, matrix, gloo[group]
    )
