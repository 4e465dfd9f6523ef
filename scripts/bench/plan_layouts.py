"""Compare the plan of layouts of several GPUs with their step time and peak memory, as `plan_check.py --layouts`.

The ranks of a run are forked from this process, which has imported torch, and train one layout after the other; new
ones take over after a layout of FSDP2 or one that fails (tests/helpers/gpu_ranks.py). A row of the results is a layout:
seconds of a step planned and measured, and bytes of each rank planned and measured: allocated and reserved by torch's
allocator at the peak, and in use on its GPU after the last step, which has communication buffers and libraries too.
Layouts in the results are not measured again.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytorch_lightning as pl
import torch
from rounds import Row, append_row, deadline, machine, read_rows, used_cuda_graph

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
from gpu_ranks import Job, train_each

GIB = 2**30
WINDOWS, WINDOW = 4, 3
"""Windows of steps; the first one compiles, captures CUDA graphs and is not counted."""
SECONDS = 150.0
"""Time limit of a layout."""
RUN = [
    f"trainer.max_steps={WINDOWS * WINDOW}",
    f"trainer.log_every_n_steps={WINDOW}",
    "trainer.enable_progress_bar=false",
    "exp_manager.create_tensorboard_logger=false",
    "exp_manager.create_report=false",
]
DRY = [
    "trainer.accelerator=cpu",
    "trainer.precision=bf16",
    "model.encoder_seq_length=64",
    "model.num_layers=4",
    "model.hidden_size=64",
    "model.ffn_hidden_size=96",
    "model.num_attention_heads=4",
    "model.num_query_groups=4",
    "model.override_vocab_size=320",
]
ZERO1, FSDP = ["optim.name=distributed_fused_adam"], ["fsdp=true"]
NCCL = ["copy_engine_collectives=false"]
RECOMPUTE = [f"activations_checkpoint_{key}" for key in ("granularity=full", "method=uniform", "num_layers=1")]
LONG = ["encoder_seq_length=16384"]


class Layout(NamedTuple):
    """A layout.

    Attributes:
        ranks: number of ranks.
        micro_batch: samples of a forward pass.
        samples: samples of a step.
        keys: keys of the model.
        moe: the model has experts.
    """

    ranks: int
    micro_batch: int
    samples: int
    keys: Sequence[str] = ()
    moe: bool = False

    def overrides(self, *, dry: bool) -> list[str]:
        """Return the overrides of the run; `dry`: a small one on processes of the CPU."""
        keys = [key for key in self.keys if not (dry and key in LONG)]
        sizes = [f"model.micro_batch_size={self.micro_batch}", f"model.global_batch_size={self.samples}"]
        model = f"experiment={'moe' if self.moe else 'llama_1b'}_bench"
        return [
            model,
            f"trainer.devices={self.ranks}",
            *RUN,
            *sizes,
            *(DRY if dry else []),
            *(f"model.{k}" for k in keys),
        ]


def _tensor(ranks: int, *, sequence: bool = False) -> list[str]:
    return [f"tensor_model_parallel_size={ranks}", *(["sequence_parallel=true"] if sequence else [])]


def _context(exchange: str, ranks: int = 2) -> list[str]:
    return [f"context_parallel_size={ranks}", f"cp_comm_type={exchange}", *LONG]


def _pipeline(stages: int = 1) -> list[str]:
    virtual = [f"virtual_pipeline_model_parallel_size={stages}"] if stages > 1 else []
    return ["pipeline_model_parallel_size=2", *virtual]


def _expert(ranks: int) -> list[str]:
    # the plan counts on a balanced load, which a router does not learn from random tokens
    balance = "moe_router_force_load_balancing=true"
    return [f"expert_model_parallel_size={ranks}", "moe_token_dispatcher_type=alltoall", balance]


LAYOUTS = {
    "single": Layout(1, 4, 4),
    "dp2": Layout(2, 4, 8),
    "dp2 nccl": Layout(2, 4, 8, NCCL),
    "zero1 x2": Layout(2, 4, 8, ZERO1),
    "zero1 x2, 2 micro batches": Layout(2, 4, 16, ZERO1),
    "fsdp grad x2": Layout(2, 4, 8, [*FSDP, "fsdp_sharding_strategy=grad"]),
    "fsdp full x2": Layout(2, 4, 8, FSDP),
    "tp2": Layout(2, 4, 4, _tensor(2)),
    "tp2 sp": Layout(2, 4, 4, _tensor(2, sequence=True)),
    "cp2 p2p": Layout(2, 1, 1, _context("p2p")),
    "cp2 all_gather": Layout(2, 1, 1, _context("all_gather")),
    "cp2 a2a": Layout(2, 1, 1, _context("a2a")),
    "pp2": Layout(2, 1, 8, _pipeline()),
    "pp2 virtual": Layout(2, 1, 8, _pipeline(stages=2)),
    "moe single": Layout(1, 4, 4, moe=True),
    "moe ep2": Layout(2, 4, 8, _expert(2), moe=True),
    "zero1 x4": Layout(4, 4, 16, ZERO1),
    "zero1 x4 recompute": Layout(4, 4, 16, [*ZERO1, *RECOMPUTE]),
    "fsdp full x4": Layout(4, 4, 16, FSDP),
    "fsdp hybrid x4": Layout(4, 4, 16, [*FSDP, "fsdp_sharding_strategy=hybrid", "fsdp_shard_size=2"]),
    "tp4 sp": Layout(4, 4, 4, _tensor(4, sequence=True)),
    "dp2 tp2": Layout(4, 4, 8, [*_tensor(2, sequence=True), *ZERO1]),
    "pp2 tp2": Layout(4, 1, 8, [*_pipeline(), *_tensor(2, sequence=True)]),
    "cp4 p2p": Layout(4, 1, 1, _context("p2p", 4)),
    "moe ep4": Layout(4, 4, 16, _expert(4), moe=True),
}


class _Memory(pl.Callback):
    """Write the memory of a rank, and on rank 0 the plan of the run, beside its directory when training ends."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank = job, rank
        self._before = _used()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        peak: Row = {}
        if torch.cuda.is_initialized():
            peak = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        found: Row = {"measured": {**peak, "used": _used(), "used_before": self._before}, **machine()}
        if self._rank == 0:
            found |= _plan(self._job)
        _row_of(self._job, self._rank).write_text(json.dumps(found))


def _row_of(job: Job, rank: int) -> Path:
    return Path(f"{job.directory}.rank-{rank}.json")


def _used() -> int:
    """Return the bytes in use on this GPU, by whatever; 0 before CUDA is initialized."""
    if not torch.cuda.is_initialized():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _plan(job: Job) -> Row:
    """Plan a layout on the GPU of this rank; on an H100 if it has none."""
    from plan_check import planned

    from stoker.trainer.plan.data_exchange import exchange_of

    plan = planned(job.overrides, None if torch.cuda.is_initialized() else "h100", world_size=job.size)
    time = plan.time
    return {
        "planned_seconds": time.seconds if time else None,
        "parts": time.parts if time else {},
        "exchange": str(exchange_of(plan.inputs) or ""),
        "bubble": time.bubble if time else 0.0,
        "traffic": [
            {"axis": each.axis, "sent": each.sent, "seconds": each.seconds, "exposed": each.exposed}
            for each in (time.traffic if time else ())
        ],
        # of each rank of a pipeline; of any rank without one
        "planned": [
            {
                "allocated": rank.allocated,
                "reserved": rank.reserved,
                "used": rank.needed,
                "peak_at": rank.memory.peak.where,
            }
            for rank in plan.ranks
        ],
    }


def measure_layouts(names: list[str], results: Path, seconds: float | None, *, dry: bool) -> list[str]:
    """Train the layouts that the results lack, print a line of each, and append the rows, unless it is a dry run.

    Args:
        names: layouts.
        results: file of rows.
        seconds: time limit of all, in which no layout begins; None for no limit.
        dry: train small models on processes of the CPU.

    Returns:
        Layouts that failed.
    """
    import stoker.trainer.train  # ranks are forked with it  # noqa: F401
    from stoker.trainer.utils.environment import enable_expandable_segments

    if dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    enable_expandable_segments()  # as a run does, which starts before CUDA is initialized
    until, gpus, failed = deadline(seconds), torch.cuda.device_count(), list[str]()
    done = set() if dry else {row["layout"] for row in read_rows(results) if "refused" not in row}
    todo = [name for name in names if name not in done and (dry or LAYOUTS[name].ranks <= gpus)]
    with tempfile.TemporaryDirectory() as directory:
        jobs = {
            f"{directory}/{number}": Job(LAYOUTS[name].ranks, f"{directory}/{number}", LAYOUTS[name].overrides(dry=dry))
            for number, name in enumerate(todo)
        }
        names_of = dict(zip(jobs, todo, strict=True))
        started = time.monotonic()
        for job, error in train_each(list(jobs.values()), 4 * SECONDS if dry else SECONDS, _callbacks):
            name = names_of.pop(job.directory)
            row = {"layout": name, "overrides": job.overrides} | (_failed(error) if error else _row(job))
            row["took"] = round(time.monotonic() - started, 1)
            started = time.monotonic()
            print(f"{name}: {row['refused'] if error else _line(row)}; took {row['took']:.0f} s", flush=True)
            if error:
                failed.append(name)
                print(error, file=sys.stderr, flush=True)
            if not dry:
                append_row(results, row)
            if until is not None and time.monotonic() > until:
                break
        if names_of:
            print(f"no time left for {'; '.join(names_of.values())}", flush=True)
    return failed


def _callbacks(job: Job, rank: int) -> list[pl.Callback]:
    return [_Memory(job, rank)]


def _failed(error: str) -> Row:
    """Return the exception of the first rank that failed, in one line."""
    text = re.split(r"^rank \d+:? ", error, flags=re.MULTILINE)[1]
    raised = re.search(r"^[\w.]*(Error|Exception|Exit)\b.*", text, re.MULTILINE | re.DOTALL)
    return {"refused": " ".join((raised[0] if raised else text[-200:]).split())[:200].replace("|", "/")}


def _row(job: Job) -> Row:
    """Return the row of a layout that has been trained."""
    ranks = [json.loads(_row_of(job, rank).read_text()) for rank in range(job.size)]
    run = Path(job.directory)
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["step_seconds"] for row in logged if "step_seconds" in row and row["step"] > WINDOW]
    measured = [rank["measured"] for rank in ranks]
    return {
        **ranks[0],
        "ranks": job.size,
        "seconds": statistics.median(seconds),
        "windows": seconds,
        "recorded": used_cuda_graph(run),
        "measured": measured,
    }


def by_rank(row: Row) -> list[tuple[Row, Row]]:
    """Return the planned and the measured memory of each rank: those of a pipeline stage are neighbours."""
    planned, measured = row["planned"], row["measured"]
    return [(planned[number * len(planned) // len(measured)], each) for number, each in enumerate(measured)]


def time_error(row: Row) -> float:
    return row["planned_seconds"] / row["seconds"] - 1


def memory_error(row: Row) -> float:
    """Return the relative error of the planned peak of the rank for which it is largest."""
    errors: list[float] = [planned["allocated"] / measured["allocated"] - 1 for planned, measured in by_rank(row)]
    return max(errors, key=abs)


def _line(row: Row) -> str:
    times = f"{1e3 * row['planned_seconds']:.1f} ms planned, {1e3 * row['seconds']:.1f} measured"
    if "allocated" not in row["measured"][0]:
        return times
    sizes = ", ".join(f"{p['allocated'] / GIB:.2f} / {m['allocated'] / GIB:.2f}" for p, m in by_rank(row))
    return f"{times} ({time_error(row):+.1%}); GiB of each rank {sizes} ({memory_error(row):+.1%})"
