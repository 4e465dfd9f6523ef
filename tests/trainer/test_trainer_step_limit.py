"""Runs that are shortened, with their learning rate schedule, to end in a given time."""

import itertools
import json

import pytest
from run_metrics import metric_rows
from tiny_run import tiny_config

from stoker.trainer.callbacks.step_limit import StepLimit
from stoker.trainer.checkpoint.reader import CONFIG, open_checkpoint
from stoker.trainer.core import training_loop
from stoker.trainer.train import run_training


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ends_after(
    durations: list[float], max_steps: int, seconds: float, validation: dict[int, float]
) -> tuple[int, float]:
    """Return the number of steps and the time from the end of the first step."""
    clock = Clock()
    limit, step, start = StepLimit(max_steps, seconds, clock), 0, 0.0
    while step < limit.max_steps:
        clock.now += durations[min(step, len(durations) - 1)]
        step += 1
        limit.after_step(step)
        start = start or clock.now
        if step in validation:
            clock.now += validation[step]
            limit.resume_clock()
    return step, clock.now - start


def test_a_steady_run_keeps_its_steps():
    assert ends_after([0.1], 1000, 99.9, {})[0] == 1000
    assert ends_after([0.1], 1000, 98.5, {})[0] == 1000  # less than can be measured reliably
    assert ends_after([30.0, 0.1], 1000, 100.0, {})[0] == 1000  # the first step compiles
    assert ends_after([0.01], 1000, 100.0, {})[0] == 1000  # never longer


@pytest.mark.parametrize("slow_from", [0, 100, 500, 900])
def test_a_slower_machine_gets_fewer_steps_in_the_same_time(slow_from):
    steps, seconds = ends_after([0.1] * slow_from + [0.3], 1000, 100.0, {})
    assert steps == pytest.approx(slow_from + (1000 - slow_from) / 3, rel=0.03)
    assert seconds == pytest.approx(100, rel=0.05)


def test_a_slow_validation_counts_once():
    steps, seconds = ends_after([0.1], 1000, 100.0, {250: 20.0})
    assert steps == pytest.approx(800, rel=0.03)
    assert seconds == pytest.approx(100, rel=0.03)


def test_at_least_one_more_step_follows():
    assert ends_after([1.0], 1000, 3.0, {})[0] <= 5


def test_the_schedule_the_record_and_the_checkpoint_end_with_a_shortened_run(tmp_path, monkeypatch, capsys):
    ticks = itertools.count(100.0)  # a second per step and validation
    monkeypatch.setattr(training_loop, "StepLimit", lambda *keys: StepLimit(*keys, clock=lambda: next(ticks)))
    config = tiny_config(
        tmp_path, trainer__max_steps=40, trainer__log_every_n_steps=1, model__optim__sched={"min_lr": 1e-5}
    )
    result = run_training(config, seconds=19.0)
    assert result.stop_reason is None
    assert 15 <= result.step <= 21
    rows = metric_rows(tmp_path)
    rates = [row["lr"] for row in rows if "lr" in row]
    assert rates[-1] < 0.05 * max(rates)
    assert rates[rates.index(max(rates)) :] == sorted(rates[rates.index(max(rates)) :], reverse=True)
    assert rows[-1]["val_loss"] > 0
    checkpoint = open_checkpoint(tmp_path / "checkpoints" / f"step-{result.step}")
    assert checkpoint.state.optimizer["optim.sched.max_steps"] == result.step
    for path in (tmp_path / "config.resolved.json", checkpoint.path / CONFIG):
        assert json.loads(path.read_text())["trainer"]["max_steps"] == result.step
    assert f"/{result.step}  val loss" in capsys.readouterr().out
    assert "shortened to" in (tmp_path / "run.log").read_text()
