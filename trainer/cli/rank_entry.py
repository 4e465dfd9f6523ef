"""One rank of a run that the launcher started: reads its frozen configuration, trains, tells how it ended."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any

from ..config.run_config import RunConfig
from ..plugins.import_modules import import_modules
from ..utils.environment import prepare_process
from ..utils.errors import EXIT_BUG, EXIT_DONE, EXIT_INTERRUPTED, UserError

_PR_SET_PDEATHSIG = 1  # sys/prctl.h
_SIGNS_OF_LOSS = (
    "Connection closed by peer",
    "onnection reset",
    "Connection was likely closed",
    "Broken pipe",
    "imed out",
    "Application timeout",
    "NCCL",
)
"""What gloo, NCCL and the store say when another process is gone."""


def main() -> None:
    """Train as one rank; never returns."""
    # Until the run takes them, signals end the process: an exception in the middle of an import could end anywhere.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    order: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    _die_with_launcher()
    threading.Thread(target=_end_with_launcher, name="launcher", daemon=True).start()
    code, kind, lines = EXIT_DONE, "", []
    try:
        code = _train(order)
    except UserError as error:
        code, kind, lines = error.exit_code, "user", error.lines
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except BaseException as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if any(sign in text for sign in _SIGNS_OF_LOSS):
            code, kind, lines = EXIT_BUG, "lost", [f"lost another rank: {text}"]
        else:
            code, kind, lines = EXIT_BUG, "crash", [text, *traceback.format_exc().splitlines()]
    with suppress(OSError):
        os.write(order["outcome"], json.dumps({"code": code, "kind": kind, "lines": lines}).encode())
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    # Not sys.exit: gloo's threads now and then abort a process that has done its work (pytorch #188266).
    os._exit(code)


def _train(order: dict[str, Any]) -> int:
    sys.argv = order["command"]  # what the record of the run and its loggers say it was started with
    import_modules(order["imports"])
    config = RunConfig.from_document(order["document"], trusted=True)
    if config.digest != order["digest"]:
        raise UserError("the configuration changed on its way to this process; start the run again")
    prepare_process(config.root.env_vars)
    from torch._C._distributed_c10d import TCPStore

    from ..distributed.process_group import join, leave
    from ..train import run_training

    if order["world_size"] == 1:
        return run_training(config).exit_code
    host, port = order["address"]
    timeout = config.root.trainer.process_timeout
    facts: dict[str, Any] = {} if order["listener"] is None else {"master_listen_fd": order["listener"]}
    store = TCPStore(host, port, order["world_size"], is_master=order["rank"] == 0, use_libuv=True, **facts)
    ranks = join(order["rank"], order["world_size"], order["local_rank"], store=store, timeout=timeout)
    result = run_training(config, ranks)
    ranks.barrier()
    leave()
    return result.exit_code


def _die_with_launcher() -> None:
    """Have Linux kill this process when the launcher is gone, even while it is stopped and cannot see that itself."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_launcher() -> None:
    sys.stdin.buffer.read()
    os._exit(EXIT_BUG)


if __name__ == "__main__":
    main()
