"""A report that is made while the next step runs equals one that is made at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_sync import forbid_device_sync
from run_metrics import exact_rows
from tiny_run import EAGER_ON_GPU, final_hashes, tiny_config

from stoker.models.gpt import GPT
from stoker.trainer.callbacks import expert_load, train_loop
from stoker.trainer.callbacks.divergence import LossMonitor
from stoker.trainer.callbacks.profiler import PhaseTimer, ProfilerList
from stoker.trainer.callbacks.reporting import StepReporter, ThroughputFactors
from stoker.trainer.checkpoint.loop_state import LoopState
from stoker.trainer.checkpoint.reader import find_checkpoint
from stoker.trainer.lightning.lightning_module import LanguageModule, StepMetrics
from stoker.trainer.loggers.run_logger import RunLogger
from stoker.trainer.loggers.step_report import StepReport
from stoker.trainer.train import run_training
from stoker.trainer.utils import async_host_copy
from stoker.trainer.utils.async_host_copy import AsyncHostCopy, DeviceTimestamp
from stoker.trainer.utils.errors import EXIT_TERMINATED, UserError

EXPERTS: dict[str, Any] = {
    "model__num_moe_experts": 4,
    "model__moe_aux_loss_coeff": 1e-2,
    "model__moe_per_layer_logging": True,
    "exp_manager__checkpoint_callback_params": {"every_n_train_steps": 3, "save_top_k": -1},
}
EVERY_STEP: dict[str, Any] = {"trainer__log_every_n_steps": 1}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_load, "has_matplotlib", lambda: False)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary reports are finished after the next step, whatever the device."""
    monkeypatch.setattr(train_loop, "is_async", lambda device: True)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the steps of a run and the lines of its reports and validations, in their order."""
    found: list[str] = []
    step, report, validation = LanguageModule.training_step, RunLogger.log_step, RunLogger.log_validation

    def stepped(self: LanguageModule, batch: Any, batch_idx: int) -> None:
        step(self, batch, batch_idx)
        found.append(f"step {self.step}")

    def reported(self: RunLogger, figures: StepReport) -> None:
        report(self, figures)
        found.append(f"line {figures.step}")

    def validated(self: RunLogger, number: int, figures: dict[str, float]) -> None:
        validation(self, number, figures)
        found.append(f"validation {number}")

    monkeypatch.setattr(LanguageModule, "training_step", stepped)
    monkeypatch.setattr(RunLogger, "log_step", reported)
    monkeypatch.setattr(RunLogger, "log_validation", validated)
    return found


def states(directory: Path) -> list[LoopState]:
    return [find_checkpoint(path)[0].state.loop for path in sorted((directory / "checkpoints").iterdir())]


def in_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[LanguageModule], Any]) -> None:
    """Do something at the end of a training step."""
    step = LanguageModule.training_step

    def acting(self: LanguageModule, batch: Any, batch_idx: int) -> None:
        step(self, batch, batch_idx)
        if self.step == number:
            act(self)

    monkeypatch.setattr(LanguageModule, "training_step", acting)


# ---------------------------------------------------------------- whole runs, on the CPU as if it ran behind


def test_a_line_comes_after_the_next_step_unless_something_else_is_due(
    tmp_path: Path, told: list[str], late: None
) -> None:
    """The first, step 4 with its validation and the last step are reported at once."""
    run_training(tiny_config(tmp_path, **EVERY_STEP))
    assert told == [
        *("step 1", "line 1", "step 2", "step 3", "line 2"),
        *("step 4", "line 3", "line 4", "validation 4", "step 5", "step 6", "line 5"),
        *("step 7", "line 6", "step 8", "line 7", "line 8", "validation 8"),
    ]


def test_on_a_cpu_every_line_comes_at_once(tmp_path: Path, told: list[str]) -> None:
    run_training(tiny_config(tmp_path, **EVERY_STEP, trainer__max_steps=3, trainer__limit_val_batches=0))
    assert told == ["step 1", "line 1", "step 2", "line 2", "step 3", "line 3"]


def test_figures_and_checkpoints_are_those_of_reports_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With experts, a checkpoint right after a step whose line is not made yet, and a run that is cut there."""
    settings = EXPERTS | {"trainer__max_steps": 6, "trainer__val_check_interval": 6}
    run_training(tiny_config(tmp_path / "at once", **settings))
    monkeypatch.setattr(train_loop, "is_async", lambda device: True)
    run_training(tiny_config(tmp_path / "late", **settings))
    assert exact_rows(tmp_path / "late") == exact_rows(tmp_path / "at once")
    assert states(tmp_path / "late") == states(tmp_path / "at once")
    maps = [(tmp_path / name / "expert_load.json").read_text() for name in ("late", "at once")]
    assert maps[0] == maps[1]
    for steps in (3, 6):
        run_training(tiny_config(tmp_path / "cut", **settings | {"trainer__max_steps": steps}))
    whole, cut = ({(line["step"], *line): line for line in exact_rows(tmp_path / name)} for name in ("late", "cut"))
    assert whole.items() <= cut.items()  # a process reports its first step too
    assert final_hashes(tmp_path / "cut", 6) == final_hashes(tmp_path / "late", 6)


def test_a_stop_in_the_next_step_loses_no_line(
    tmp_path: Path, told: list[str], late: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_step(monkeypatch, 3, lambda module: signal.raise_signal(signal.SIGTERM))
    result = run_training(tiny_config(tmp_path, **EVERY_STEP))
    assert (result.step, result.exit_code) == (3, EXIT_TERMINATED)
    assert told == ["step 1", "line 1", "step 2", "step 3", "line 2", "line 3"]
    assert find_checkpoint(tmp_path)[0].state.loop.recent_losses == tuple(row["loss"] for row in exact_rows(tmp_path))


def test_a_line_is_told_though_the_next_step_fails(
    tmp_path: Path, told: list[str], late: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(module: LanguageModule) -> None:
        raise ZeroDivisionError

    in_step(monkeypatch, 3, fail)
    with pytest.raises(ZeroDivisionError):
        run_training(tiny_config(tmp_path, **EVERY_STEP))
    assert told == ["step 1", "line 1", "step 2", "step 3", "line 2"]


def test_a_stop_without_a_checkpoint_reports_at_once(
    tmp_path: Path, told: list[str], late: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_step(monkeypatch, 3, lambda module: signal.raise_signal(signal.SIGTERM))
    run_training(tiny_config(tmp_path, **EVERY_STEP, exp_manager__create_checkpoint_callback=False))
    assert told[-2:] == ["line 2", "line 3"]


def test_early_stopping_is_told_at_once(tmp_path: Path, told: list[str], late: None) -> None:
    settings = EVERY_STEP | {
        "trainer__limit_val_batches": 0,
        "trainer__val_check_interval": 3,
        "exp_manager__create_checkpoint_callback": False,
        "exp_manager__create_early_stopping_callback": True,
        "exp_manager__early_stopping_callback_params": {"monitor": "loss", "stopping_threshold": 99.0},
    }
    assert run_training(tiny_config(tmp_path, **settings)).step == 3
    assert told == ["step 1", "line 1", "step 2", "step 3", "line 2", "line 3"]


def test_divergence_is_found_one_step_later_and_named_by_its_step(
    tmp_path: Path, told: list[str], late: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = GPT.loss, iter(range(100))

    def loss(self: GPT, *args: Any, **named: Any) -> Any:
        value = real(self, *args, **named)
        return value * float("nan") if self.training and next(calls) == 10 else value  # in step 6

    monkeypatch.setattr(GPT, "loss", loss)
    with pytest.raises(UserError, match="training diverged at step 6: loss nan") as error:
        run_training(tiny_config(tmp_path, **EVERY_STEP, trainer__max_skipped_steps=0))
    assert error.value.lines[1] == f"the last good checkpoint is {tmp_path / 'checkpoints' / 'step-4'}"
    assert told[-2:] == ["line 5", "step 7"]


def test_a_line_that_is_owed_when_training_ends_is_told(
    tmp_path: Path, told: list[str], late: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another callback of Lightning might end it, behind the loop's back."""
    in_step(monkeypatch, 2, lambda module: setattr(module.trainer, "should_stop", True))
    run_training(tiny_config(tmp_path, **EVERY_STEP))
    assert told == ["step 1", "line 1", "step 2", "line 2"]


# ---------------------------------------------------------------- times, on a device that is made up


class Device:
    """A CUDA device and the clock of its host: work takes time on the device, which a wait makes the host see."""

    def __init__(self) -> None:
        self.host = self.busy_until = 0.0
        self.idle = 0.0

    def launch(self, seconds: float) -> None:
        self.idle += max(0.0, self.host - self.busy_until)
        self.busy_until = max(self.busy_until, self.host) + seconds

    def event(self, *, enable_timing: bool = False) -> SimpleNamespace:
        event = SimpleNamespace()
        event.record = lambda stream: setattr(event, "at", max(self.busy_until, self.host))
        event.synchronize = lambda: setattr(self, "host", max(self.host, event.at))
        event.elapsed_time = lambda later: (later.at - event.at) * 1e3
        return event


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made_up = Device()
    cuda = SimpleNamespace(Event=made_up.event, current_stream=lambda device: None)
    monkeypatch.setattr(async_host_copy, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(async_host_copy, "time", SimpleNamespace(perf_counter=lambda: made_up.host))
    return made_up


class Reported:
    """Steps of a made-up device and their reports; writing a line takes the host 2 seconds."""

    def __init__(self, device: Device, observers: ProfilerList | None = None) -> None:
        self.device = device
        self.reports: list[StepReport] = []
        self.observers = observers or ProfilerList([], print)
        self.module: Any = SimpleNamespace(
            step=0, lr=0.0, device=torch.device("cuda", 0), read_metrics_async=self.read_metrics_async
        )
        journal: Any = SimpleNamespace(log_step=self.report, log=print)
        policy = LossMonitor(0, None, LoopState.model_validate({}))
        rates = ThroughputFactors(tokens_per_sample=10, flops_per_token=1.0, peak_flops=None)
        self.step_reports = StepReporter(journal, policy, rates, lambda step: 3 * step, self.observers, None)

    def read_metrics_async(self) -> Callable[[], list[StepMetrics]]:
        sent = self.device.event()
        sent.record(None)

        def values() -> list[StepMetrics]:
            sent.synchronize()
            return [StepMetrics(1.0, 1.0)]

        return values

    def report(self, report: StepReport) -> None:
        self.reports.append(report)
        self.device.host += 2.0

    def step(self, seconds: float, launching: float = 0.5) -> None:
        self.device.launch(seconds)
        self.device.host += launching
        self.module.step += 1

    def seconds(self) -> list[float | None]:
        return [report.step_seconds for report in self.reports]


def test_times_are_of_the_steps_and_the_device_never_rests(device: Device) -> None:
    run = Reported(device)
    run.step(100.0)
    run.step_reports.report(run.module, restart=True)
    device.idle = 0.0
    for seconds in (10.0, 20.0, 30.0, 40.0):
        run.step(seconds)
        run.step_reports.finish()
        run.module.lr = seconds
        run.step_reports.start(run.module, restart=True)
    run.step_reports.finish()
    assert run.seconds() == [None, 10.0, 20.0, 30.0, 40.0]
    assert [report.step for report in run.reports] == [1, 2, 3, 4, 5]
    assert [report.lr for report in run.reports[1:]] == [10.0, 20.0, 30.0, 40.0], "of their own step"
    assert [report.tokens_per_second for report in run.reports[1:]] == [3.0, 1.5, 1.0, 0.75]
    assert device.idle == pytest.approx(2.0), "while the first line, which is told at once, was written"


def test_a_slow_host_is_part_of_the_steps_it_belongs_to(device: Device) -> None:
    """The host takes longer to launch a step than the device to do it, and to write a line too."""
    run = Reported(device)
    run.step(1.0, launching=5.0)
    run.step_reports.report(run.module, restart=True)
    for late in (True, True, False, True, False):
        run.step(1.0, launching=5.0)
        run.step_reports.finish()
        if late:
            run.step_reports.start(run.module, restart=True)
        else:
            run.step_reports.report(run.module, restart=True)
    # Behind the launch of steps 3, 4 and 6 a line was written, and nothing else hides that.
    assert run.seconds() == [None, 5.0, 7.0, 7.0, 5.0, 7.0]


def test_a_profile_that_is_written_before_the_line_is_no_part_of_its_step(device: Device) -> None:
    profiler: Any = SimpleNamespace(overhead_seconds=0.0)
    observers = ProfilerList([], print)
    observers._profilers = [profiler]
    profiler.phase = ProfilerList([], print).phase
    run = Reported(device, observers)
    run.step(100.0)
    run.step_reports.report(run.module, restart=True)
    run.step(10.0)
    run.step_reports.start(run.module, restart=True)
    run.step(20.0)
    device.host = device.busy_until + 1000.0  # it waits for the device, and takes its time
    profiler.overhead_seconds += 1000.0
    run.step_reports.finish()
    run.step_reports.start(run.module, restart=True)
    run.step_reports.finish()
    assert run.seconds() == [None, 10.0, 22.0], (
        "the device, which the profile waited for, rests while line 2 is written"
    )


def test_both_halves_of_a_report_are_in_the_table_of_times(tmp_path: Path, device: Device) -> None:
    times = PhaseTimer(tmp_path, print, clock=lambda: device.host)
    run = Reported(device, ProfilerList([times], print))
    times.on_step_start(1)
    run.step(100.0)
    times.on_step_end(1)
    run.step_reports.report(run.module, restart=True)
    times.on_step_start(2)
    run.step(10.0)
    times.on_step_end(2)
    run.step_reports.start(run.module, restart=True)
    run.step_reports.finish()
    rows = {line[:20].strip(): line[20:].split() for line in times.table(device.host)}
    assert {name: rows[name][0] for name in ("training step", "report", "report begun")} == {
        "training step": "2",
        "report": "2",
        "report begun": "1",
    }
    assert rows["waiting for data"][1] == "0.00"


# ---------------------------------------------------------------- values


def test_a_tensor_may_be_changed_once_its_values_are_taken() -> None:
    tensor = torch.ones(3)
    values = AsyncHostCopy(tensor)
    tensor.zero_()
    assert values.get().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.gpu
def test_values_are_those_of_their_time_and_nothing_later_is_waited_for() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    tensor, end = torch.zeros(3, device=device), torch.cuda.Event()
    early: list[tuple[bool, bool]] = []
    for _ in range(2):  # the first time kernels are loaded and memory is pinned
        start = DeviceTimestamp(device, 0.0)
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        with forbid_device_sync():
            tensor.fill_(1.0)
            values, at = AsyncHostCopy(tensor), DeviceTimestamp(device, 0.0)
            tensor.zero_()
            torch.cuda._sleep(1_000_000_000)
            end.record()
        assert values._copied is not None
        begun_early = not values._copied.query()
        assert values.get().tolist() == [1.0, 1.0, 1.0]
        assert 0.01 < at.seconds_since(start) < 0.5
        early.append((begun_early, not end.query()))
        torch.cuda.synchronize(device)
    assert early[-1] == (True, True)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_report_begins_without_a_wait_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str], settings: dict[str, Any], recorded: bool
) -> None:
    settings = {
        **EVERY_STEP,
        **settings,
        **EAGER_ON_GPU,
        "model__enable_cuda_graph": recorded,
    }
    begin = StepReporter.start

    def watched(self: StepReporter, module: LanguageModule, *, restart: bool) -> None:
        with forbid_device_sync():
            begin(self, module, restart=restart)

    monkeypatch.setattr(StepReporter, "start", watched)
    run_training(tiny_config(tmp_path / "late", **settings))
    assert told.index("step 3") < told.index("line 2") < told.index("step 4")
    monkeypatch.setattr(train_loop, "is_async", lambda device: False)
    run_training(tiny_config(tmp_path / "at once", **settings))
    assert exact_rows(tmp_path / "late") == exact_rows(tmp_path / "at once")
    assert states(tmp_path / "late") == states(tmp_path / "at once")
