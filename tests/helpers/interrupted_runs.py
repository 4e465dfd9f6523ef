"""Helpers for tests that interrupt runs of the command line: tiny arguments, process control, metrics to compare."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIGURES = ("loss", "grad_norm", "lr", "consumed_samples", "val_loss")
_TINY = """
train name=tiny
trainer.accelerator=cpu trainer.val_check_interval=10 trainer.limit_val_batches=1 trainer.log_every_n_steps=1
trainer.enable_model_summary=False
exp_manager.resume_if_exists=True exp_manager.create_tensorboard_logger=False
exp_manager.checkpoint_callback_params.every_n_train_steps=5
model.num_layers=1 model.hidden_size=32 model.ffn_hidden_size=64 model.num_attention_heads=2
model.encoder_seq_length=16 model.hidden_dropout=0.1 model.attention_dropout=0.1 model.global_batch_size=4
model.data.data_impl=mock model.optim.lr=1e-2 model.optim.sched.max_steps=200
"""


def arguments(directory: Path, steps: int, *changes: str, micro_batch: int = 2) -> list[str]:
    """Return the arguments of a `train` with dropout, four samples per step, and a checkpoint every five steps.

    Each of `changes` replaces the argument of the same key, as a key must not be given twice.
    """
    words = [
        *_TINY.split(),
        f"model.micro_batch_size={micro_batch}",
        f"trainer.max_steps={steps}",
        f"exp_manager.explicit_log_dir={directory}",
    ]
    changed = {word.partition("=")[0] for word in changes}
    return [*(word for word in words if word.partition("=")[0] not in changed), *changes]


class Command:
    """Context manager that runs `stoker` in its own session and kills all its remaining processes at exit.

    The processes are found by a mark in their environment.

    Args:
        words: arguments of the command.
        cwd: working directory.
        environ: additional environment variables.
    """

    def __init__(self, *words: str, cwd: Path, environ: dict[str, str] | None = None) -> None:
        self._mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stoker.trainer", *words],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RECOVERY_MARK": self._mark, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def processes(self) -> list[int]:
        """Return the ids of all living processes of this command."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"RECOVERY_MARK={self._mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def has_signal_handler(self, number: signal.Signals) -> bool:
        """Return True if the process has installed a handler for a signal."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return False
        caught = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt")), 0)
        return bool(caught >> (number - 1) & 1)

    def wait_until(self, is_true: Callable[[], bool], seconds: float = 1800) -> bool:
        """Wait for a condition; return False if the process ends first."""
        end = time.monotonic() + seconds
        while not is_true():
            assert time.monotonic() < end, "waited too long"
            if self.process.poll() is not None:
                return False
            time.sleep(0.005)
        return True

    def wait_for_no_process(self, seconds: float = 600) -> list[int]:
        """Wait until all processes have ended; return those left."""
        end = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def ended(self, seconds: float = 1800) -> tuple[int, str]:
        """Wait for the end; return the exit code and stderr."""
        error = self.process.communicate(timeout=seconds)[1]
        return self.process.returncode, error


def lines(directory: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a metrics.jsonl."""
    path = directory / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def last_step(directory: Path) -> int:
    """Return the last logged step."""
    return max((line["step"] for line in lines(directory)), default=0)


def figures(directory: Path) -> dict[tuple[int, str], float]:
    """Map (step, name) to each metric that must be reproduced, checking that it is logged once per step."""
    values: dict[tuple[int, str], float] = {}
    for line in lines(directory):
        for name in FIGURES:
            if name in line:
                assert (line["step"], name) not in values, f"step {line['step']} has two lines with {name}"
                values[line["step"], name] = line[name]
    return values
