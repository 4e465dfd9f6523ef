"""Watchdog on step time: what it watches, what it writes, and that a busy or suspended machine is not a hang."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tiny_run import tiny_config

from stoker.trainer.callbacks import watchdog
from stoker.trainer.callbacks.watchdog import StepTimer, Watchdog
from stoker.trainer.distributed.process_group import DistributedContext
from stoker.trainer.train import run_training


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(watchdog, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(watchdog, "_OTHERS_SECONDS", 0.05)


def watched(directory: Path, timer: StepTimer, timeout: float | None, seconds: float, rank: int = 0) -> list[str]:
    """Lines with which the watchdog has ended the process within so many seconds."""
    lines: list[str] = []
    ended = threading.Event()

    def end(line: str) -> None:
        lines.append(line)
        ended.set()

    with Watchdog(timer, timeout, directory, DistributedContext(rank=rank, end_hung=end)):
        ended.wait(seconds)
    return lines


def test_a_step_that_takes_too_long_writes_the_stacks_and_ends(tmp_path):
    timer = StepTimer()
    timer.resume()
    (line,) = watched(tmp_path, timer, 0.1, 60, rank=3)[:1]
    assert "`trainer.step_timeout`" in line
    text = (tmp_path / "stacks" / "rank-3.txt").read_text()
    assert text.startswith(time.strftime("%Y-"))
    assert "rank 3 on" in text
    assert "in watched" in text, "the stack of the main thread"


def test_a_step_is_allowed_ten_times_the_median(tmp_path):
    now = [0.0]
    timer = StepTimer(lambda: now[0])
    for _ in range(3):
        timer.end_step()
        now[0] += 30.0
    assert timer.median == 30.0
    assert watched(tmp_path, timer, 0.05, 0.5) == []
    assert not (tmp_path / "stacks").exists(), "nothing was written"


def test_validation_saving_and_the_first_step_are_not_watched(tmp_path):
    timer = StepTimer()
    assert watched(tmp_path, timer, 0.05, 0.3) == [], "the first step"
    timer.end_step()
    timer.pause()
    assert watched(tmp_path, timer, 0.05, 0.3) == [], "a validation"


def test_null_never_ends_a_run(tmp_path):
    timer = StepTimer()
    timer.resume()
    assert watched(tmp_path, timer, None, 0.2) == []


def test_time_in_which_the_job_was_suspended_does_not_count(tmp_path, monkeypatch):
    """Then the clock goes on, and the watchdog does not."""
    timer, clock = StepTimer(), time.monotonic
    timer.resume()
    jumps = iter(range(10**9))
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock() + 1000.0 * next(jumps))
    assert watched(tmp_path, timer, 60, 0.3) == []


def test_sigquit_writes_the_stacks_of_one_of_several_ranks(tmp_path):
    with Watchdog(StepTimer(), None, tmp_path, DistributedContext(rank=1, world_size=2)):
        os.kill(os.getpid(), signal.SIGQUIT)
    assert "test_sigquit" in (tmp_path / "stacks" / "rank-1.txt").read_text()


def test_a_run_that_hangs_is_ended(tmp_path):
    """From the key to the file; the process would end here."""
    released = threading.Event()
    lines: list[str] = []

    def end(line: str) -> None:
        lines.append(line)
        released.set()

    steps = [0]

    def hang(step: int) -> None:
        steps[0] = step
        if step == 3:
            released.wait(60)

    ranks = DistributedContext(report_step=hang, end_hung=end)
    run_training(tiny_config(tmp_path, trainer__max_steps=4, trainer__step_timeout=0.5), ranks)
    assert steps == [4]
    assert lines
    assert "in hang" in (tmp_path / "stacks" / "rank-0.txt").read_text()
