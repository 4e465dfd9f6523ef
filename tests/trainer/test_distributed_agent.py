"""Agents of nodes: what they restart, what ends the run, who leaves; with stand-ins for the processes they start.

The rendezvous and its store are real: every agent is a thread here. Real processes are in tests/full.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiers import cases, full_only
from tiny_run import tiny_config

from stoker.trainer.cli import main
from stoker.trainer.distributed import node_agent
from stoker.trainer.distributed.launcher import Failure
from stoker.trainer.distributed.node_agent import NodeAgent
from stoker.trainer.distributed.placement import Placement
from stoker.trainer.distributed.rendezvous import NodeStore
from stoker.trainer.loggers.run_events import read_events
from stoker.trainer.utils.errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_IO, UserError

KILLED = Failure(["rank 0 (process 7) was killed by SIGKILL"], EXIT_FAILURE, True, 0, "", 3)
LOST = Failure(["rank 1 (process 8): lost another rank"], EXIT_FAILURE, False, 1, "", 3)


@dataclass
class Workers:
    """Stand-in for the workers of a node: they end at once, with a failure or an exit code.

    `script` gives for each start of a node a failure, an exit code, or None to run until they are told to stop.
    """

    script: Callable[[int, int], Failure | int | None]
    starts: list[Placement] = field(default_factory=list)

    def __call__(self, config: Any, placement: Placement, imports: Any, session: str) -> Any:
        workers, number = self, sum(start.node_rank == placement.node_rank for start in self.starts)
        self.starts.append(placement)
        outcome = [self.script(placement.node_rank, number)]

        class Started:
            process_ids = {0: 1}  # noqa: RUF012
            exit_code = property(lambda self: outcome[0])

            def start(self) -> None:
                assert workers.starts

            def poll(self) -> bool:
                return outcome[0] is not None

            def failure(self) -> Failure | None:
                return outcome[0] if isinstance(outcome[0], Failure) else None

            def forward(self, number: int) -> None:
                outcome[0] = 143

            def close(self) -> None:
                pass

        return Started()


def run_agents(
    directory: Path,
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
    nodes: int = 1,
    late: Callable[[], bool] | None = None,
    **changes: Any,
) -> list[tuple[int | UserError, list[str]]]:
    """Run agents in threads, the last one only when `late` allows; return the result of each, and what it said."""
    monkeypatch.setattr(node_agent, "LocalWorkers", workers)
    monkeypatch.setattr(node_agent, "_PAUSE_SECONDS", dict.fromkeys(node_agent._PAUSE_SECONDS, 0.0))
    monkeypatch.setattr(node_agent, "_LINGER_SECONDS", 0.7)
    monkeypatch.setattr(node_agent, "_CLAIM_SECONDS", 1.0)
    for name in ("LAST_CALL", "KEEP_ALIVE"):
        monkeypatch.setattr(f"stoker.trainer.distributed.rendezvous._{name}_SECONDS", 1)
    keys = {"exp_manager__resume_if_exists": True, "trainer__num_nodes": nodes, "trainer__max_restarts": 2}
    config = tiny_config(directory, **keys | changes)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = ("127.0.0.1", listener.getsockname()[1]) if nodes > 1 else None
    results: list[Any] = [None] * nodes
    started = threading.Event()

    def agent(node: int) -> None:
        said: list[str] = []
        if node:
            started.wait()
        try:
            store = NodeStore(address, 60)
            started.set()
            while node == nodes - 1 and late is not None and not late():
                time.sleep(0.05)
            placement = Placement(nodes, 1, node, nodes, rendezvous=address)
            results[node] = NodeAgent(config, placement, store, said.append, ()).train(), said
        except BaseException as error:
            results[node] = error, said

    threads = [threading.Thread(target=agent, args=(node,), daemon=True) for node in range(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert None not in results
    return results


@pytest.mark.parametrize(("failures", "starts"), cases([(2, 3), (0, 1), (9, 3)], 1))
def test_workers_are_started_again_so_many_times(tmp_path, monkeypatch, failures, starts):
    workers = Workers(lambda node, number: KILLED if number < failures else 0)
    ((result, said),) = run_agents(tmp_path, workers, monkeypatch)
    if failures < 9:
        assert result == 0
    else:
        assert isinstance(result, UserError)
        assert (result.lines, result.exit_code) == (KILLED.lines, EXIT_FAILURE)
    assert len(workers.starts) == starts
    assert said == [
        line
        for left in range(1, 2 - starts, -1)
        for line in (KILLED.lines[0], f"restarting from the newest checkpoint ({left} more without progress)")
    ]


def test_a_new_checkpoint_gives_the_restarts_back(tmp_path, monkeypatch):
    def fail_after_a_checkpoint(node: int, number: int) -> Failure | int:
        (tmp_path / "checkpoints" / f"step-{number}").mkdir(parents=True)
        return KILLED if number < 5 else 0

    workers = Workers(fail_after_a_checkpoint)
    ((result, said),) = run_agents(tmp_path, workers, monkeypatch)
    assert result == 0
    assert len(workers.starts) == 6
    assert [line for line in said if "restarting" in line] == [
        "restarting from the newest checkpoint (1 more without progress)"
    ] * 5
    assert [event["event"] for event in read_events(tmp_path)] == ["failure", "restart"] * 5
    assert read_events(tmp_path)[0]["reason"] == KILLED.lines[0]


@pytest.mark.parametrize(("code", "starts"), cases([(EXIT_BAD_INPUT, 1), (EXIT_IO, 3)], 1))
def test_bad_input_is_not_tried_again_but_a_full_disk_is(tmp_path, monkeypatch, code, starts):
    workers = Workers(lambda node, number: Failure(["no space or no file"], code, True, 0, "", 1))
    ((result, _),) = run_agents(tmp_path, workers, monkeypatch)
    assert isinstance(result, UserError)
    assert result.exit_code == code
    assert len(workers.starts) == starts


def test_both_nodes_name_the_cause_and_start_again(tmp_path, monkeypatch):
    """The node whose workers only lost the others notices it first here."""
    failures = {(0, 0): LOST, (1, 0): KILLED}
    workers = Workers(lambda node, number: failures.get((node, number), 0))
    results = run_agents(tmp_path, workers, monkeypatch, nodes=2)
    assert [result for result, _ in results] == [0, 0]
    assert [said[0] for _, said in results] == KILLED.lines * 2
    assert sorted(start.node_rank for start in workers.starts) == [0, 0, 1, 1]
    (failure,) = [event for event in read_events(tmp_path) if event["event"] == "failure"]
    assert failure["node"] == 1


@full_only
def test_the_error_of_one_node_ends_all(tmp_path, monkeypatch):
    bad = Failure(["there is no such file"], EXIT_BAD_INPUT, True, 1, "", 0)
    results = run_agents(tmp_path, Workers(lambda node, _: bad if node else None), monkeypatch, nodes=2)
    assert [str(result) for result, _ in results] == bad.lines * 2
    assert [isinstance(result, UserError) and result.exit_code for result, _ in results] == [EXIT_BAD_INPUT] * 2


@full_only
def test_a_node_that_fails_first_twice_leaves(tmp_path, monkeypatch):
    def script(node: int, number: int) -> Failure | int | None:
        if len(workers.starts) > 4:  # the first node alone
            return 0
        return KILLED if node else None

    workers = Workers(script)
    keys: dict[str, Any] = {"trainer__min_nodes": 1, "trainer__max_restarts": 9}
    (first, _), (second, said) = run_agents(tmp_path, workers, monkeypatch, nodes=2, **keys)
    assert first == 0
    assert isinstance(second, UserError)
    assert "this node leaves the run, which goes on with the others" in said[-1]
    assert [start.world_size for start in workers.starts] == [2, 2, 2, 2, 1]
    kinds = [event["event"] for event in read_events(tmp_path)]
    assert kinds == ["failure", "restart", "failure", "leave", "restart", "shrink"]


@full_only
def test_a_node_that_joins_makes_the_run_grow(tmp_path, monkeypatch):
    workers = Workers(lambda node, number: None if len(workers.starts) == 1 else 0)
    keys: dict[str, Any] = {"trainer__min_nodes": 1}
    results = run_agents(tmp_path, workers, monkeypatch, nodes=2, late=lambda: bool(workers.starts), **keys)
    assert [result for result, _ in results] == [0, 0]
    assert [start.world_size for start in workers.starts] == [1, 2, 2]
    assert results[0][1] == ["going on with 2 nodes in place of 1"]
    assert [event["event"] for event in read_events(tmp_path)] == ["grow"]


@full_only
def test_a_node_that_the_batch_does_not_divide_by_stays_idle(tmp_path, monkeypatch):
    """8 samples, 4 in a micro batch: two ranks at most."""
    workers = Workers(lambda node, number: 0)
    keys: dict[str, Any] = {"trainer__min_nodes": 2, "model__micro_batch_size": 4, "model__global_batch_size": 8}
    results = run_agents(tmp_path, workers, monkeypatch, nodes=3, **keys)
    assert [result for result, _ in results] == [0, 0, 0]
    assert [start.world_size for start in workers.starts] == [2, 2]
    assert sum("stays idle" in line for _, said in results for line in said) == 1


def test_restart_is_the_key(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    seen: list[int] = []

    def run_agent(config: Any, *_: Any) -> int:
        seen.append(config.root.trainer.max_restarts)
        return 0

    monkeypatch.setattr(node_agent, "run_agent", run_agent)
    words = ["train", "data=mock", "exp_manager.resume_if_exists=true"]
    assert main.main([*words, "--restart", "4"]) == 0
    assert main.main([*words, "trainer.max_restarts=5"]) == 0
    assert seen == [4, 5]
    assert os.environ.get("TORCH_CPP_LOG_LEVEL") is None


@pytest.mark.parametrize("variables", [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")])
def test_processes_that_others_start_cannot_be_restarted(monkeypatch, capsys, variables):
    environ = {**dict(zip(variables, ("0", "2"), strict=True)), "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    words = ["trainer.devices=2", "model.micro_batch_size=1", "exp_manager.resume_if_exists=true"]
    assert main.main(["train", "data=mock", "trainer.max_restarts=1", *words]) == EXIT_BAD_INPUT
    assert "need processes that stoker starts" in capsys.readouterr().err
