"""A function that runs in forked processes, one for each rank: torch is imported once for all of them."""

from __future__ import annotations

import gc
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def fork_ranks(directory: str, size: int, function: Callable[[int], Any]) -> list[Any]:
    """Call a function with each rank in a process of its own; return what each returns, which JSON must hold.

    Args:
        directory: existing folder for the results.
        size: number of ranks.
        function: fails in all ranks or in none, or the others wait for it.
    """
    results, pids = [Path(directory) / f"{rank}.json" for rank in range(size)], []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            gc.freeze()  # a store that pytest has not collected yet would wait for its thread, which is not forked
            code = 1
            try:
                results[rank].write_text(json.dumps(function(rank)))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert not any(codes), codes
    return [json.loads(result.read_text()) for result in results]
