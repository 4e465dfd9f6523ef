"""Crash tests of checkpoint saving: kill a child process by SIGKILL at every system call of a save (`killed`).

For each call, a child process saves step 3 next to a complete step 2 and kills itself instead of that call, or halfway
through it if it is a write. Ranks are threads that synchronize at a barrier. The remaining directory is then loaded,
cleaned up and saved again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stoker.trainer.checkpoint.async_saver import CheckpointSaver
from stoker.trainer.checkpoint.reader import OPTIMIZER, WEIGHTS, RunState, checkpoint_paths, newest_checkpoint
from stoker.trainer.checkpoint.writer import CheckpointContent, apply_retention, remove_temporaries
from stoker.trainer.distributed.process_group import DistributedContext
from stoker.trainer.utils.local_shard import row_shard, whole_shard

CALLS = ("open", "write", "fsync", "rename", "mkdir", "rmdir", "unlink")
"""Functions of `os` that modify the file system."""
ROWS = 6


class Gathered:
    """Barrier at which threads exchange strings."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=600)
        self.texts = [""] * count


class ThreadRanks(DistributedContext):
    """Process group of threads in this process."""

    def __init__(self, rank: int, world_size: int, gathered: Gathered) -> None:
        super().__init__(rank, world_size)
        self._gathered = gathered

    def with_own_group(self) -> DistributedContext:
        return self

    def all_gather_text(self, text: str) -> list[str]:
        self._gathered.texts[self.rank] = text
        self._gathered.barrier.wait()
        texts = list(self._gathered.texts)
        self._gathered.barrier.wait()
        return texts


def content(step: int, rank: int, world_size: int) -> CheckpointContent:
    """Return a checkpoint filled with its step number; each rank holds a shard of the rows."""
    rows = ROWS // world_size
    piece = row_shard(torch.full((rows, 4), float(step)), rank * rows, ROWS)
    state = RunState(
        step=step, consumed_samples=4 * step, val_loss=1 / step, seed=1, global_batch_size=4, micro_batch_size=2,
        sequence_length=8, precision="fp32", optimizer={"lr": 0.1}, data_fingerprint="f", versions={"torch": "2"},
    )  # fmt: skip
    return CheckpointContent(
        state, {WEIGHTS: {"w": piece}, OPTIMIZER: {"w.exp_avg": piece}}, {"name": "x"}, {"tokenizer": "b"}
    )


def save(directory: Path, step: int, *, is_async: bool, world_size: int) -> list[BaseException]:
    """Save, then delete all but the newest; return the exceptions of the ranks."""
    gathered, raised = Gathered(world_size), []

    def save_rank(rank: int) -> None:
        ranks = ThreadRanks(rank, world_size, gathered) if world_size > 1 else DistributedContext()

        def clean() -> None:
            apply_retention(directory, save_top_k=1, save_last=True)

        try:
            saver = CheckpointSaver(directory, ranks, clean, async_save=is_async)
            saver.save(content(step, rank, world_size))
            saver.wait()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=save_rank, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def replace_calls(act: Callable[[int, str, Callable[..., Any], tuple[Any, ...]], Any]) -> Callable[[], None]:
    """Run `act(number, name, function, arguments)` before each of `CALLS`; return a function that undoes the patch."""
    lock, count = threading.Lock(), 0
    original = {name: getattr(os, name) for name in CALLS}

    def patched(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            with lock:
                count += 1
                number = count
            act(number, name, original[name], args)
            return original[name](*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, patched(name))

    def restore() -> None:
        for name, function in original.items():
            setattr(os, name, function)

    return restore


def die_at(target: int) -> Callable[[int, str, Callable[..., Any], tuple[Any, ...]], None]:
    """Return an action for `replace_calls` that kills this process at call number `target`."""

    def act(number: int, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if number == target:
            if name == "write":
                function(args[0], bytes(args[1])[: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def count_calls(directory: Path, *, is_async: bool, world_size: int) -> int:
    """Return the number of calls in a save next to an older checkpoint."""
    numbers: list[int] = []
    save(directory, 2, is_async=is_async, world_size=world_size)
    restore = replace_calls(lambda number, name, function, args: numbers.append(number))
    save(directory, 3, is_async=is_async, world_size=world_size)
    restore()
    return len(numbers)


def problems_after(directory: Path, *, is_async: bool, world_size: int) -> list[str]:
    """Return everything that is wrong with a directory in which a save of step 3 was interrupted."""
    checkpoint, complaints = newest_checkpoint(directory)
    if checkpoint is None or complaints:
        return [f"no complete checkpoint: {complaints}"]
    found: list[str] = []
    pieces = {"w": whole_shard(torch.zeros(ROWS, 4))}
    checkpoint._fill(WEIGHTS, pieces)
    step = checkpoint.state.step
    if step not in (2, 3) or not bool((pieces["w"].local == step).all()):
        found.append(f"step {step} holds wrong values")
    remove_temporaries(directory)
    if sorted(directory.iterdir()) != sorted(checkpoint_paths(directory)):
        found.append("files were left behind")
    raised = save(directory, 3, is_async=is_async, world_size=world_size)
    if raised or [path.name for path in directory.iterdir()] != ["step-3"]:
        found.append(f"cannot save again: {raised}")
    return found


def killed(folder: str, is_async: bool, world_size: int, stride: int) -> dict[str, Any]:
    """Kill a save at every `stride`-th call, in a process without threads; return numbers of calls, kills, deaths."""
    root = Path(folder)
    calls = count_calls(root / "counted", is_async=is_async, world_size=world_size)
    problems: dict[int, list[str]] = {}
    deaths = 0
    numbers = range(1, calls + 1, stride)
    for number in numbers:
        directory = root / str(number)
        save(directory, 2, is_async=is_async, world_size=world_size)
        pid = os.fork()
        if pid == 0:
            replace_calls(die_at(number))
            save(directory, 3, is_async=is_async, world_size=world_size)
            os._exit(0)
        deaths += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        if found := problems_after(directory, is_async=is_async, world_size=world_size):
            problems[number] = found
    return {"calls": calls, "kills": len(numbers), "deaths": deaths, "problems": problems}
