"""Tiny training run with dropout: its configuration, and a function that interrupts and resumes it."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from stoker.trainer.config.run_config import RunConfig
from stoker.trainer.config.schema.root import RootBlock

STEPS = 40
EAGER_ON_GPU: dict[str, Any] = {
    "trainer__accelerator": "gpu",
    "trainer__precision": "bf16",
    "model__compile": False,
    "model__hidden_size": 128,
    "model__ffn_hidden_size": 256,
    "model__hidden_dropout": 0.0,
    "model__attention_dropout": 0.0,
    "model__encoder_seq_length": 128,
    "model__bias": False,
}
"""Changes of `tiny_document`: a model without dropout of sizes that the kernels take, on a GPU."""


def tiny_document(directory: Path, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a model with about 20,000 parameters and 12 ms per step.

    Args:
        directory: run directory.
        changes: as `block__key=value`.
    """
    document: dict[str, Any] = {
        "name": "tiny",
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 8,
            "val_check_interval": 4,
            "limit_val_batches": 1,
            "log_every_n_steps": 2,
            "enable_model_summary": False,
        },
        "exp_manager": {
            "explicit_log_dir": str(directory),
            "resume_if_exists": True,
            "create_tensorboard_logger": False,
            "create_report": False,
            "checkpoint_callback_params": {},
        },
        "model": {
            "num_layers": 1,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_attention_heads": 2,
            "encoder_seq_length": 16,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "enable_cuda_graph": False,  # tests observe single operations; CUDA graphs have separate tests
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "data": {"data_impl": "mock"},
            "optim": {"lr": 1e-2, "sched": {"max_steps": 100, "warmup_steps": 2}},
        },
    }
    for path, value in changes.items():
        *blocks, key = path.split("__")
        block = document
        for name in blocks:
            block = block.setdefault(name, {})
        block[key] = value
    return document


def write_tiny_sweep(folder: Path, **changes: Any) -> None:
    """Write `tiny_document` as `conf/tiny.yaml`, for a sweep that chooses the run directories."""
    changes |= {"exp_manager__explicit_log_dir": None, "exp_manager__resume_if_exists": False}
    (folder / "conf").mkdir()
    (folder / "conf" / "tiny.yaml").write_text(json.dumps(tiny_document(folder, **changes)))


def tiny_config(directory: Path, **changes: Any) -> RunConfig:
    """Return the validated configuration of `tiny_document`."""
    document = tiny_document(directory, **changes)
    return RunConfig(RootBlock.model_validate(document), document=document)


def final_hashes(directory: Path, step: int) -> dict[str, str]:
    """Return the SHA-256 hashes of weights and optimizer state of a checkpoint."""
    manifest = json.loads((directory / "checkpoints" / f"step-{step}" / "manifest.json").read_text())
    return {name: manifest["files"][name]["sha256"] for name in ("model.safetensors", "optimizer.safetensors")}


def assert_resume_is_exact(directory: Path, steps: int, **changes: Any) -> tuple[Path, Path]:
    """Train at once and in two halves, of which the second resumes: weights and optimizer state must be the same bits.

    Returns:
        Both run directories.
    """
    from stoker.trainer.train import run_training

    whole, halves = directory / "whole", directory / "halves"
    for run, count in ((whole, steps), (halves, steps // 2), (halves, steps)):
        assert run_training(tiny_config(run, **changes | {"trainer__max_steps": count})).step == count
    assert final_hashes(whole, steps) == final_hashes(halves, steps)
    return whole, halves


# ---------------------------------------------------------------- fork, interrupt, wait


def _train(directory: Path, save_every: int, stopped_by: signal.Signals | None) -> int:
    from stoker.trainer.lightning.lightning_module import LanguageModule
    from stoker.trainer.train import train

    step = LanguageModule.training_step

    def interrupting(self: LanguageModule, batch: Any, batch_idx: int) -> None:
        if self.step == 8:  # a signal from outside would find a slow run too early, or a fast one at its end
            os.kill(os.getpid(), stopped_by or 0)
        step(self, batch, batch_idx)

    LanguageModule.training_step = interrupting

    return train(
        tiny_config(
            directory,
            trainer__max_steps=STEPS,
            trainer__val_check_interval=20,
            exp_manager__checkpoint_callback_params={"every_n_train_steps": save_every},
        )
    )


def _forked(directory: Path, save_every: int = 5, stopped_by: signal.Signals | None = None) -> int:
    """Train in a forked child process; return its id."""
    pid = os.fork()
    if pid:
        return pid
    os._exit(_train(directory, save_every, stopped_by))


def _wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _steps_logged(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def interrupted(directory: str, kills: int, seed: int) -> dict[str, Any]:
    """Train uninterrupted, with `kills` SIGKILLs, and stopped by SIGTERM and by SIGINT, resuming each time.

    Must run in a process without threads.

    Args:
        directory: parent of the run directories.
        kills: number of SIGKILLs.
        seed: of the times of the kills.

    Returns:
        Exit codes, checkpoints and final hashes of all runs.
    """
    root, rng = Path(directory), random.Random(seed)
    peace = root / "peace"
    started = time.monotonic()
    assert _wait(_forked(peace)) == 0
    duration = time.monotonic() - started
    result: dict[str, Any] = {"kills": 0, "killed": [], "peace": final_hashes(peace, STEPS)}
    while result["kills"] < kills:
        killed = root / f"killed-{len(result['killed'])}"
        while result["kills"] < kills and not (killed / "checkpoints" / f"step-{STEPS}").exists():
            pid = _forked(killed)
            time.sleep(rng.uniform(0.05, 0.6) * duration)
            os.kill(pid, signal.SIGKILL)
            result["kills"] += _wait(pid) == -signal.SIGKILL
        assert _wait(_forked(killed)) == 0
        result["killed"].append(final_hashes(killed, STEPS))
    for number in (signal.SIGTERM, signal.SIGINT):
        stopped = root / number.name
        result[f"{number.name} exit"] = _wait(_forked(stopped, save_every=50, stopped_by=number))
        result[f"{number.name} saved"] = [p.name for p in sorted((stopped / "checkpoints").iterdir())]
        result[f"{number.name} stopped"] = f"step-{_steps_logged(stopped)}"
        assert _wait(_forked(stopped)) == 0
        result[number.name] = final_hashes(stopped, STEPS)
    return result
