"""Runs of several processes through the command line: how they end when a process dies, hangs, or is told to stop."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
TIMEOUT = 15.0
"""`trainer.process_timeout` of the tests; its default is ten minutes."""
HANGS = 400.0
"""Seconds after which a test gives up: no bound on how fast anything is, but below the default of the time-out."""
KEYS = {
    "data": "mock",
    "trainer.accelerator": "cpu",
    "trainer.devices": 2,
    "trainer.max_steps": 100000,
    "trainer.limit_val_batches": 0,
    "trainer.val_check_interval": 100000,
    "trainer.log_every_n_steps": 1,
    "trainer.process_timeout": TIMEOUT,
    "exp_manager.explicit_log_dir": "run",
    "exp_manager.resume_if_exists": True,
    "exp_manager.create_tensorboard_logger": False,
    "model.num_layers": 1,
    "model.hidden_size": 32,
    "model.ffn_hidden_size": 64,
    "model.num_attention_heads": 2,
    "model.encoder_seq_length": 16,
    "model.hidden_dropout": 0.1,
    "model.micro_batch_size": 2,
    "model.global_batch_size": 8,
    "model.optim.sched.max_steps": 100,
    "model.optim.sched.warmup_ratio": "null",
}
SHORT: dict[str, Any] = {"trainer__max_steps": 12, "exp_manager__checkpoint_callback_params__every_n_train_steps": 4}


def arguments(changes: dict[str, Any]) -> list[str]:
    """Of `stoker`; `changes` are keys with `__` for the dot."""
    keys = KEYS | {key.replace("__", "."): value for key, value in changes.items()}
    return ["train", *(f"{key}={value}" for key, value in keys.items())]


class Job:
    """A command in a directory, whose processes, children and all, are found by a mark in their environment."""

    def __init__(self, directory: Path, command: list[str], environ: dict[str, str] | None = None) -> None:
        self.directory = directory
        self._mark = f"TEST_OF_PROCESSES={uuid.uuid4()}"
        name, value = self._mark.split("=")
        directory.mkdir(exist_ok=True)
        self._error = directory / f"error-{value[:8]}.txt"
        with self._error.open("w") as error:
            self.process = subprocess.Popen(
                command,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=error,
                env={**os.environ, "OMP_NUM_THREADS": "1", name: value, **(environ or {})},
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in [self.process.pid, *self.processes()]:
            with_suppressed(os.kill, pid, signal.SIGKILL)
        self.process.wait()

    @property
    def error(self) -> str:
        """Return its standard error so far."""
        return self._error.read_text()

    @property
    def run(self) -> Path:
        return self.directory / "run"

    def processes(self) -> dict[int, dict[str, str]]:
        """The environments of all live processes, by id."""
        found: dict[int, dict[str, str]] = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            text = with_suppressed(path.read_bytes) or b""
            if self._mark.encode() in text.split(b"\0"):
                pairs = (entry.partition("=") for entry in text.decode(errors="replace").split("\0") if entry)
                found[int(path.parent.name)] = {name: value for name, _, value in pairs}
        return found

    def ranks(self) -> dict[int, int]:
        """Rank to process id, as the run itself recorded them."""
        document = json.loads((self.run / "environment.json").read_text())
        return {process["rank"]: process["process"] for process in document["processes"]}

    def steps(self) -> int:
        """Completed steps of which the run has told."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return max([0, *(int(found[1]) for line in lines if (found := re.match(r'\{"step": (\d+),', line)))])

    def until(self, condition: Callable[[], bool]) -> None:
        ends = time.monotonic() + HANGS
        while not condition():
            assert time.monotonic() < ends, f"it never came to that; it said:\n{self.error}"
            assert self.process.poll() is None, f"exit code {self.process.returncode}; it said:\n{self.error}"
            time.sleep(0.02)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.steps() >= step and (self.run / "environment.json").exists())

    def end(self) -> int:
        """Return the exit code; no process of the run is left then."""
        code = self.process.wait(HANGS)
        assert not self.processes(), self.processes().keys()
        return code

    def gone(self) -> None:
        """Wait until no process is left."""
        self.process.wait(HANGS)
        ends = time.monotonic() + HANGS
        while left := self.processes():
            assert time.monotonic() < ends, f"still there: {left.keys()}"
            time.sleep(0.05)


def with_suppressed(act: Callable[..., Any], *values: Any) -> Any:
    try:
        return act(*values)
    except (ProcessLookupError, PermissionError, FileNotFoundError):
        return None


def job(directory: Path, *options: str, environ: dict[str, str] | None = None, **changes: Any) -> Job:
    """`stoker train`; `changes` are keys with `__` for the dot."""
    return Job(directory, [sys.executable, "-m", "stoker", *arguments(changes), *options], environ)


def hashes(run: Path, step: int) -> dict[str, str]:
    manifest = json.loads((run / "checkpoints" / f"step-{step}" / "manifest.json").read_text())
    return {name: entry["sha256"] for name, entry in manifest["files"].items() if name.endswith(".safetensors")}


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


# ---------------------------------------------------------------- a process dies or hangs


def check_lost(run: Job, rank: int, act: signal.Signals, words: str, place: str = "") -> None:
    with run:
        run.until_step(3)
        pid = run.ranks()[rank]
        os.kill(pid, act)
        assert run.end() == 1
        (line,) = [line for line in run.error.splitlines() if f"process {pid}" in line]
        found = re.fullmatch(rf"rank {rank} \({place}process {pid}\) {re.escape(words)} after step (\d+)(;.*)?", line)
        assert found, line
        assert 0 <= int(found[1]) - run.steps() <= 1, "the step of that rank, whose last ones may not be logged"
        assert run.error.splitlines()[-1] == line
        assert "Traceback" not in run.error


def test_a_killed_rank_ends_the_run(tmp_path):
    run = job(tmp_path)
    check_lost(run, 1, signal.SIGKILL, "was killed by SIGKILL")
    (record,) = tmp_path.rglob("environment.json")
    assert "train" in json.loads(record.read_text())["command"], "the user's command line, not the worker's"


@pytest.mark.parametrize("layout", [{}, {"model__fsdp": True}])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("act", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_run(tmp_path, act, rank, layout):
    words = "was killed by SIGKILL" if act is signal.SIGKILL else "was stopped (SIGSTOP) and did not respond"
    check_lost(job(tmp_path, **layout, model__data__num_workers=2), rank, act, words)


def test_a_stopped_rank_of_a_hybrid_layout_ends_the_run(tmp_path):
    """There every rank waits in a group of some of the ranks."""
    keys = {"trainer__devices": 4, "model__fsdp_sharding_strategy": "hybrid", "model__fsdp_shard_size": 2}
    run = job(tmp_path, model__fsdp=True, **keys)
    check_lost(run, 1, signal.SIGSTOP, "was stopped (SIGSTOP) and did not respond")


def test_a_rank_that_aborts_since_another_is_stopped_is_not_the_cause(tmp_path):
    """As NCCL aborts one after its timeout."""
    run = job(tmp_path)
    with run:
        run.until_step(3)
        ranks = run.ranks()
        os.kill(ranks[1], signal.SIGSTOP)
        os.kill(ranks[0], signal.SIGABRT)
        assert run.end() == 1
        assert run.error.splitlines()[-1].startswith(f"rank 1 (process {ranks[1]}) was stopped (SIGSTOP)"), run.error


AXES: dict[str, Any] = {
    "trainer__devices": 4,
    "model__tensor_model_parallel_size": 2,
    "model__sequence_parallel": True,
}
SHARED = AXES | {
    "model__context_parallel_size": 2,
    "model__expert_model_parallel_size": 2,
    "model__num_moe_experts": 4,
    "model__moe_aux_loss_coeff": 0.01,
}
"""Every rank waits in a group of each axis, and all in none: of tensor, of context, and of the experts."""


@pytest.mark.parametrize("act", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("axes", "place"), [(AXES, "data 1, tensor 1, "), (SHARED, "context 1, tensor 1, ")])
def test_a_lost_rank_of_several_axes_is_named_with_its_place(tmp_path, act, axes, place):
    words = "was killed by SIGKILL" if act is signal.SIGKILL else "was stopped (SIGSTOP) and did not respond"
    check_lost(job(tmp_path, **axes), 3, act, words, place)


@pytest.mark.parametrize("early", [0.2, 1.0, 2.5])
def test_a_rank_that_is_killed_before_the_first_step_ends_the_run(tmp_path, early):
    with job(tmp_path) as run:
        run.until(lambda: any(found.get("RANK") == "1" for found in run.processes().values()))
        time.sleep(early)
        (pid,) = [pid for pid, found in run.processes().items() if found.get("RANK") == "1"]
        os.kill(pid, signal.SIGKILL)
        assert run.end() == 1
        assert run.error.splitlines()[-1].startswith(f"rank 1 (process {pid}) was killed by SIGKILL"), run.error


@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_is_left_when_the_launcher_is_killed(tmp_path, stopped):
    with job(tmp_path, model__data__num_workers=2) as run:
        run.until_step(3)
        if stopped:
            os.kill(run.ranks()[1], signal.SIGSTOP)
        run.process.kill()
        run.gone()


# ---------------------------------------------------------------- told to stop


def check_stopped(run: Job, code: int) -> None:
    """The newest checkpoint is of the last finished step, and says so."""
    assert run.end() == code, run.error
    assert checkpoints(run.run) == [f"step-{run.steps()}"]
    assert "Traceback" not in run.error


def test_sigterm_to_every_process_saves_the_last_step(tmp_path):
    with job(tmp_path, model__fsdp=True) as run:
        run.until_step(3)
        # As a scheduler does; the launcher hands its own on, so the ranks get two.
        for pid in [run.process.pid, *run.ranks().values()]:
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.03)
        with_suppressed(os.kill, run.process.pid, signal.SIGTERM)
        check_stopped(run, 143)


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05, 0.13, 0.31])
def test_sigterm_to_the_launcher_saves_the_last_step(tmp_path, seconds):
    with job(tmp_path, model__data__num_workers=1) as run:
        run.until_step(5)
        time.sleep(seconds)
        run.process.terminate()
        check_stopped(run, 143)


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_rank_alone_stops_all(tmp_path, rank):
    with job(tmp_path) as run:
        run.until_step(5)
        os.kill(run.ranks()[rank], signal.SIGTERM)
        check_stopped(run, 143)


@pytest.mark.parametrize("layout", [{}, {"model__fsdp": True}])
def test_sigterm_to_one_rank_within_a_long_validation_stops_all(tmp_path, layout):
    long = {"trainer__val_check_interval": 3, "trainer__limit_val_batches": 1.0, "model__encoder_seq_length": 1024}
    with job(tmp_path, **long, **layout) as run:
        run.until_step(3)
        time.sleep(1)
        os.kill(run.ranks()[1], signal.SIGTERM)
        check_stopped(run, 143)
        assert "val_loss" not in (run.run / "metrics.jsonl").read_text()


def test_interrupt_saves_the_last_step(tmp_path):
    with job(tmp_path, model__data__num_workers=2) as run:
        run.until_step(3)
        os.killpg(run.process.pid, signal.SIGINT)
        check_stopped(run, 130)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("early", [0.0, 0.4, 1.5, 3.0])
def test_a_signal_before_the_first_step_is_heard(tmp_path, number, code, early):
    with job(tmp_path) as run:
        run.until(lambda: len([found for found in run.processes().values() if "RANK" in found]) == 2)
        time.sleep(early)
        run.process.send_signal(number)
        assert run.end() == code, run.error
        assert "Traceback" not in run.error, run.error


@pytest.mark.parametrize("early", [0.0, 0.4, 1.5, 3.0])
def test_a_signal_to_one_rank_before_the_first_step_ends_all(tmp_path, early):
    with job(tmp_path) as run:
        run.until(lambda: len([found for found in run.processes().values() if "RANK" in found]) == 2)
        (pid,) = [pid for pid, found in run.processes().items() if found.get("RANK") == "1"]
        time.sleep(early)
        os.kill(pid, signal.SIGUSR1)
        assert run.end() == 143, run.error
        assert "Traceback" not in run.error, run.error


def test_a_second_signal_later_ends_the_run_at_once(tmp_path):
    with job(tmp_path) as run:
        run.until_step(3)
        os.kill(run.ranks()[1], signal.SIGSTOP)  # so that the first cannot be followed
        run.process.terminate()
        time.sleep(2.5)
        run.process.terminate()
        assert run.end() in (1, 143)


# ---------------------------------------------------------------- an error on one rank


@pytest.fixture
def package(tmp_path):
    """An installed package whose data set fails on rank 1 as its `dataset_kwargs.fails` says."""
    root = tmp_path / "installed"
    (root / "failing-1.0.dist-info").mkdir(parents=True)
    (root / "failing-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: failing\nVersion: 1.0\n")
    (root / "failing-1.0.dist-info" / "entry_points.txt").write_text("[stoker.datasets]\nfailing = failing:samples\n")
    (root / "failing.py").write_text(
        """
import os
import time
from stoker.trainer.data.datasets.samples import MockSamples

class Samples(MockSamples):
    fails = ""

    def batch(self, first, count):
        if self.fails and first >= 24:
            open("gone.bin") if self.fails == "later" else self.crash() if self.fails != "hang" else time.sleep(1e6)
        return super().batch(first, count)

    def crash(self):
        if self.fails == "at length":
            raise RuntimeError("word " * 100_000)
        [][1]

def samples(data, split, sequence_length, tokenizer, seed):
    fails = data["dataset_kwargs"]["fails"] if os.environ.get("RANK") == os.environ.get("FAILS", "1") else ""
    if fails == "at once":
        open("gone.bin")
    found = Samples(tokenizer.vocab_size, sequence_length, seed, 1024, 0)
    found.fails = fails
    return found
"""
    )
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_the_user_on_one_rank_is_told_once(tmp_path, package, rank):
    environ = package | {"FAILS": str(rank)}
    with job(
        tmp_path, environ=environ, model__data__data_impl="failing", model__data__dataset_kwargs="{fails: at once}"
    ) as run:
        assert run.end() == 2
        where = "rank 1: " if rank else ""
        assert run.error.splitlines()[-1].startswith(f"{where}`model.data.data_impl` (failing), train: "), run.error
        assert run.error.count("gone.bin") == 1
        assert not run.run.exists()


@pytest.mark.parametrize(
    ("rank", "place", "keys"),
    [
        (1, "", {"model__data__num_workers": 0}),
        (1, "", {"model__data__num_workers": 1}),
        (2, "context 1, tensor 0, ", SHARED),
    ],
)
def test_a_crash_of_one_rank_is_told_once(tmp_path, package, rank, place, keys):
    with job(
        tmp_path,
        environ=package | {"FAILS": str(rank)},
        model__data__data_impl="failing",
        model__data__dataset_kwargs="{fails: crash}",
        **keys,
    ) as run:
        assert run.end() == 1
        failed = rf"rank {rank} \({place}process \d+\) after step \d+: IndexError: "
        assert re.fullmatch(rf"{failed}.*; the traceback is in (stoker-crash-\S+\.txt)", run.error.strip())
        (kept,) = tmp_path.glob("stoker-crash-*.txt")
        assert "in batch" in kept.read_text()


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_that_hangs_ends_with_the_stacks_of_all(tmp_path, package, restarts):
    """The other one waits for it in a collective."""
    with job(
        tmp_path,
        environ=package,
        trainer__step_timeout=5,
        trainer__process_timeout=300,
        trainer__max_restarts=restarts,
        model__data__data_impl="failing",
        model__data__dataset_kwargs="{fails: hang}",
    ) as run:
        assert run.end() == 1
        lines = run.error.splitlines()
        assert re.fullmatch(
            r"rank [01] \(process \d+\) after step \d+: no step for \d+ seconds "
            rf"\(limit \d+, `trainer.step_timeout`\); the stack traces are in {re.escape(str(run.run / 'stacks'))}",
            lines[-1],
        ), run.error
        stacks = {path.name: path.read_text() for path in (run.run / "stacks").iterdir()}
        assert set(stacks) == {"rank-0.txt", "rank-1.txt"}
        assert "in batch" in stacks["rank-1.txt"]
        assert stacks["rank-0.txt"].count("seconds in a step") == 1 + restarts
        assert sum("restarting" in line for line in lines) == restarts


def test_a_crash_that_says_more_than_a_pipe_holds_ends_the_run(tmp_path, package):
    with job(
        tmp_path, environ=package, model__data__data_impl="failing", model__data__dataset_kwargs="{fails: at length}"
    ) as run:
        assert run.end() == 1
        assert re.match(r"rank 1 \(process \d+\) after step \d+: RuntimeError: word word", run.error), run.error
        (kept,) = tmp_path.glob("stoker-crash-*.txt")
        assert len(kept.read_text()) > 500_000


# ---------------------------------------------------------------- one configuration


def test_a_worker_refuses_another_configuration(tmp_path):
    order = {
        "document": {"name": "changed"},
        "provenance": {"origins": {}, "preset": {}, "preset_keys": [], "findings": []},
        "digest": "0" * 64,
        "rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "address": ["127.0.0.1", 1],
        "listener": None,
        "imports": [],
        "command": ["stoker", "train"],
    }
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as outcome:
        worker = subprocess.Popen(
            [sys.executable, "-m", "stoker.trainer.cli.rank_entry"],
            stdin=subprocess.PIPE,  # open until it has ended: it would follow a launcher that is gone
            cwd=tmp_path,
            pass_fds=[write_end],
        )
        os.close(write_end)
        assert worker.stdin is not None
        worker.stdin.write(json.dumps(order | {"outcome": write_end}).encode() + b"\n")
        worker.stdin.flush()
        told = json.loads(outcome.read())
        assert worker.wait(HANGS) == told["code"] == 2
        worker.stdin.close()
    assert told["lines"] == ["the configuration changed on its way to this process; start the run again"]
    assert not list(tmp_path.iterdir())


def started(directory: Path, rank: int, port: int, names: tuple[str, str, str], **changes: Any) -> Job:
    """One rank as somebody else starts it; `names` are the variables of rank, number and place on the machine."""
    environ = {names[0]: str(rank), names[1]: "2", names[2]: str(rank), "MASTER_ADDR": "127.0.0.1"}
    return job(directory, environ=environ | {"MASTER_PORT": str(port)}, **changes)


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")


def test_ranks_with_different_configurations_are_refused(tmp_path):
    port = free_port()
    with (
        started(tmp_path, 0, port, SLURM) as first,
        started(tmp_path, 1, port, SLURM, model__hidden_size=64) as second,
    ):
        for run in (first, second):
            assert run.end() == 2
            assert run.error.endswith(
                "the ranks have different configurations; start them with the same files and overrides\n"
            )
        assert not first.run.exists()


# ---------------------------------------------------------------- whoever starts the processes


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Hashes of a run of two processes that nothing disturbs."""
    with job(tmp_path_factory.mktemp("launched"), **SHORT) as run:
        assert run.end() == 0, run.error
        return hashes(run.run, 12)


def test_torchrun_trains_as_the_launcher_does(tmp_path, launched):
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    with Job(tmp_path, [sys.executable, *command, "-m", "stoker", *arguments(SHORT)]) as run:
        assert run.end() == 0, run.error
        assert hashes(run.run, 12) == launched


def test_srun_trains_as_the_launcher_does(tmp_path, launched):
    port = free_port()
    with (
        started(tmp_path, 0, port, SLURM, **SHORT) as first,
        started(tmp_path, 1, port, SLURM, **SHORT) as second,
    ):
        assert [run.end() for run in (first, second)] == [0, 0]
        assert hashes(first.run, 12) == launched


def test_scancel_stops_what_srun_started(tmp_path):
    port = free_port()
    with started(tmp_path, 0, port, SLURM) as first, started(tmp_path, 1, port, SLURM) as second:
        first.until_step(3)
        for run in (first, second):
            run.process.terminate()
        assert second.end() == 143
        check_stopped(first, 143)


def test_two_machines_train_as_one(tmp_path, launched):
    """Both are this one; each has a launcher of its own."""
    port = free_port()
    changes = SHORT | {"trainer__devices": 1, "trainer__num_nodes": 2}
    nodes = [
        job(tmp_path, environ={"NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}, **changes)
        for node in range(2)
    ]
    with nodes[0] as first, nodes[1] as second:
        assert [run.end() for run in (first, second)] == [0, 0]
        assert hashes(first.run, 12) == launched


@pytest.mark.parametrize("node", [0, 1])
def test_a_rank_lost_on_another_machine_ends_the_run(tmp_path, node):
    port = free_port()
    nodes = [
        job(
            tmp_path,
            environ={"NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            trainer__devices=1,
            trainer__num_nodes=2,
        )
        for node in range(2)
    ]
    with nodes[0] as first, nodes[1] as second:
        first.until_step(3)
        os.kill(first.ranks()[node], signal.SIGKILL)
        assert [run.end() for run in (first, second)] == [1, 1]
        place = rf"rank {node} on {socket.gethostname()} \(process {first.ranks()[node]}\)"
        for run in nodes:  # the node that only lost the other one says why, too
            assert re.fullmatch(rf"{place} was killed by SIGKILL after step \d+", run.error.splitlines()[-1]), run.error


# ---------------------------------------------------------------- --restart


@pytest.mark.parametrize("rank", [0, 1])
def test_a_supervised_run_goes_on_after_a_killed_rank(tmp_path, launched, rank):
    with job(tmp_path, "--restart", "2", **SHORT) as run:
        run.until_step(6)
        os.kill(run.ranks()[rank], signal.SIGKILL)
        assert run.end() == 0, run.error
        assert "restarting from the newest checkpoint" in run.error, "it was too late to kill it"
        assert hashes(run.run, 12) == launched


def test_a_supervised_run_that_is_told_to_stop_is_not_started_again(tmp_path):
    with job(tmp_path, "--restart", "2") as run:
        run.until_step(3)
        os.kill(run.ranks()[1], signal.SIGSTOP)
        run.process.terminate()
        time.sleep(0.5)
        os.kill(run.ranks()[1], signal.SIGKILL)
        assert run.end() == 143, run.error
        assert "restarting" not in run.error
