"""Dataloader workers that die are replaced, the batches stay the same, and a run that ends prints nothing of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from interrupted_runs import Command, arguments, figures, last_step
from tiers import full_only
from tiny_run import final_hashes, tiny_config
from worker_threads import Killed, worker_threads

import stoker
from stoker.trainer.data.dataloader_workers import WorkerLostError, WorkerPool
from stoker.trainer.data.datasets.samples import MockSamples
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import EXIT_FAILURE


def dying_at(deaths: list[int], item: int) -> tuple[int, int]:
    """Return the item and its square; end the worker once for each time the item is in `deaths`."""
    if item in deaths:
        deaths.remove(item)
        raise Killed
    return item, item**2


def items_of(pool: WorkerPool[int, tuple[int, int]], number: int) -> list[tuple[int, int]]:
    return list(islice(iter(pool), number))


@pytest.mark.parametrize("deaths", [[], [0], [5, 4], [3, 3, 4, 4, 9]])
def test_a_dead_worker_is_replaced_and_the_items_are_the_same(
    deaths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_threads(monkeypatch)
    left, logged = list(deaths), []
    with closing(WorkerPool(lambda item: dying_at(left, item), count(), 3, logged.append)) as pool:
        assert items_of(pool, 20) == [(item, item**2) for item in range(20)]
    assert (left, len(logged)) == ([], len(deaths))
    for line in logged:
        assert "was killed by SIGKILL, as when memory runs out; another one prepares its batches again" in line


def test_a_worker_that_dies_again_and_again_ends_the_run_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    worker_threads(monkeypatch)
    logged: list[str] = []
    with closing(WorkerPool(lambda item: dying_at([4], item), count(), 2, logged.append)) as pool:
        items = iter(pool)
        assert [item for item, _ in islice(items, 4)] == [0, 1, 2, 3]
        with pytest.raises(WorkerLostError) as caught:
            next(items)
    (line,) = caught.value.lines
    assert "dataloader worker 0 (process " in line
    assert "was killed by SIGKILL, as when memory runs out, for the third time without a batch" in line
    assert "lower `model.data.num_workers`" in line
    assert caught.value.exit_code == EXIT_FAILURE
    assert len(logged) == 2


def test_an_error_of_a_worker_is_raised_at_its_item(monkeypatch: pytest.MonkeyPatch) -> None:
    worker_threads(monkeypatch)
    with closing(WorkerPool(lambda item: 1 // (3 - item), count(), 2)) as pool:
        items = iter(pool)
        assert [next(items) for _ in range(3)] == [0, 0, 1]
        with pytest.raises(ZeroDivisionError, match="in MainProcess"):
            next(items)


def test_a_run_that_loses_its_workers_saves_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker_threads(monkeypatch)
    changes = {"trainer__val_check_interval": 5, "exp_manager__checkpoint_callback_params": {"save_top_k": 1}}
    assert run_training(tiny_config(tmp_path / "peace", **changes)).exit_code == 0
    config = tiny_config(tmp_path / "lost", model__data__num_workers=1, **changes)
    with monkeypatch.context() as patch:
        batch = MockSamples.batch

        def killed(samples: MockSamples, first: int, number: int) -> Any:
            # of step 8, which Lightning fetches before step 7; step 5 has a validation loss, and so ranks higher
            if first == 4 * 7:
                raise Killed
            return batch(samples, first, number)

        patch.setattr(MockSamples, "batch", killed)
        with pytest.raises(WorkerLostError):
            run_training(config)
    assert "step-6" in {path.name for path in (tmp_path / "lost" / "checkpoints").iterdir()}
    log = (tmp_path / "lost" / "run.log").read_text()
    assert f"saved {tmp_path / 'lost' / 'checkpoints' / 'step-6'}, the last finished step" in log
    assert "for the third time without a batch" in log
    assert run_training(config).exit_code == 0
    assert final_hashes(tmp_path / "lost", 8) == final_hashes(tmp_path / "peace", 8)


# ---------------------------------------------------------------- processes


@full_only
def test_a_run_whose_workers_are_killed_ends_as_if_they_were_not(tmp_path: Path) -> None:
    """Also by a signal that reaches all processes of the run first."""
    peace, killed = tmp_path / "peace", tmp_path / "killed"
    with Command(*arguments(peace, 60), cwd=tmp_path) as command:
        assert command.ended() == (0, "")
    with Command(*arguments(killed, 60, "model.data.num_workers=2"), cwd=tmp_path) as command:
        for step in (3, 20):
            assert command.wait_until(lambda step=step: last_step(killed) >= step)
            for pid in workers_of(command):
                os.kill(pid, signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            for pid in workers_of(command):
                os.kill(pid, number)
        assert command.ended() == (0, "")
    log = (killed / "run.log").read_text()
    assert log.count("was killed by SIGKILL, as when memory runs out; another one") >= 2
    assert "was killed by SIGTERM" not in log
    assert figures(killed) == figures(peace)
    assert final_hashes(killed, 60) == final_hashes(peace, 60)


def workers_of(command: Command) -> Iterator[int]:
    for pid in command.processes():
        if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
            yield pid


EXITING = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from types import SimpleNamespace
from stoker.trainer.data.dataloader import PrefetchingDataLoader
import torch

class Samples:
    samples = sequence_length = 8
    def __setstate__(self, state):
        Path({mark!r}).touch()
        time.sleep(8)  # a machine under load
    def __getstate__(self):
        return {{"samples": 8}}

if __name__ == "__main__":
    loader = PrefetchingDataLoader(Samples(), [None] * 9, torch.device("cpu"), 1)
    batches = iter(loader)
    while not Path({mark!r}).exists():
        time.sleep(0.05)
    {end}
"""


@full_only
@pytest.mark.parametrize("end", ["loader.close()", "sys.exit()"])
def test_a_run_that_ends_while_workers_start_prints_nothing(end: str, tmp_path: Path) -> None:
    """They found the semaphores of their queue gone (`SemLock._rebuild`: FileNotFoundError)."""
    root, mark = str(Path(stoker.__path__[0]).parent), str(tmp_path / "mark")
    (tmp_path / "exiting.py").write_text(EXITING.format(root=root, mark=mark, end=end))
    done = subprocess.run(
        [sys.executable, tmp_path / "exiting.py"], capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
