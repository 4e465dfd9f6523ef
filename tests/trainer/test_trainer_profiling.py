"""Traces, tables and records: of the steps they should be of, and never the end of a run."""

import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_metrics import metric_rows
from tiers import full_only
from tiny_run import tiny_config, tiny_document
from torch.autograd import DeviceType

from stoker.trainer.callbacks import profiler as profiling
from stoker.trainer.callbacks.device_gaps import DeviceWork, device_gaps, device_work
from stoker.trainer.callbacks.profiler import (
    MemorySnapshotRecorder,
    PhaseTimer,
    ProfilerList,
    TraceProfiler,
    operations_table,
)
from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.train import run_training
from stoker.trainer.utils import async_host_copy
from stoker.trainer.utils.errors import UserError

CPU = torch.device("cpu")


def run_steps(observer, steps, work=lambda number: None):
    for number in range(1, steps + 1):
        observer.on_step_start(number)
        work(number)
        observer.on_step_end(number)
    observer.close()


def mark(number):
    with torch.profiler.record_function(f"step {number}"):
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))


def marks(directory):
    [path] = directory.glob("trace-*.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return path.name, sorted({e["name"] for e in events if e.get("name", "").startswith("step ")})


def test_a_trace_holds_its_steps_and_no_others(tmp_path):
    said = []
    run_steps(TraceProfiler(tmp_path, 3, 4, CPU, said.append), 6, mark)
    assert marks(tmp_path) == ("trace-steps-3-4.json.gz", ["step 3", "step 4"])
    assert said[0] == f"trace {tmp_path}/trace-steps-3-4.json.gz"
    assert any(line.startswith("aten::") for line in said)
    assert (tmp_path / "operations-steps-3-4.txt").read_text().splitlines() == said[1:]


def test_gaps_are_where_no_stream_of_the_device_works():
    copy, gemm, sum_, norm = (
        DeviceWork("copy", 0, 3000), DeviceWork("gemm", 1000, 2000),
        DeviceWork("sum", 2500, 4000), DeviceWork("norm", 9000, 10000),
    )  # fmt: skip
    assert device_gaps([norm, gemm, copy, sum_, DeviceWork("last", 10500, 11000)], longest=1) == [
        "device: busy 5.50 of 11.00 ms; idle 5.50 ms in 2 gaps",
        "  5.00 ms between sum and norm",
    ]
    assert device_gaps([]) == []


def test_work_of_the_device_is_neither_that_of_the_host_nor_a_mark():
    def event(name, device, mark=False):
        parts = {"name": name, "device_type": device, "is_user_annotation": mark, "start_ns": 5000, "duration_ns": 2000}
        return SimpleNamespace(**{key: lambda value=value: value for key, value in parts.items()})

    cuda, cpu = DeviceType.CUDA, DeviceType.CPU
    events = [event("aten::mm", cpu), event("gemm", cuda), event("step 3", cuda, mark=True)]
    assert device_work(events) == [DeviceWork("gemm", 5.0, 7.0)]
    with torch.profiler.profile() as profile:
        mark(1)
    results: Any = profile.profiler
    assert device_work(results.kineto_results.events()) == []


def test_files_are_named_by_the_steps_of_the_run(tmp_path):
    """So the trace of a process that goes on does not replace the one before."""
    run_steps(TraceProfiler(tmp_path, 3, 4, CPU, print, steps_before=100), 6, mark)
    assert marks(tmp_path) == ("trace-steps-103-104.json.gz", ["step 3", "step 4"])


def test_a_run_that_ends_early_leaves_a_shorter_trace(tmp_path):
    run_steps(TraceProfiler(tmp_path, 2, 100, CPU, print), 3, mark)
    assert marks(tmp_path) == ("trace-steps-2-3.json.gz", ["step 2", "step 3"])


def test_a_run_that_ends_before_leaves_none(tmp_path):
    run_steps(TraceProfiler(tmp_path / "profile", 7, 9, CPU, print), 3, mark)
    assert list(tmp_path.iterdir()) == []


def operation(name, cpu, device, count=1):
    return SimpleNamespace(key=name, count=count, self_cpu_time_total=cpu, self_device_time_total=device)


def test_the_table_ranks_by_own_time():
    operations = [operation("a", 1000, 10), operation("b" * 60, 3000, 0, count=7), operation("c", 0, 30)]
    lines = operations_table(operations, on_device=False)
    assert [line.split() for line in lines[1:]] == [
        ["b" * 45 + "...", "7", "3.00", "75.0%"],
        ["a", "1", "1.00", "25.0%"],
    ]
    assert [line.split()[0] for line in operations_table(operations, on_device=True)[1:]] == ["c", "a"]
    assert len(operations_table(operations, on_device=True, top=1)) == 2
    assert len({len(line) for line in lines}) == 1


def test_times_of_phases_add_up(tmp_path):
    now = iter([0.0, 1.0, 1.5, 4.0, 4.5, 5.5, 8.0])  # step 0-1, validation 1.5-4, step 4.5-5.5, closed at 8
    said = []
    times = PhaseTimer(tmp_path / "profile", said.append, clock=lambda: next(now))
    times.on_step_start(1)
    times.on_step_end(1)
    with times.phase("validation"):
        pass
    times.on_step_start(2)
    times.on_step_end(2)
    times.close()
    assert [line.split() for line in said[1:]] == [
        ["waiting", "for", "data", "2", "3.50", "1750.00", "43.8%"],
        ["validation", "1", "2.50", "2500.00", "31.2%"],
        ["training", "step", "2", "2.00", "1000.00", "25.0%"],
    ]
    assert (tmp_path / "profile" / "times.txt").read_text().splitlines() == said


def test_a_run_without_steps_has_no_times(tmp_path):
    PhaseTimer(tmp_path / "profile", print).close()
    assert not (tmp_path / "profile").exists()


def test_the_memory_of_some_steps_is_recorded(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **k: calls.append(k.get("enabled", "on")))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    said = []
    device = torch.device("cuda", 0)
    recorder = MemorySnapshotRecorder(tmp_path, 2, 3, device, said.append, rank=1)
    run_steps(recorder, 5, calls.append)
    assert calls == [1, "on", 2, 3, None, 4, 5]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "memory-rank-1-steps-2-3.pickle": "snapshot"
    }
    assert said == [f"memory record {tmp_path}/memory-rank-1-steps-2-3.pickle, for https://pytorch.org/memory_viz"]


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    observers = ProfilerList(
        [TraceProfiler(tmp_path / "file", 1, 1, CPU, print), PhaseTimer(tmp_path, print)], said.append
    )
    run_steps(observers, 2, mark)
    assert len(said) == 1
    assert said[0].startswith("warning: cannot write the profile: ")
    assert (tmp_path / "times.txt").exists()


@full_only
def test_writing_a_profile_is_no_part_of_a_step(tmp_path, monkeypatch):
    """Neither of the step after which it is written, nor of the next one."""
    late = [0.0]  # seconds by which the clock is ahead: an hour for each of the two
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0])
    for module in (async_host_copy, profiling):
        monkeypatch.setattr(module, "time", clock)
    for name in ("start", "finish"):
        real = getattr(TraceProfiler, name)
        monkeypatch.setattr(TraceProfiler, name, lambda *a, real=real: (late.append(late.pop() + 3600), real(*a)))
    settings = {"trainer__profiler": "pytorch", "trainer__profile_steps": [3, 4], "trainer__log_every_n_steps": 1}
    run_training(tiny_config(tmp_path, **settings))
    times = {row["step"]: row["step_seconds"] for row in metric_rows(tmp_path) if "step_seconds" in row}
    assert {3, 4, 5} < times.keys()
    assert max(times.values()) < 3000
    assert late == [7200]


def test_an_observer_that_is_dropped_still_took_its_time(tmp_path):
    (tmp_path / "file").write_text("")
    profiler = TraceProfiler(tmp_path / "file", 1, 1, CPU, print)
    observers = ProfilerList([profiler], lambda line: None)
    run_steps(observers, 2, mark)
    assert observers.overhead_seconds == profiler.overhead_seconds > 0


def root(tmp_path, **changes):
    return RootBlock.model_validate(tiny_document(tmp_path, **changes))


def kinds(tmp_path, rank=0, **changes):
    keys = root(tmp_path, **changes)
    observers = profiling.build_profilers(keys.trainer, keys.model.memory_profile, tmp_path, CPU, print, rank)
    return [type(observer).__name__ for observer in observers._profilers]


def test_the_keys_choose_and_one_rank_profiles(tmp_path):
    assert kinds(tmp_path) == []
    assert kinds(tmp_path, trainer__profiler="pytorch") == ["TraceProfiler"]
    assert kinds(tmp_path, trainer__profiler="simple") == ["PhaseTimer"]
    assert kinds(tmp_path, rank=1, trainer__profiler="simple") == []
    memory = {"enabled": True, "rank": 1}
    assert kinds(tmp_path, model__memory_profile=memory) == []
    assert kinds(tmp_path, rank=1, model__memory_profile=memory) == ["MemorySnapshotRecorder"]


def test_memory_is_recorded_on_cuda_only(tmp_path):
    keys = root(tmp_path, model__memory_profile={"enabled": True}).model.memory_profile
    profiling.check_profiling(keys, torch.device("cuda"))
    profiling.check_profiling(root(tmp_path).model.memory_profile, CPU)
    with pytest.raises(UserError, match="needs a CUDA device, but this run is on cpu"):
        profiling.check_profiling(keys, CPU)
