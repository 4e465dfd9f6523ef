"""Heartbeats of the nodes of a run, so that those which are lost can be named by the others.

A rank that waits for one on another node learns only that a connection has closed, or nothing until a timeout.
Therefore the first rank of each node counts in the store of the rendezvous, from a thread with its own connection.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore

_INTERVAL_SECONDS = 1.0
_SILENCE_SECONDS = 4.0
"""A node that does not count for so long is lost."""
_CONNECT_SECONDS = 5.0


def start_heartbeat(address: tuple[str, int], session: str, node: int) -> None:
    """Count for a node until this process ends.

    Args:
        address: host and port of the store.
        session: prefix of the keys of this start.
        node: number of this node.
    """
    threading.Thread(target=_beat, args=(address, session, node), name="heartbeat", daemon=True).start()


def lost_nodes(address: tuple[str, int], session: str, own: int, nodes: int, ranks_per_node: int) -> str:
    """Return the names of nodes that have stopped counting, empty if there are none; takes some seconds.

    Args:
        address: host and port of the store.
        session: prefix of the keys of this start.
        own: number of this node.
        nodes: number of nodes.
        ranks_per_node: ranks of each.
    """
    try:
        store = _connect(address, session)
        before = [store.add(_count(node), 0) for node in range(nodes)]
        time.sleep(_SILENCE_SECONDS)
        after = [store.add(_count(node), 0) for node in range(nodes)]
        silent = [node for node in range(nodes) if node != own and 0 < before[node] == after[node]]
        return " and ".join(_name(node, store.get(_host(node)).decode(), ranks_per_node) for node in silent)
    except RuntimeError:
        return f"the first machine ({address[0]})"


def _beat(address: tuple[str, int], session: str, node: int) -> None:
    with suppress(RuntimeError):  # the run is ending
        store = _connect(address, session)
        store.set(_host(node), socket.gethostname())
        while True:
            store.add(_count(node), 1)
            time.sleep(_INTERVAL_SECONDS)


def _connect(address: tuple[str, int], session: str) -> PrefixStore:
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    limit = timedelta(seconds=_CONNECT_SECONDS)
    return PrefixStore(session, TCPStore(*address, is_master=False, wait_for_workers=False, timeout=limit))


def _count(node: int) -> str:
    return f"stoker/heartbeat/{node}"


def _host(node: int) -> str:
    return f"stoker/host/{node}"


def _name(node: int, host: str, ranks_per_node: int) -> str:
    first = node * ranks_per_node
    ranks = f"rank {first}" if ranks_per_node == 1 else f"ranks {first} to {first + ranks_per_node - 1}"
    return f"node {node} ({host}, {ranks})"
