"""Entry points of a rank: started by the launcher, or by torchrun or srun with one process per device.

The launcher starts this module: it reads the configuration from stdin, trains, and reports the outcome.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from ..config.load import config_from_document
from ..distributed.heartbeat import lost_nodes, start_heartbeat
from ..distributed.step_counter import open_step_counter
from ..utils.environment import prepare_process
from ..utils.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, UserError
from ..utils.import_modules import import_plugins
from ..utils.signals import EXIT_CODES, exit_on_signals, signal_when_parent_ends
from ..utils.text import one_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_CONNECTION_ERRORS = (
    "Connection closed by peer",
    "onnection reset",
    "Connection was likely closed",
    "Broken pipe",
    "imed out",
    "Application timeout",
    "NCCL",
)
"""Fragments of gloo, NCCL and store errors raised when another process has exited."""


def main() -> None:
    """Train as one rank; never return."""
    # Until the run installs its handlers: a KeyboardInterrupt may be swallowed inside imports.
    exit_on_signals(tuple(EXIT_CODES))
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # until it writes stack traces (`watchdog.py`)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, EXIT_CODES)
    task: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    signal_when_parent_ends(signal.SIGKILL)  # also while this process is suspended
    threading.Thread(target=_end_with_launcher, name="launcher", daemon=True).start()
    code, kind, lines = EXIT_OK, "", []
    try:
        code = _train(task)
    except UserError as error:
        code, kind, lines = error.exit_code, "user", error.lines
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except BaseException as error:
        text = f"{type(error).__name__}: {one_line(error, 300)}"
        if any(fragment in text for fragment in _CONNECTION_ERRORS):
            code, kind, lines = EXIT_FAILURE, "lost", [f"lost {_lost_nodes(task) or 'another rank'}: {text}"]
        else:
            code, kind, lines = EXIT_FAILURE, "crash", [text, *traceback.format_exc().splitlines()]
    _end(task, code, kind, lines)


def _end(task: dict[str, Any], code: int, kind: str, lines: list[str]) -> NoReturn:
    """Report the outcome to the launcher and exit."""
    with suppress(OSError):
        os.write(task["outcome"], json.dumps({"code": code, "kind": kind, "lines": lines}).encode())
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    # Not sys.exit: gloo threads sometimes abort the process at exit (pytorch #188266).
    os._exit(code)


def _train(task: dict[str, Any]) -> int:
    sys.argv = task["command"]  # for the run's manifest and loggers
    import_plugins(task["imports"])
    config = config_from_document(task["document"], trusted=True).with_provenance(task["provenance"])
    if config.digest != task["digest"]:
        raise UserError("the configuration changed on its way to this process; start the run again")
    prepare_process(config.root.env_vars)
    from ..distributed.process_group import DistributedContext
    from ..train import run_training, train_in_group

    signals = {
        "report_step": open_step_counter(task["steps"], task["local_rank"]),
        "end_hung": lambda line: _end(task, EXIT_FAILURE, "hung", [line]),
    }
    if task["world_size"] == 1:
        return run_training(config, DistributedContext(**signals)).exit_code
    place = (task["rank"], task["world_size"], task["local_rank"])
    return train_in_group(config, *place, _open_store(task), signals).exit_code


def _open_store(task: dict[str, Any]) -> Store:
    """Return the store of this start: of the nodes' agents, or in the first rank on its inherited listener."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    (host, port), session, listener = task["address"], task["session"], task["listener"]
    if session is None:
        options = {} if listener is None else {"master_listen_fd": listener}
        return TCPStore(host, port, task["world_size"], is_master=task["rank"] == 0, use_libuv=True, **options)
    if task["num_nodes"] > 1 and task["local_rank"] == 0:
        start_heartbeat((host, port), session, task["node"])
    return PrefixStore(session, TCPStore(host, port, is_master=False, wait_for_workers=False))


def _lost_nodes(task: dict[str, Any]) -> str:
    if task["num_nodes"] == 1:
        return ""
    nodes, (host, port) = task["num_nodes"], task["address"]
    return lost_nodes((host, port), task["session"], task["node"], nodes, task["world_size"] // nodes)


def _end_with_launcher() -> None:
    sys.stdin.buffer.read()
    os._exit(EXIT_FAILURE)


if __name__ == "__main__":
    main()
