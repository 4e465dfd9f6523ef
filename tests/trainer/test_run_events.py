"""events.jsonl: the file of a run's life, and the checkpoint interval that follows from it."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_run import tiny_config

from stoker.trainer.checkpoint.save_interval import FIRST_SAVE_STEPS, FailureRate, SaveInterval
from stoker.trainer.distributed.process_group import DistributedContext
from stoker.trainer.loggers.run_events import RunEvents, read_events
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import UserError


def kinds(directory: Path) -> list[str]:
    return [event["event"] for event in read_events(directory)]


def test_a_run_writes_its_life(tmp_path):
    keys = {"exp_manager__resume_if_exists": True, "exp_manager__create_checkpoint_callback": True}
    for steps in (2, 4):
        run_training(tiny_config(tmp_path, trainer__max_steps=steps, trainer__val_check_interval=2, **keys))
    events = read_events(tmp_path)
    assert kinds(tmp_path) == ["start", "save", "end", "start", "resume", "save", "end"]
    assert {name: events[0][name] for name in ("step", "processes", "layout")} == {
        "step": 0,
        "processes": 1,
        "layout": {},
    }
    assert events[4]["checkpoint"] == str(tmp_path / "checkpoints" / "step-2")
    assert [event["checkpoint"] for event in events if event["event"] == "save"] == ["step-2", "step-4"]
    assert all(event["seconds"] > 0 for event in events if event["event"] == "save")
    assert (events[-1]["step"], events[-1]["exit_code"]) == (4, 0)


def test_a_line_that_was_cut_off_costs_only_itself(tmp_path):
    RunEvents(tmp_path).write("start", step=0)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "ev')
    RunEvents(tmp_path).write("end", step=1)
    assert kinds(tmp_path) == ["start", "end"]
    assert (tmp_path / "events.jsonl").read_text().count("\n") == 3


def test_what_a_full_disk_did_not_take_is_written_with_the_next(tmp_path, monkeypatch):
    events = RunEvents(tmp_path)

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("stoker.trainer.loggers.run_events.os.write", full)
        events.write("failure", rank=1)
    assert kinds(tmp_path) == []
    events.write("restart", left=1)
    assert kinds(tmp_path) == ["failure", "restart"]


def test_a_planted_link_is_not_followed(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "target").write_text("mine")
    (run / "events.jsonl").symlink_to(tmp_path / "target")
    RunEvents(run).write("start")
    assert (tmp_path / "target").read_text() == "mine"
    assert read_events(run) == []
    with pytest.raises(UserError, match=r"events\.jsonl is a link"):
        run_training(tiny_config(run))


def event(kind: str, time: float, **values: Any) -> dict[str, Any]:
    return {"event": kind, "time": time, **values}


LIFE = [
    event("start", 0),
    event("save", 50),
    event("failure", 100),
    event("restart", 100),
    event("start", 200),
    event("save", 290),  # killed with its agent: no more than this is known
    event("start", 400),
    event("stop", 500, exit_code=143),
    event("start", 600),
    event("error", 610, exit_code=74),
    event("failure", 611),
    event("start", 700),
    event("end", 800, exit_code=0),
]


def test_failures_are_counted_once_and_stops_are_none():
    rate = FailureRate(LIFE, 4, clock=lambda: 1000)
    assert rate.failures == 3
    assert rate.mean_seconds == pytest.approx((100 + 90 + 100 + 10 + 100) / 3)


@pytest.mark.parametrize(("hours", "processes", "seconds"), [(0, 8, 60), (1, 8, 3600), (100, 1024, 7.9 * 3600)])
def test_before_the_first_failure_the_time_without_one_counts(hours, processes, seconds):
    now = [0.0]
    rate = FailureRate([], processes, clock=lambda: now[0])
    now[0] = hours * 3600.0
    assert rate.mean_seconds == pytest.approx(seconds)


def test_the_interval_is_that_of_young_and_daly():
    interval = SaveInterval(DistributedContext(), [event("start", 0), event("failure", 200)], 7)
    assert interval.steps == FIRST_SAVE_STEPS
    assert [interval.is_due(step) for step in (16, 17)] == [False, True]
    change = interval.after_save(17, save_seconds=4.0, step_seconds=0.5)
    assert change is not None
    assert change["steps"] == interval.steps == round(math.sqrt(2 * 4 * 200) / 0.5) == 80
    assert not interval.is_due(96)
    assert interval.after_save(97, save_seconds=4.1, step_seconds=0.51) is None, "noise"
    assert interval.steps == 80


def test_a_later_start_knows_the_cost_from_the_events():
    past = [*LIFE, event("interval", 750, save_seconds=2.0, step_seconds=0.1)]
    interval = SaveInterval(DistributedContext(), past, 0)
    mean = FailureRate(past, 1).mean_seconds
    assert interval.steps == round(math.sqrt(2 * 2 * mean) / 0.1)


def test_all_ranks_follow_the_first():
    """Others have measured something else, and have no events."""

    class Other(DistributedContext):
        def broadcast_text(self, text: str = "") -> str:
            return json.dumps(33)

    interval = SaveInterval(Other(rank=1, world_size=2), [], 0)
    assert interval.steps == 33
    interval.after_save(33, save_seconds=9.0, step_seconds=0.1)
    assert interval.steps == 33


def test_auto_saves_after_ten_steps_and_then_as_measured(tmp_path):
    params = {"every_n_train_steps": "auto", "save_top_k": -1}
    keys = {"trainer__max_steps": 12, "trainer__val_check_interval": 100}
    run_training(tiny_config(tmp_path, **keys, exp_manager__checkpoint_callback_params=params))
    saved = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").iterdir())
    assert saved[0] == FIRST_SAVE_STEPS
    (change,) = [event for event in read_events(tmp_path) if event["event"] == "interval"][:1]
    assert change["save_seconds"] > 0 < change["step_seconds"]
    assert f"saving every {change['steps']} step" in (tmp_path / "run.log").read_text()
