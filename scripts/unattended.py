"""A run that nobody watches: processes of two nodes fail again and again, and the result is that of an unbroken run.

    python scripts/unattended.py --minutes 30 --report unattended.json

Two agents (`stoker train`) on this machine, each with its own HOME, TMPDIR and working directory, train a tiny GPT on
four processes with `every_n_train_steps: auto`. About `--seconds` after each first new step something fails: a rank is
killed, stopped (SIGSTOP), raises an exception, or the disk is full (with root, which can mount a small file system).
Then the same steps run without a failure. With `--elastic` whole nodes are killed and started again, in fp64. The
report has the share of first-time steps among all steps, the seconds from a kill to the first new step, and whether the
final weights are equal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from stoker.trainer.loggers.run_events import read_events

PLUGIN = """
import os, time
import stoker
from stoker.trainer.data.datasets.samples import MockSamples

class Samples(MockSamples):
    def batch(self, first, count):
        time.sleep(float(os.environ.get("STEP_SECONDS", 0)))
        fault = os.environ["FAULT"] + os.environ.get("RANK", "0")
        if os.path.exists(fault):
            os.unlink(fault)
            raise RuntimeError("planted")
        return super().batch(first, count)

@stoker.register("dataset", "faulty")
def samples(data, split, sequence_length, tokenizer, seed):
    return Samples(tokenizer.vocab_size, sequence_length, seed, 1024, 0)
"""
KEYS = {
    "model.data.data_impl": "faulty",
    "trainer.accelerator": "cpu",
    "trainer.devices": 2,
    "trainer.max_restarts": 3,
    "trainer.max_steps": 1_000_000,
    "trainer.val_check_interval": 1_000_000,
    "trainer.step_timeout": 10,
    "trainer.process_timeout": 30,
    "trainer.limit_val_batches": 0,
    "trainer.log_every_n_steps": 1,
    "exp_manager.resume_if_exists": True,
    "exp_manager.create_tensorboard_logger": False,
    "exp_manager.checkpoint_callback_params.every_n_train_steps": "auto",
    "exp_manager.checkpoint_callback_params.save_top_k": 1,
    "exp_manager.checkpoint_callback_params.async_save": True,
    "model.num_layers": 1,
    "model.hidden_size": 32,
    "model.ffn_hidden_size": 64,
    "model.num_attention_heads": 2,
    "model.encoder_seq_length": 16,
    "model.hidden_dropout": 0.1,
    "model.micro_batch_size": 2,
    "model.global_batch_size": 8,
    "model.optim.sched.max_steps": 1000,
    "model.optim.sched.warmup_ratio": "null",
}


class Nodes:
    """The agents of one run, and what they tell.

    Args:
        place: a folder for everything but the run directory.
        run: the run directory.
        step_seconds: what every step takes longer.
        nodes: number of agents, 1 or 2.
        changes: of `KEYS`.
    """

    def __init__(self, place: Path, run: Path, step_seconds: float, nodes: int = 2, **changes: Any) -> None:
        self.run = run
        self.fault = place / "fault-"
        self._place = place
        self._keys = KEYS | {"exp_manager.explicit_log_dir": run, "trainer.num_nodes": nodes} | changes
        self._step_seconds = step_seconds
        self._nodes = nodes
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._port = listener.getsockname()[1]
        self.agents: list[subprocess.Popen[bytes]] = []
        (place / "plugin").mkdir(parents=True, exist_ok=True)
        (place / "plugin" / "faulty.py").write_text(PLUGIN)

    def __enter__(self) -> Nodes:
        self.agents = [self.start(0)]
        if self._nodes > 1:
            self.until(self._is_hosted)  # on one machine whichever agent is first holds the rendezvous
            self.agents.append(self.start(1))
        return self

    def __exit__(self, *exception: object) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()

    def start(self, node: int) -> subprocess.Popen[bytes]:
        """Start the agent of a node."""
        home = self._place / f"node{node}"
        home.mkdir(exist_ok=True)
        environ = os.environ | {
            "HOME": str(home),
            "TMPDIR": str(home),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "NODE_RANK": str(node),
            "OMP_NUM_THREADS": "1",
            "FAULT": str(self.fault),
            "STEP_SECONDS": str(self._step_seconds),
            "PYTHONPATH": os.pathsep.join([str(self._place / "plugin"), os.environ.get("PYTHONPATH", "")]),
        }
        overrides = [f"{key}={value}" for key, value in self._keys.items()]
        with (home / "out").open("ab") as out, (home / "err").open("ab") as err:
            return subprocess.Popen(
                [sys.executable, "-m", "stoker", "train", "--import", "faulty", *overrides],
                cwd=home,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def _is_hosted(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
            return True
        return False

    @property
    def errors(self) -> str:
        """Return what the agents have written to stderr."""
        return "\n".join(f"{path.parent.name}: {path.read_text()}" for path in sorted(self._place.glob("node*/err")))

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """Return the events of the run, of one kind if given."""
        return [event for event in read_events(self.run) if kind in ("", event["event"])]

    def step(self) -> int:
        """Return the last step of which the run has told."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        steps = [json.loads(line)["step"] for line in lines[-2:] if line.endswith("}")]
        return max(steps, default=0)

    def ranks(self) -> dict[int, int]:
        """Return the process id of each rank."""
        record = json.loads((self.run / "environment.json").read_text())
        return {process["rank"]: process["process"] for process in record["processes"]}

    def until(self, condition: Callable[[], bool], seconds: float = 300) -> None:
        """Wait for a condition while at least one agent lives."""
        ends = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < ends, f"it never came to that:\n{self.errors}"
            alive = any(agent.poll() is None for agent in self.agents)
            assert alive, f"the run ended:\n{self.errors}"
            time.sleep(0.1)

    def stop(self) -> list[int]:
        """Stop the run after its step; return the exit codes."""
        for agent in self.agents:
            agent.terminate()
        return [agent.wait(120) for agent in self.agents]


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[bool]:
    """Mount a small file system at a folder, if this process may; yield whether it did."""
    place.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(place)]
    mounts = (
        shutil.which("mount") is not None and not subprocess.run(command, capture_output=True, check=False).returncode
    )
    try:
        yield mounts
    finally:
        if mounts:
            subprocess.run(["umount", "-l", str(place)], check=False)


def fill(place: Path) -> None:
    """Fill the file system of a folder."""
    with contextlib.suppress(OSError), (place / "filler").open("wb") as file:
        while True:
            file.write(bytes(1 << 16))
            file.flush()


def inject(nodes: Nodes, kind: str, chance: random.Random, disk: Path) -> None:
    """Let something fail."""
    rank, process = chance.choice(sorted(nodes.ranks().items()))
    if kind == "kill":
        os.kill(process, signal.SIGKILL)
    elif kind == "stop":
        os.kill(process, signal.SIGSTOP)
    elif kind == "exception":
        Path(f"{nodes.fault}{rank}").touch()
    elif kind == "disk":
        fill(disk)
    elif kind == "node":  # the other one holds the rendezvous
        nodes.agents[1].kill()
        nodes.agents[1].wait()


def recover(nodes: Nodes, kind: str, chance: random.Random, disk: Path, seen: int) -> None:
    """Let something fail after `seen` steps, and wait for the first new step."""
    starts, failures = (len(nodes.events(kind)) for kind in ("start", "failure"))
    inject(nodes, kind, chance, disk)
    if kind == "disk":
        nodes.until(lambda: not any(_is_alive(process) for process in nodes.ranks().values()))
        (disk / "filler").unlink()
    nodes.until(lambda: len(nodes.events("start")) > starts)
    nodes.until(lambda: nodes.step() > seen)
    assert len(nodes.events("failure")) > failures, nodes.events()[-5:]


def rejoin(nodes: Nodes) -> None:
    """Start the agent of the second node again, and wait until the run goes on with it."""
    starts = len(nodes.events("start"))
    nodes.agents[1] = nodes.start(1)
    nodes.until(lambda: len(nodes.events("start")) > starts)
    seen = nodes.events("start")[-1]["step"]
    nodes.until(lambda: nodes.step() > seen)


def broken_run(nodes: Nodes, kinds: list[str], seconds: float, minutes: float, disk: Path) -> dict[str, Any]:
    """Let a run fail until the time is over, then stop it; return the figures."""
    chance, number, seen = random.Random(0), 0, 0
    delays: dict[str, list[float]] = {kind: [] for kind in kinds}
    ends = time.monotonic() + 60 * minutes
    nodes.until(lambda: nodes.step() > 0)
    while time.monotonic() < ends:
        time.sleep(seconds)
        kind, number = kinds[number % len(kinds)], number + 1
        seen, failed_at = max(seen, nodes.step()), time.monotonic()
        recover(nodes, kind, chance, disk, seen)
        delays[kind].append(round(time.monotonic() - failed_at, 1))
        print(f"{kind}: first new step after {delays[kind][-1]} s; step {nodes.step()}", flush=True)
        if kind == "node":
            time.sleep(seconds)
            rejoin(nodes)
    time.sleep(seconds / 4)
    codes = nodes.stop()
    assert codes == [143, 143], f"{codes}\n{nodes.errors}"
    (stop,) = nodes.events("stop")[-1:]
    figures = {"failures": number, "final_step": stop["step"], **_steps(nodes.events())}
    return figures | {"seconds_to_first_new_step": delays}


def _is_alive(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _steps(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many steps were run, and which share of them for the first time."""
    run, first, started = 0, 0, 0
    for event in events:
        if event["event"] == "start":
            started = event["step"]
        elif event["event"] in ("failure", "stop"):
            run += event["step"] - started
            first, started = max(first, event["step"]), event["step"]
    return {"steps_run": run, "first_time_share": round(first / run, 4)}


def difference(first: Path, second: Path) -> float:
    """Return the largest difference of two checkpoints; 0 only for the same bits."""
    largest = 0.0
    weights = [_tensors(path) for path in (first, second)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        if not torch.equal(tensor, weights[1][name]):
            largest = max(largest, (tensor.double() - weights[1][name].double()).abs().max().item(), 1e-300)
    return largest


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        found |= {f"{path.name.split('-')[0]}/{name}": value for name, value in load_file(path).items()}
    return found


def main() -> None:
    """Run it and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="how long failures are planted")
    parser.add_argument("--seconds", type=float, default=20, help="from the first new step to the next failure")
    parser.add_argument("--step-seconds", type=float, default=0.1, help="what each step waits, to spare the cores")
    parser.add_argument("--elastic", action="store_true", help="kill nodes instead, so that the layout changes; fp64")
    parser.add_argument("--report", type=Path, help="JSON file")
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="unattended-"))
    report = measure(place, args.minutes, args.seconds, args.step_seconds, elastic=args.elastic)
    print(json.dumps(report, indent=2))
    if args.report:
        args.report.write_text(json.dumps(report, indent=2) + "\n")


def measure(place: Path, minutes: float, seconds: float, step_seconds: float, *, elastic: bool) -> dict[str, Any]:
    """Run with and without failures in a folder; return the report."""
    disk = place / "disk"
    changes: dict[str, Any] = {"trainer.min_nodes": 1, "trainer.precision": 64} if elastic else {}
    with small_disk(disk) as mounted:
        kinds = ["node"] if elastic else ["kill", "stop", "exception", *(["disk"] if mounted else [])]
        with Nodes(place / "broken", disk / "run", step_seconds, **changes) as nodes:
            try:
                report = broken_run(nodes, kinds, seconds, minutes, disk)
            finally:
                shutil.copy(disk / "run" / "events.jsonl", place)
        last = report["final_step"]
        peace = {"trainer.max_steps": last, "exp_manager.checkpoint_callback_params.every_n_train_steps": 10 * last}
        with Nodes(place / "peace", place / "peace" / "run", 0.0, **changes | peace) as nodes:
            codes = [agent.wait() for agent in nodes.agents]
            assert codes == [0, 0], nodes.errors
        paths = [run / "checkpoints" / f"step-{last}" for run in (disk / "run", place / "peace" / "run")]
        report["difference_of_final_weights"] = difference(*paths)
    return report


if __name__ == "__main__":
    main()
