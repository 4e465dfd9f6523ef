"""Data-parallel scaling on one machine: `experiment=llama_1b_bench` in every data-parallel layout.

    python scripts/bench/data_parallel.py [--devices 2] [--rounds 3] [--only ddp ...] [--results FILE.jsonl]
    python scripts/bench/data_parallel.py --dry-run [--devices 2] [--only ddp ...]

Every GPU trains one micro batch of 4 per step, so the work per GPU is the same in every run. GPUs of one machine differ
by a few percent, and a job is as fast as the slowest one; so the baseline, `alone`, is the same training on every GPU
at once without any communication, and a layout is compared with its slowest GPU. Layouts alternate; the figure of
a run is the median of its windows of 10 steps, that of a layout the median of its rounds. Peak memory is what a layout
adds to the memory allocated before it, without that of copy engines; the time of the CPU is that of all threads.
`--dry-run` trains a tiny model on processes of the CPU and writes nothing.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from rounds import print_tables
from torch._C._distributed_c10d import TCPStore
from torch.cuda import nccl
from torch.multiprocessing.spawn import spawn

WARM_UP, WINDOWS, WINDOW = 10, 4, 10
MICRO_BATCH, SEQUENCE = 4, 4096
BF16 = "model.fsdp_grad_reduce_dtype=bf16"
ZERO1, GRAD = ["model.optim.name=distributed_fused_adam"], ["model.fsdp=true", "model.fsdp_sharding_strategy=grad"]
AT_ONCE = "model.optim.overlap_param_sync=false"
LAYOUTS: dict[str, tuple[str, list[str]]] = {
    "alone": ("every GPU by itself", []),
    "ddp": ("data parallel", []),
    "zero1": ("distributed optimizer", ZERO1),
    "zero1_at_once": ("distributed optimizer, weights gathered before the forward pass", [*ZERO1, AT_ONCE]),
    "grad": ("fsdp grad (ZeRO-2)", GRAD),
    "grad_at_once": ("fsdp grad, weights gathered before the forward pass", [*GRAD, AT_ONCE]),
    "full": ("fsdp full", ["model.fsdp=true"]),
    "ddp_bf16": ("data parallel, reduction in bf16", [BF16]),
    "zero1_bf16": ("distributed optimizer, reduction in bf16", [BF16, *ZERO1]),
    "grad_bf16": ("fsdp grad, reduction in bf16", [BF16, *GRAD]),
    "full_bf16": ("fsdp full, reduction in bf16", [BF16, "model.fsdp=true"]),
}


DRY = [
    "trainer.accelerator=cpu",
    "trainer.precision=bf16",
    "model.encoder_seq_length=32",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=96",
    "model.override_vocab_size=320",
]


class Windows(pl.Callback):
    """Time windows of steps, with a device sync at each end.

    Args:
        ranks: process group with a barrier at the end of each window.
    """

    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self._start = self._cpu_start = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a step."""
        if pl_module.step >= WARM_UP and (pl_module.step - WARM_UP) % WINDOW == 0:
            pl_module.read_metrics()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ranks.barrier()
            now = time.perf_counter()
            if pl_module.step > WARM_UP:
                self.seconds.append((now - self._start) / WINDOW)
                self.cpu_seconds.append((time.process_time() - self._cpu_start) / WINDOW)
            self._start, self._cpu_start = time.perf_counter(), time.process_time()


def train(name: str, ranks: Any, *, dry: bool = False) -> dict[str, Any]:
    """Train with one layout and return the figures of this rank."""
    from stoker.trainer.config.load import load_run_config
    from stoker.trainer.config.resolved_run import resolve_run
    from stoker.trainer.config.schema.optim import build_schedule
    from stoker.trainer.core import training_state
    from stoker.trainer.data.batch_sampler import BatchSchedule, RankBatchSampler
    from stoker.trainer.data.build_datasets import build_data
    from stoker.trainer.data.dataloader import PrefetchingDataLoader
    from stoker.trainer.distributed.mesh import build_mesh
    from stoker.trainer.lightning.lightning_module import LanguageModule
    from stoker.trainer.lightning.lightning_trainer import fit

    gc.collect()
    allocated_before = 0
    if not dry:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        allocated_before = torch.cuda.memory_allocated()
    world = ranks.world_size
    overrides = [f"trainer.devices={world}", f"model.global_batch_size={MICRO_BATCH * world}", *LAYOUTS[name][1]]
    root = load_run_config(None, None, ["experiment=llama_1b_bench", *overrides, *(DRY if dry else [])]).root
    device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
    run = resolve_run(root, world_size=world, capability=None if dry else torch.cuda.get_device_capability(device))
    mesh = build_mesh(run.mesh, None, ranks)
    data = build_data(run.data)
    data_parallel = training_state.build_data_parallel(run, device, mesh)
    model = training_state.build_model(run, data.vocab_size, device, data_parallel=data_parallel, mesh=mesh)
    optimizer = training_state.build_optimizer(run, model, data_parallel, mesh)
    batches = RankBatchSampler(BatchSchedule(root.model.global_batch_size), MICRO_BATCH, ranks.rank, world)
    feed = PrefetchingDataLoader(data.train, batches, device)
    schedule = build_schedule(root.model.optim, 100)
    module = LanguageModule(
        model, optimizer, schedule, feed, run.precision, seed=1, ranks=ranks, data_parallel=data_parallel
    )
    windows = Windows(ranks)
    fit(module, windows, WARM_UP + WINDOWS * WINDOW, device, ranks)
    feed.close()
    return {
        "seconds": statistics.median(windows.seconds),
        "cpu_seconds": statistics.median(windows.cpu_seconds),
        "peak_gib": 0.0 if dry else (torch.cuda.max_memory_allocated() - allocated_before) / 2**30,
    }


def work(rank: int, devices: int, arguments: argparse.Namespace) -> None:
    """Run all rounds on one rank."""
    from stoker.trainer.distributed.process_group import DistributedContext, init_distributed, shutdown_distributed

    if not arguments.dry_run:
        torch.cuda.set_device(rank)
    store = TCPStore("127.0.0.1", arguments.port, devices, is_master=rank == 0)
    ranks = init_distributed(rank, devices, rank, store=store, timeout=300)
    done = 0
    if arguments.results.exists() and not arguments.dry_run:
        done = max(json.loads(line)["round"] for line in arguments.results.read_text().splitlines())
    ranks.barrier()
    rows: list[dict[str, Any]] = []
    for number in range(done + 1, done + 1 + arguments.rounds):
        for name in arguments.only:
            ranks.barrier()
            row = train(name, DistributedContext() if name == "alone" else ranks, dry=arguments.dry_run)
            if arguments.dry_run:
                print(f"rank {rank}: {name} trained", flush=True)
                continue
            gathered = [json.loads(text) for text in ranks.all_gather_text(json.dumps(row))]
            rows.append(
                {
                    "layout": name,
                    "round": number,
                    "seconds": [row["seconds"] for row in gathered],
                    "cpu_seconds": [row["cpu_seconds"] for row in gathered],
                    "peak_gib": max(row["peak_gib"] for row in gathered),
                    "device": f"{devices} x {torch.cuda.get_device_name()}",
                    "torch": torch.__version__,
                    "nccl": ".".join(map(str, nccl.version())),
                    "date": datetime.date.today().isoformat(),
                }
            )
            if rank == 0:
                with arguments.results.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                times, cpu = ([round(1e3 * s, 1) for s in rows[-1][key]] for key in ("seconds", "cpu_seconds"))
                print(f"round {number}: {name} {times} ms, {cpu} ms of the CPU", flush=True)
    ranks.barrier()
    shutdown_distributed()
    if rank == 0 and not arguments.dry_run:
        print_tables(["data_parallel"], arguments.results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--results", type=Path, default=Path("data_parallel.jsonl"))
    parser.add_argument("--dry-run", action="store_true", help="try the layouts on the CPU, without results")
    parser.add_argument("--port", type=int, default=29555)
    arguments = parser.parse_args()
    spawn(work, (arguments.devices, arguments), nprocs=arguments.devices)


if __name__ == "__main__":
    main()
