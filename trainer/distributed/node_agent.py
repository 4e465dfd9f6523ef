"""Agent of a node: starts its workers, and with the agents of the other nodes starts them again after a failure.

`torch.distributed.elastic` does the work: its rendezvous counts the nodes and notices lost ones, its agent restarts the
workers when some have failed or a node joins. Added here: the agents agree on the failure that took the others down, so
that all report the same cause; what is not worth a retry; and nodes that leave or stay idle.
"""

from __future__ import annotations

import json
import signal
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from ..config.node_counts import min_nodes, usable_nodes
from ..config.run_config import RunConfig
from ..config.run_paths import checkpoint_directory, configured_run_directory
from ..loggers.run_events import RunEvents
from ..utils.errors import EXIT_FAILURE, EXIT_IO, EXIT_OK, EXIT_TERMINATED, UserError
from ..utils.signals import EXIT_CODES, exit_now, handlers_set
from ..utils.text import one_line, pluralize
from .launcher import GRACE_SECONDS, Failure, LocalWorkers
from .placement import Placement
from .rendezvous import MIN_JOIN_SECONDS, NodeStore, build_rendezvous

_PAUSE_SECONDS = {EXIT_FAILURE: 0.0, EXIT_IO: 10.0}
"""Exit codes after which the workers are restarted, and the pause before: a full disk may have space again. What fails
with others, such as bad input, would fail again."""
_FAILURES_TO_LEAVE = 2
_CLAIM_SECONDS = 2.0
"""Time that an agent whose workers only lost others leaves to the one whose workers know why."""
_CLAIM_INTERVAL = 0.5
_LINGER_SECONDS = 2.0
"""Time that the host of the store leaves the other agents to read how the run ended."""
_END_SECONDS = 15.0
"""Time to wait for the other agents after the last step."""

Report = Callable[[str], None]


def run_agent(config: RunConfig, placement: Placement, report: Report, imports: Sequence[str] = ()) -> int:
    """Train on this node and those that join it, with restarts; return the exit code.

    Args:
        config: the configuration.
        placement: this node's part of the processes.
        report: called with lines for the user.
        imports: user modules that the workers import first.

    Raises:
        UserError: the error that ended the run, or this node's part in it.
    """
    timeout = config.root.trainer.process_timeout
    store = NodeStore(placement.rendezvous, max(MIN_JOIN_SECONDS, timeout))
    store.timeout = timeout
    agent = NodeAgent(config, placement, store, report, imports)
    with handlers_set(agent.handle_signal, tuple(EXIT_CODES)):
        return agent.train()


class NodeAgent(SimpleElasticAgent):
    """Agent of one node; its base class calls the methods that begin with `_`, from one loop.

    Args:
        config: the configuration.
        placement: this node's part of the processes, if all nodes take part.
        store: the store that the nodes share.
        report: called with lines for the user.
        imports: user modules that the workers import first.
    """

    def __init__(
        self, config: RunConfig, placement: Placement, store: NodeStore, report: Report, imports: Sequence[str]
    ) -> None:
        trainer = config.root.trainer
        join = max(MIN_JOIN_SECONDS, trainer.process_timeout)
        self._rendezvous_handler = build_rendezvous(store, min_nodes(trainer), trainer.num_nodes, join)
        spec = WorkerSpec(
            role="stoker",
            entrypoint="stoker",
            local_world_size=placement.ranks_per_node,
            rdzv_handler=self._rendezvous_handler,
            max_restarts=trainer.max_restarts,
        )
        super().__init__(spec, exit_barrier_timeout=_END_SECONDS)
        self._config = config
        self._placement = placement
        self._store_of_nodes = store
        self._report = report
        self._imports = imports
        self._local: LocalWorkers | None = None
        self._session = ""
        self._present = 0
        self._nodes = 0
        self._node = 0
        self._checkpoints = _checkpoint_names(config)
        self._own_failures = 0
        self._claim_checked_at = 0.0
        self._claim: dict[str, Any] | None = None
        self._signal: signal.Signals | None = None
        self._has_announced = False
        self._leaves = False
        self._error: UserError | None = None
        self._code = EXIT_OK
        self._events = RunEvents(configured_run_directory(config.root.exp_manager, config.root.name))

    # ------------------------------------------------------------ from outside

    def train(self) -> int:
        """Train until the run ends, or goes on without this node; return the exit code.

        Raises:
            UserError: the error that ended it.
        """
        try:
            self.run()
        except RendezvousTimeoutError:
            trainer = self._config.root.trainer
            fewest = min_nodes(trainer)
            waited = max(MIN_JOIN_SECONDS, trainer.process_timeout)
            self._error = UserError(
                f"fewer than {pluralize(fewest, 'node')} came together within {waited:g} seconds (`trainer."
                f"{'num_nodes' if trainer.min_nodes is None else 'min_nodes'}`, `trainer.process_timeout`)",
                EXIT_FAILURE,
            )
        except RendezvousClosedError:
            self._error = UserError("the run has ended on the other nodes", EXIT_FAILURE)
        except (RendezvousConnectionError, TimeoutError, dist.DistError) as error:
            raise self._lost_store(error) from None
        if self._leaves:
            self._rendezvous_handler._stop_heartbeats()  # the others miss this node; `shutdown` would end them too
        else:
            self._rendezvous_handler.shutdown()
        if self._error is None:
            return self._code
        if self._store_of_nodes.is_host and self._present > 1:
            time.sleep(_LINGER_SECONDS)
        raise self._error

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the workers, which save; without workers, end at once."""
        self._signal = signal.Signals(number)
        if self._local is None:
            exit_now(number)
        else:
            self._local.forward(number)

    # ------------------------------------------------------------ of the base class

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Number the nodes that came together, and the workers of this one; none if it stays idle."""
        devices = spec.local_world_size
        own = [self._placement.node_rank, devices, self._remaining_restarts]
        store.set(f"stoker/node/{group_rank}", json.dumps(own))
        if group_rank == 0:
            store.set("stoker/session", uuid.uuid4().hex)
        nodes = [json.loads(store.get(f"stoker/node/{number}")) for number in range(group_world_size)]
        self._session = store.get("stoker/session").decode()
        if any(node[1] != devices for node in nodes):
            counts = ", ".join(str(node[1]) for node in nodes)
            raise UserError(f"the nodes have different numbers of devices ({counts}); set trainer.devices to the same")
        self._remaining_restarts = min(node[2] for node in nodes)  # one that joins now has not seen those before
        before, self._present = self._nodes, group_world_size
        self._nodes = usable_nodes(self._config.root, group_world_size, devices)
        if not self._nodes:
            raise UserError(
                f"{pluralize(group_world_size * devices, 'process', 'processes')} on "
                f"{pluralize(group_world_size, 'node')} do not divide `model.global_batch_size`, or hold no whole "
                "replica of the model; lower trainer.min_nodes"
            )
        order = sorted(range(group_world_size), key=lambda number: (nodes[number][0], number))
        self._node = order.index(group_rank)
        if self._node == 0 and before not in (0, self._nodes):
            kind = "grow" if self._nodes > before else "shrink"
            self._events.write(kind, nodes=self._nodes, before=before, processes=self._nodes * devices)
        if self._nodes < before or 0 < before < self._nodes:
            self._report(f"going on with {pluralize(self._nodes, 'node')} in place of {before}")
        if self._node >= self._nodes:
            return []
        world, first = self._nodes * devices, self._node * devices
        return [Worker(number, first + number, first + number, world, world) for number in range(devices)]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._claim = None
        self._events.flush()
        self._checkpoints = _checkpoint_names(self._config)
        if not worker_group.workers:
            self._report(f"this node stays idle: the run goes on with {pluralize(self._nodes, 'node')}")
            return {}
        placement = replace(
            self._placement,
            world_size=len(worker_group.workers) * self._nodes,
            node_rank=self._node,
            num_nodes=self._nodes,
            rendezvous=self._store_of_nodes.address,
        )
        workers = LocalWorkers(self._config, placement, self._imports, self._session)
        self._local = workers  # before they start, so that signals reach them
        workers.start()
        return workers.process_ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the workers; a failure on another node is one of theirs."""
        workers = self._local
        if workers is None:
            if self._store_of_nodes.check(self._key("end")):
                return RunResult(WorkerState.SUCCEEDED)
        elif workers.poll():
            failure = workers.failure()
            if failure is None:
                return self._finished(worker_group, workers.exit_code)
            self._claim = self._claim or self._agree(failure)
        elif self._signal is not None:
            self._announce_leaving()
        if self._read_claim() is None:
            return RunResult(WorkerState.HEALTHY)
        return self._failed()

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers: after a failure at once, and for a node that joins after they have saved."""
        workers = self._local
        if workers is None:
            return
        if self._claim is None:
            workers.forward(signal.SIGTERM)
            while not workers.poll() and self._read_claim() is None:
                time.sleep(_CLAIM_INTERVAL)
        self._shutdown()
        if self._signal is not None:
            exit_now(self._signal)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._local is not None:
            self._local.close()
            self._local = None

    def _exit_barrier(self) -> None:
        if not self._leaves:
            super()._exit_barrier()

    # ------------------------------------------------------------ ends and failures

    def _finished(self, worker_group: WorkerGroup, code: int) -> RunResult:
        """Return the state after workers that were not disturbed: done, or stopped by a signal to some node.

        Nodes without the signal go on if there are enough of them.
        """
        self._code = code
        if code == EXIT_TERMINATED and min_nodes(self._config.root.trainer) < self._config.root.trainer.num_nodes:
            if self._signal is not None:
                self._announce_leaving()
            time.sleep(2 * _CLAIM_INTERVAL)  # until all have told
            leaving = self._store_of_nodes.add(self._key("leaving"), 0)
            if usable_nodes(self._config.root, self._present - leaving, self._placement.ranks_per_node):
                if self._signal is None:
                    self._report("another node was stopped by a signal")
                    self._restart_workers(worker_group)
                    return RunResult(WorkerState.HEALTHY)
                self._leave("stopped by a signal")
        self._store_of_nodes.set(self._key("end"), "")
        return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: 0 for worker in worker_group.workers})

    def _announce_leaving(self) -> None:
        if not self._has_announced:
            self._has_announced = True
            self._store_of_nodes.add(self._key("leaving"), self._present if self._store_of_nodes.is_host else 1)

    def _agree(self, failure: Failure) -> dict[str, Any]:
        """Return the failure that the agents agree on: that of the first which knows a cause."""
        deadline = time.monotonic() + (0 if failure.is_cause or self._nodes == 1 else _CLAIM_SECONDS)
        while time.monotonic() < deadline:
            if (claim := self._read_claim()) is not None:
                return claim
            time.sleep(_CLAIM_INTERVAL / 2)
        own = self._judge(failure)
        claim = json.loads(self._store_of_nodes.compare_set(self._key("failure"), "", json.dumps(own)))
        if claim == own:
            self._record(failure, claim)
        return claim

    def _judge(self, failure: Failure) -> dict[str, Any]:
        """Return what to do about a failure: end, or go on with or without this node."""
        has_progressed = _checkpoint_names(self._config) != self._checkpoints
        left = self._config.root.trainer.max_restarts if has_progressed else self._remaining_restarts
        again = failure.exit_code in _PAUSE_SECONDS and left > 0 and self._signal is None
        own = (0 if has_progressed else self._own_failures) + failure.is_cause
        others = usable_nodes(self._config.root, self._present - 1, self._placement.ranks_per_node)
        leaves = again and own >= _FAILURES_TO_LEAVE and others > 0 and not self._store_of_nodes.is_host
        self._own_failures = own
        return {
            "node": self._node,
            "host": socket.gethostname(),
            "lines": failure.lines,
            "code": failure.exit_code,
            "left": left - 1 if again else -1,
            "leaves": leaves,
        }

    def _record(self, failure: Failure, claim: dict[str, Any]) -> None:
        """Write a failure of this node, and what follows from it, to the events of the run."""
        self._events.write(
            "failure",
            rank=failure.rank,
            place=failure.place,
            host=claim["host"],
            node=self._node,
            step=failure.step,
            reason=failure.lines[0],
        )
        if claim["leaves"]:
            self._events.write("leave", host=claim["host"], node=self._node, reason="failed first twice")
        if claim["left"] >= 0:
            self._events.write("restart", left=claim["left"])
        else:
            self._events.write("end", step=failure.step, exit_code=failure.exit_code)

    def _failed(self) -> RunResult:
        """Report the failure that the agents agreed on; return the state that restarts the workers or ends the run."""
        claim = self._claim
        assert claim is not None
        own = claim["node"] == self._node
        self._remaining_restarts = claim["left"] + 1  # of which the base class takes one
        if claim["left"] < 0:
            self._error = UserError(claim["lines"], claim["code"])
        elif own and claim["leaves"]:
            self._leave("its processes failed first twice without a new checkpoint in between")
            self._error = UserError(claim["lines"], claim["code"])
            self._remaining_restarts = 0
        else:
            self._report(claim["lines"][0])
            self._report(f"restarting from the newest checkpoint ({claim['left']} more without progress)")
            time.sleep(_PAUSE_SECONDS[claim["code"]])
        return RunResult(WorkerState.FAILED)

    def _leave(self, why: str) -> None:
        self._leaves = True
        self._report(f"this node leaves the run, which goes on with the others: {why}")

    def _read_claim(self) -> dict[str, Any] | None:
        """Return the failure that some agent has claimed since the workers were started, if any."""
        now = time.monotonic()
        if self._claim is None and now - self._claim_checked_at > _CLAIM_INTERVAL:
            self._claim_checked_at = now
            if self._store_of_nodes.check(self._key("failure")):
                self._claim = json.loads(self._store_of_nodes.get(self._key("failure")))
        return self._claim

    def _lost_store(self, error: BaseException) -> UserError:
        """Return the error of a node that no longer reaches the store, with what its workers say, if anything."""
        host, port = self._store_of_nodes.address
        cause = one_line(error.__cause__ or error, 120)
        lines = [f"lost the connection to the first machine at {host}:{port}, which holds the rendezvous: {cause}"]
        if (workers := self._local) is not None:
            deadline = time.monotonic() + GRACE_SECONDS
            while not workers.poll() and time.monotonic() < deadline:
                time.sleep(_CLAIM_INTERVAL)
            if (failure := workers.failure()) is not None:
                lines += failure.lines[:1]
        self._shutdown()
        return UserError(lines, EXIT_FAILURE)

    def _key(self, name: str) -> str:
        return f"stoker/{self._session}/{name}"


def _checkpoint_names(config: RunConfig) -> list[str]:
    """Return the names of the complete checkpoints."""
    keys = config.root.exp_manager
    place = configured_run_directory(keys, config.root.name)
    if place is None:  # a new directory, in which nothing can be resumed
        return []
    return sorted(path.name for path in checkpoint_directory(keys, place).glob("step-*") if ".tmp-" not in path.name)
