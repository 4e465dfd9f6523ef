"""Runs of the command line that are told to stop at random instants, run out of memory, or fail for good."""

import os
import pty
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from interrupted_runs import Command, arguments, figures, last_step
from tiers import extra, full_only, looped
from tiny_run import final_hashes, tiny_config

import stoker
from stoker.models.gpt import GPT
from stoker.trainer.callbacks.preemption import StopFlag, StopHandler
from stoker.trainer.checkpoint.reader import checkpoint_paths, find_checkpoint, newest_checkpoint
from stoker.trainer.cli.main import main
from stoker.trainer.distributed.process_group import DistributedContext
from stoker.trainer.lightning.lightning_module import LanguageModule
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_TERMINATED
from stoker.trainer.utils.signals import TERMINATION_SIGNALS

ENDLESS = 100_000
OFTEN = ("trainer.val_check_interval=3", "trainer.limit_val_batches=20")  # half of the time is validation


def stopped(tmp_path, number, workers, is_async, seconds, *, everyone, from_start):
    """Send a signal so many seconds after the first handler is there (`from_start`), or the run directory.

    Returns:
        Exit code, stderr, last step, checkpoints.
    """
    directory = tmp_path / f"{number.name}{seconds:.3f}"
    words = arguments(
        directory,
        ENDLESS,
        *OFTEN,
        f"model.data.num_workers={workers}",
        f"exp_manager.checkpoint_callback_params.async_save={is_async}",
    )
    with Command(*words, cwd=tmp_path) as command:
        # SIGTERM has a handler from the start; SIGINT is Python's until the run sets its own, before it has a directory
        assert command.wait_until(
            lambda: command.has_signal_handler(signal.SIGTERM) if from_start else directory.exists()
        )
        time.sleep(seconds)
        (os.killpg if everyone else os.kill)(command.process.pid, number)
        code, error = command.ended()
        assert not command.wait_for_no_process()
    return code, error, last_step(directory), directory / "checkpoints"


@full_only
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, EXIT_TERMINATED), (signal.SIGINT, EXIT_INTERRUPTED)])
@pytest.mark.parametrize("trial", range(10))
def test_a_signal_at_any_instant_leaves_a_checkpoint_of_the_last_step(tmp_path, number, code, trial):
    """Every other one goes to all processes of the run, as schedulers and terminals do it."""
    chance = random.Random(trial)
    workers, is_async, everyone = (0, 2)[trial // 2 % 2], trial % 3 == 0, trial % 2 == 1
    seconds = chance.uniform(0, 1.5) if trial < 3 else chance.uniform(1.5, 6)
    from_start = trial < 3 and number == signal.SIGTERM
    result, error, step, checkpoints = stopped(
        tmp_path, number, workers, is_async, seconds, everyone=everyone, from_start=from_start
    )
    print(f"{number.name} after {seconds:.2f} s, workers {workers}, async {is_async}, everyone {everyone}: step {step}")
    assert result == code, error
    assert error == ""
    newest, complaints = newest_checkpoint(checkpoints)
    assert complaints == []
    assert (newest.state.step if newest else 0) == step
    if checkpoints.exists():
        assert sorted(checkpoints.iterdir()) == sorted(checkpoint_paths(checkpoints))


@full_only
def test_a_run_whose_terminal_is_closed_saves_its_last_step(tmp_path):
    """It writes to the terminal at every step, which is an error from then on."""
    directory, (ours, theirs) = tmp_path / "run", pty.openpty()
    command = [sys.executable, "-m", "stoker", *arguments(directory, ENDLESS)]
    code = f"import fcntl, os, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp({command[0]!r}, {command!r})"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        while last_step(directory) < 3:
            select.select([ours], [], [], 1)
            os.read(ours, 1 << 16)
            assert process.poll() is None
        os.close(ours)
        assert process.wait(600) == EXIT_TERMINATED
    newest, _ = newest_checkpoint(directory / "checkpoints")
    assert newest
    assert newest.state.step == last_step(directory)


@full_only
@pytest.mark.parametrize("number", TERMINATION_SIGNALS)
def test_a_signal_to_all_processes_does_not_take_the_loader_workers_first(tmp_path, number):
    """In a temporary directory whose path is too long for a socket, through which torch would send its tensors."""
    directory, temporary = tmp_path / "run", tmp_path / ("long" * 30)
    temporary.mkdir()
    words = arguments(directory, ENDLESS, "model.data.num_workers=1")
    with Command(*words, cwd=tmp_path, environ={"TMPDIR": str(temporary)}) as command:
        assert command.wait_until(lambda: last_step(directory) >= 3)
        os.killpg(command.process.pid, number)
        code, error = command.ended()
    assert (code, error) == (EXIT_TERMINATED, "")
    assert "another one prepares its batches" not in (directory / "run.log").read_text()
    newest, _ = newest_checkpoint(directory / "checkpoints")
    assert newest
    assert newest.state.step == last_step(directory)


SLOW = """
import time
import stoker
from stoker.trainer.data.datasets.samples import MockSamples

class Slow(MockSamples):
    def batch(self, first, count):
        time.sleep(100_000)

@stoker.register("dataset", "slow")
def samples(data, split, sequence_length, tokenizer, seed):
    return (Slow if split == "validation" else MockSamples)(6, sequence_length, seed, 1000)
"""


@full_only
def test_a_second_ctrl_c_stops_at_once(tmp_path):
    directory = tmp_path / "run"
    (tmp_path / "slow.py").write_text(SLOW)
    words = arguments(directory, ENDLESS, "trainer.val_check_interval=2", "model.data.data_impl=slow")
    with Command(*words, "--import", "slow", cwd=tmp_path) as command:
        assert command.wait_until(lambda: last_step(directory) >= 2)  # a batch that takes minutes begins
        command.process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert command.process.poll() is None
        command.process.send_signal(signal.SIGINT)
        code, _ = command.ended()  # long before the batch
    assert code in (-signal.SIGINT, EXIT_INTERRUPTED)  # a shell says 130 of both


def test_a_sigterm_that_comes_twice_at_once_is_one_and_two_ctrl_c_are_two(monkeypatch):
    killed = []
    monkeypatch.setattr("stoker.trainer.callbacks.preemption.os.kill", lambda pid, number: killed.append(number))
    with StopHandler() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert (stop.reason, killed) == ("SIGTERM", [])
        monkeypatch.setattr("stoker.trainer.callbacks.preemption._ECHO_SECONDS", 0)
        signal.raise_signal(signal.SIGTERM)
        assert killed == [signal.SIGTERM]
    with StopHandler() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert killed == [signal.SIGTERM, signal.SIGINT]


@looped("number", [number for number in TERMINATION_SIGNALS if number != signal.SIGTERM])
def test_an_announced_end_is_no_second_signal(number, monkeypatch):
    """SLURM sends SIGUSR1, then SIGTERM: the run must still be saving, and end at the SIGTERM after that."""
    killed = []
    monkeypatch.setattr("stoker.trainer.callbacks.preemption.os.kill", lambda pid, number: killed.append(number))
    before = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup, which ignores SIGHUP
    with ExitStack() as restored, StopHandler() as stop:
        restored.callback(signal.signal, number, before)
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert (stop.reason, stop.exit_code) == (number.name, EXIT_TERMINATED)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(number)
        assert (stop.reason, killed) == ("SIGTERM", [])
        signal.raise_signal(signal.SIGINT)
        assert killed == [signal.SIGINT]
    with StopHandler() as other_rank:
        assert other_rank.apply_flags(stop.flags) == stop.reason
        assert other_rank.exit_code == stop.exit_code


def test_ignored_signals_and_handlers_of_the_user_are_kept():
    """Under nohup a run outlives its terminal."""
    seen = []
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGUSR1)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, lambda *_: seen.append("own"))
        with StopHandler() as stop:
            stop.install_signal_handlers()
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGUSR1)
            assert (stop.reason, seen) == (None, ["own"])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_run_saves_its_last_step_and_ends_with_143_on_sigusr1(tmp_path, monkeypatch):
    step = LanguageModule.training_step

    def signalled(module, batch, index):
        if module.step == 2:
            signal.raise_signal(signal.SIGUSR1)
        step(module, batch, index)

    monkeypatch.setattr(LanguageModule, "training_step", signalled)
    result = run_training(tiny_config(tmp_path))
    assert (result.exit_code, result.stop_reason, result.step) == (EXIT_TERMINATED, "SIGUSR1", 3)
    assert result.checkpoint == tmp_path / "checkpoints" / "step-3"


EARLY = """
import ctypes, signal, sys
sys.path.insert(0, {root!r})
from stoker.trainer.utils.signals import exit_on_signals
exit_on_signals()
print("ready", flush=True)
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
library.pthread_mutex_lock(mutex)
library.pthread_mutex_lock(mutex)  # waits for ever, and Python calls no handler meanwhile
"""


@looped("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_run_handles_it_ends_with_143(number):
    """Also while the main thread waits inside a library, as for other ranks."""
    code = EARLY.format(root=str(Path(stoker.__path__[0]).parent))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait() == EXIT_TERMINATED


# ---------------------------------------------------------------- within a validation

LONG = {
    "trainer__limit_val_batches": 3,  # global batches, of two micro batches each
    "trainer__num_sanity_val_steps": 0,
    "exp_manager__create_early_stopping_callback": True,
    "exp_manager__early_stopping_callback_params": {"patience": 9},
    "exp_manager__checkpoint_callback_params": {"save_top_k": 1, "save_last": True},
}


@pytest.fixture
def validation(monkeypatch):
    """Counts the micro batches of validations, and sends signals to this process in some of them."""
    real, seen = GPT.loss, []

    def install(signals):
        seen.clear()

        def loss(self, *args, **kwargs):
            if not self.training:
                seen.append(len(seen) + 1)
                if number := signals.get(len(seen)):
                    signal.raise_signal(number)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(GPT, "loss", loss)
        return seen

    return install


@pytest.mark.parametrize(
    ("step", "signals"),
    [
        pytest.param(4, [{2: signal.SIGTERM}], id="in the middle"),
        *extra(
            pytest.param(8, [{7: signal.SIGINT}], id="in the last validation"),
            pytest.param(4, [{1: signal.SIGTERM}, {3: signal.SIGTERM}], id="twice"),
        ),
    ],
)
def test_a_signal_within_a_validation_acts_after_its_batch_and_the_run_is_as_unbroken(
    tmp_path, validation, step, signals
):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    validation({})
    run_training(tiny_config(whole, **LONG))
    for found in signals:
        seen = validation(found)
        result = run_training(tiny_config(broken, **LONG))
        assert seen[-1] == max(found)
        assert (result.step, result.exit_code) == (step, EXIT_INTERRUPTED if step == 8 else EXIT_TERMINATED)
        newest, _ = newest_checkpoint(broken / "checkpoints")
        assert newest
        assert (newest.state.step, newest.state.val_loss, newest.state.loop.validation_due) == (step, None, True)
    validation({})
    result = run_training(tiny_config(broken, **LONG))
    assert (result.step, result.exit_code, result.stop_reason) == (8, 0, None)
    assert figures(whole).items() <= figures(broken).items()  # a process reports its first step too
    assert [path.name for path in checkpoint_paths(broken / "checkpoints")] == [
        path.name for path in checkpoint_paths(whole / "checkpoints")
    ]
    states = [find_checkpoint(path)[0].state for path in (broken, whole)]
    assert states[0] == states[1]
    assert final_hashes(broken, 8) == final_hashes(whole, 8)


def test_a_run_that_is_told_to_stop_does_not_begin_a_validation(tmp_path, validation, monkeypatch):
    seen = validation({})
    real = GPT.loss

    def loss(self, *args, **kwargs):
        if self.training and next(calls) == 7:  # the last micro batch of step 4
            signal.raise_signal(signal.SIGTERM)
        return real(self, *args, **kwargs)

    calls = iter(range(100))
    monkeypatch.setattr(GPT, "loss", loss)
    assert run_training(tiny_config(tmp_path, **LONG)).exit_code == EXIT_TERMINATED
    assert seen == []
    newest, _ = newest_checkpoint(tmp_path / "checkpoints")
    assert newest
    assert newest.state.loop.validation_due


def test_a_limit_on_time_leaves_time_for_the_validation(tmp_path, monkeypatch):
    """Or else a run with a validation longer than its limit would never get beyond it."""
    real, seen = GPT.loss, []

    def loss(self, *args, **kwargs):
        if not self.training:
            seen.append(1)
            monkeypatch.setattr(
                "stoker.trainer.callbacks.preemption.parse_duration", lambda text: 0
            )  # the limit is over
        return real(self, *args, **kwargs)

    monkeypatch.setattr(GPT, "loss", loss)
    result = run_training(tiny_config(tmp_path, trainer__max_time="00:01:00:00", **LONG))
    assert (result.step, result.stop_reason, len(seen)) == (5, "trainer.max_time=00:01:00:00", 6)
    assert (4, "val_loss") in figures(tmp_path)


def test_a_validation_that_was_caught_up_with_is_not_told_twice(tmp_path, validation):
    """Killed after the figures were written, and before the checkpoint was written again."""
    validation({2: signal.SIGTERM})
    run_training(tiny_config(tmp_path, **LONG))
    validation({})
    kept = shutil.copytree(tmp_path / "checkpoints", tmp_path / "kept")
    run_training(tiny_config(tmp_path, **LONG))
    shutil.rmtree(tmp_path / "checkpoints")
    kept.rename(tmp_path / "checkpoints")
    run_training(tiny_config(tmp_path, **LONG))
    assert [key for key in figures(tmp_path) if key[1] == "val_loss"] == [(4, "val_loss"), (8, "val_loss")]


# ---------------------------------------------------------------- memory


NO_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
]
IN_A_STEP, IN_A_SAVE = (
    ("stoker.models.gpt.GPT.loss", "sync"),
    ("stoker.trainer.checkpoint.async_saver.write_checkpoint", "async"),
)


@pytest.mark.parametrize(
    ("where", "how", "error"),
    [
        (*IN_A_STEP, NO_MEMORY[0]),
        (*IN_A_SAVE, NO_MEMORY[0]),
        *extra(*((*where, error) for where in (IN_A_STEP, IN_A_SAVE) for error in NO_MEMORY[1:])),
    ],
)
def test_running_out_of_memory_is_two_lines_and_the_checkpoint_stays(tmp_path, monkeypatch, capsys, error, where, how):
    change = f"exp_manager.checkpoint_callback_params.async_save={how == 'async'}"
    assert main(arguments(tmp_path, 5, change)) == 0

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(where, fail)
    capsys.readouterr()
    assert main(arguments(tmp_path, 10, change)) == EXIT_BAD_INPUT
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert told[0].startswith("out of memory on cpu")
    assert "model.micro_batch_size" in told[1]
    assert newest_checkpoint(tmp_path / "checkpoints")[0]
    assert "out of memory on cpu" in (tmp_path / "run.log").read_text()


def test_a_stop_that_only_another_process_has_seen_before_the_first_step_is_a_stop_here(tmp_path):
    class Other(DistributedContext):
        def all_reduce_flags(self, flags):
            return flags | StopFlag.TERMINATED

    result = run_training(tiny_config(tmp_path), Other())
    assert (result.step, result.stop_reason, result.exit_code) == (0, "SIGTERM", EXIT_TERMINATED)


def test_a_time_limit_that_is_over_before_the_first_step_is_explained(tmp_path):
    config = tiny_config(tmp_path, exp_manager__max_time_per_run="00:00:00:00")
    result = run_training(config)
    assert (result.step, result.exit_code) == (0, 0)
    told = "warning: exp_manager.max_time_per_run=00:00:00:00 elapsed before the first step, and would again"
    assert told in (tmp_path / "run.log").read_text()
