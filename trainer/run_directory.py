"""Where a run writes: its directory, the lock on it, and the record of what it ran with (nemo_semantics 1.2)."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .checkpoint import checkpoint_paths
from .config.run_config import RunConfig
from .config.schema import RootBlock
from .errors import EXIT_IO, UserError

try:
    import fcntl
except ImportError:  # Windows: a run directory is not locked
    fcntl = None

_RECORDED_PACKAGES = (
    "torch",
    "pytorch-lightning",
    "triton",
    "hydra-core",
    "omegaconf",
    "pydantic",
    "safetensors",
    "tokenizers",
    "numpy",
)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of one run.

    Attributes:
        path: holds config.resolved.json, environment.json, metrics.jsonl, run.log and tensorboard/.
        checkpoints: holds the `step-N` directories.
        lock: keeps other processes out for as long as it is open; None where files cannot be locked.
    """

    path: Path
    checkpoints: Path
    lock: int | None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        """Let other processes write here again."""
        if self.lock is not None:
            os.close(self.lock)


def open_run_directory(config: RunConfig, device: torch.device) -> RunDirectory:
    """Choose, create and lock the run directory, and write what the run was started with.

    Raises:
        UserError: it cannot be written (exit code 74), another process trains in it, or it holds checkpoints of another
            run that were not asked for.
    """
    keys = config.root.exp_manager
    try:
        path = _create(config.root)
        lock = _lock(path)
        dirpath = keys.checkpoint_callback_params.dirpath
        checkpoints = Path(dirpath).expanduser().absolute() if dirpath else path / "checkpoints"
        existing = checkpoint_paths(checkpoints)
        if existing and not keys.resume_if_exists:
            raise UserError(
                f"{checkpoints} already holds checkpoints up to {existing[-1].name}; go on from there with "
                "exp_manager.resume_if_exists=True, or write elsewhere with another exp_manager.name or exp_dir"
            )
        config.save(path / "config.resolved.json")
        (path / "environment.json").write_text(json.dumps(describe_environment(device), indent=2) + "\n")
    except OSError as error:
        place = error.filename or keys.explicit_log_dir or keys.exp_dir or "runs"
        raise UserError(
            f"cannot write the run directory {place}: {error.strerror or error}; set exp_manager.exp_dir to a "
            "directory that can be written",
            EXIT_IO,
        ) from error
    return RunDirectory(path, checkpoints, lock)


def _create(root: RootBlock) -> Path:
    keys = root.exp_manager
    if keys.explicit_log_dir:
        path = Path(keys.explicit_log_dir).expanduser().absolute()
        path.mkdir(parents=True, exist_ok=True)
        return path
    parent = Path(keys.exp_dir or "runs").expanduser().absolute() / (keys.name or root.name)
    parent.mkdir(parents=True, exist_ok=True)
    if keys.resume_if_exists:
        return parent
    if keys.version is not None:
        path = parent / (f"version_{keys.version}" if isinstance(keys.version, int) else keys.version)
        path.mkdir(parents=True, exist_ok=True)
        return path
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    number = 0 if keys.use_datetime_version else _next_version(parent)
    while True:
        # Two runs may start in the same second: mkdir decides, and the second one counts up.
        if keys.use_datetime_version:
            path = parent / (stamp if number == 0 else f"{stamp}_{number}")
        else:
            path = parent / f"version_{number}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def _next_version(parent: Path) -> int:
    taken = [int(match[1]) for path in parent.iterdir() if (match := re.fullmatch(r"version_(\d+)", path.name))]
    return max(taken, default=-1) + 1


def _lock(path: Path) -> int | None:
    if fcntl is None:
        return None
    descriptor = os.open(path / "run.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"another process trains in {path}; wait for it, or write elsewhere") from None
    except OSError:
        pass  # a filesystem without locks
    return descriptor


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and source commit: what a result depends on besides the configuration. Holds no secrets."""
    packages: dict[str, str] = {}
    for name in _RECORDED_PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    environment: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "implementation": sys.implementation.name,
        "stoker": stoker_version(),
        "commit": _source_commit(),
        "packages": packages,
        "device": device_name(device),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        environment["capability"] = list(torch.cuda.get_device_capability(device))
        environment["cuda"] = torch.version.cuda
    return environment


def stoker_version() -> str:
    """The installed version, or `unknown` in a bare checkout."""
    try:
        return metadata.version("stoker")
    except metadata.PackageNotFoundError:
        return "unknown"


def device_name(device: torch.device) -> str:
    """The card's name, or the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _source_commit() -> str | None:
    """The commit checked out where this package lies, read from .git; None for an installed package."""
    git = Path(__file__).resolve().parents[1] / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        reference = head.removeprefix("ref: ")
        loose = git / reference
        if loose.is_file():
            return loose.read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[0] for line in packed if line.endswith(f" {reference}")), None)
