"""Rendezvous of the nodes of a run, and the store they share: torch's dynamic rendezvous over c10d.

The agent on the node that MASTER_ADDR names holds the store; if that node is lost, the others end. Like all of c10d it
is neither encrypted nor authenticated (the state of the rendezvous is even pickled), so it needs a trusted network; the
store of a single node listens on its loopback device.
"""

from __future__ import annotations

import logging
import socket
import threading
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from ..utils.environment import share_no_second_store
from ..utils.errors import EXIT_FAILURE, UserError
from ..utils.text import one_line

_RUN_ID = "stoker"
"""The same for all runs: ranks compare their configurations later, with a better message than a missing node."""
_KEEP_ALIVE_SECONDS = 5
"""A node that has said nothing for three times as long is lost; clocks of nodes may differ by less."""
_LAST_CALL_SECONDS = 6
"""Time for further nodes to join once there are `min_nodes`."""
MIN_JOIN_SECONDS = 60.0
"""Time to wait for the other nodes at least, whatever `trainer.process_timeout`: starting takes as long everywhere."""


class NodeStore:
    """Key-value store of the nodes, in whose calls no caller waits longer than a time limit.

    A connection that is cut off without being closed would keep the client of a TCPStore waiting for many minutes.

    Attributes:
        address: host and port of the store.
        is_host: this process holds it.
        timeout: seconds to wait for each answer.
    """

    def __init__(self, address: tuple[str, int] | None, timeout: float) -> None:
        """Host or join the store.

        Args:
            address: MASTER_ADDR and MASTER_PORT; None for the store of a single node.
            timeout: seconds to wait for the host.

        Raises:
            UserError: the store cannot be reached.
        """
        self.timeout = timeout
        limit = timedelta(seconds=timeout)
        if address is None:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self.address: tuple[str, int] = listener.getsockname()[:2]
                descriptor = listener.detach()
            self.tcp = TCPStore(*self.address, is_master=True, master_listen_fd=descriptor, timeout=limit)
            self.is_host = True
            return
        self.address = address
        self.tcp, self.is_host = _host_or_join(address, limit)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a key if it has the expected value, or none for ""; return its value."""
        return self._limited("compare_set", key, expected, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key that is set."""
        return self._limited("get", key)

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._limited("set", key, value)

    def check(self, key: str) -> bool:
        """Return whether a key is set."""
        return self._limited("check", [key])

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return its value."""
        return self._limited("add", key, amount)

    def _limited(self, name: str, *arguments: Any) -> Any:
        """Call the store in a thread of its own, which does not keep the process from ending."""
        answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def call() -> None:
            try:
                answers.put((getattr(self.tcp, name)(*arguments), None))
            except BaseException as error:
                answers.put((None, error))

        threading.Thread(target=call, name="store", daemon=True).start()
        try:
            value, error = answers.get(timeout=self.timeout)
        except Empty:
            raise TimeoutError(f"no answer within {self.timeout:g} seconds") from None
        if error is not None:
            raise error
        return value


def _host_or_join(address: tuple[str, int], limit: timedelta) -> tuple[TCPStore, bool]:
    if _is_local(address[0]):
        try:
            return TCPStore(*address, is_master=True, wait_for_workers=False, timeout=limit), True
        except RuntimeError:  # the port is in use, by another agent of this machine
            pass
    try:
        return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=limit), False
    except RuntimeError as error:
        raise UserError(
            f"cannot reach the first machine at {address[0]}:{address[1]} (MASTER_ADDR, MASTER_PORT) within "
            f"{limit.total_seconds():g} seconds: {one_line(error, 120)}",
            EXIT_FAILURE,
        ) from None


def _is_local(host: str) -> bool:
    """Return whether a host is this machine: it has its name, or an address that only this machine can listen on."""
    if host.partition(".")[0] == socket.gethostname().partition(".")[0]:  # which may not resolve yet, in a new pod
        return True
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        socket.create_server(address[:2], family=family).close()
    except OSError:
        return False
    return True


def build_rendezvous(store: NodeStore, min_nodes: int, max_nodes: int, timeout: float) -> DynamicRendezvousHandler:
    """Return the rendezvous of a run's nodes.

    Args:
        store: the nodes' store.
        min_nodes: fewest nodes.
        max_nodes: most nodes.
        timeout: seconds to wait for `min_nodes`.
    """
    _silence_torch()
    share_no_second_store()
    host, port = store.address
    parameters = RendezvousParameters(
        "c10d",
        f"{host}:{port}",
        _RUN_ID,
        min_nodes,
        max_nodes,
        host if store.is_host else _own_address(store.address),
        join_timeout=max(1, round(timeout)),
        last_call_timeout=_LAST_CALL_SECONDS,
        keep_alive_interval=_KEEP_ALIVE_SECONDS,
    )
    stand_in: Any = store  # the backend needs `get` and `compare_set` only
    return create_handler(store.tcp, C10dRendezvousBackend(stand_in, _RUN_ID), parameters)


def _own_address(address: tuple[str, int]) -> str:
    """Return the address of this machine on the way to another."""
    with socket.create_connection(address, timeout=MIN_JOIN_SECONDS) as connection:
        return connection.getsockname()[0]


def _silence_torch() -> None:
    """Keep torch's agent and rendezvous from logging what stoker reports in a line of its own."""
    for name in ("agent.server.api", "rendezvous.dynamic_rendezvous", "rendezvous.c10d_rendezvous_backend"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
