"""Environment record of a run for reproducibility: versions, device, source commits, command line. No secrets.

Write-only: stoker never reads it back.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..device.choose_device import device_name
from ..utils.redaction import REDACTED, is_secret, redact, redact_arguments

_PACKAGES = (
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
_VARIABLES = re.compile(
    r"(NVTE|CUDA|CUBLAS|CUDNN|NCCL|GLOO|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|OMP|GOMP|MKL|SLURM|STOKER)_\w+"
)
"""Environment variables that can change results or the placement of processes."""
_GIT_SECONDS = 10


def describe_environment(device: torch.device, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return everything besides the configuration that results depend on, as a JSON object.

    Args:
        device: device of the run.
        environ: environment of the process, of which the relevant variables are recorded; None records none.
    """
    environment: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "implementation": sys.implementation.name,
        "stoker": stoker_version(),
        "commit": head_commit(Path(__file__).resolve().parents[2]),
        "packages": {name: version for name in _PACKAGES if (version := _installed_version(name)) is not None},
        "device": device_name(device),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "command": redact_arguments(sys.argv),
        "project": describe_project(Path.cwd()),
        "variables": {
            name: REDACTED if is_secret(name) else redact(value)
            for name, value in sorted((environ or {}).items())
            if _VARIABLES.fullmatch(name)
        },
    }
    if device.type == "cuda":
        environment["capability"] = list(torch.cuda.get_device_capability(device))
        environment["cuda"] = torch.version.cuda
    return environment


def stoker_version() -> str:
    """Return the installed version, or `unknown` if stoker is not installed."""
    return _installed_version("stoker") or "unknown"


@cache  # reading the metadata of a package takes milliseconds
def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def main_versions() -> dict[str, str]:
    """Return the versions of stoker, torch and Python that a checkpoint records."""
    return {"stoker": stoker_version(), "torch": torch.__version__, "python": platform.python_version()}


def describe_project(directory: Path) -> dict[str, Any]:
    """Describe the user's project.

    Returns:
        `directory`; in a git work tree also `commit` and `changed`, the number of modified tracked files, or None if
        git cannot tell.
    """
    work_tree = next((path for path in (directory, *directory.parents) if (path / ".git").exists()), None)
    if work_tree is None:
        return {"directory": str(directory)}
    return {"directory": str(directory), "commit": head_commit(work_tree), "changed": _changed_files(work_tree)}


def head_commit(work_tree: Path) -> str | None:
    """Return the commit checked out in a git work tree, read from its files; None if there is none."""
    git = work_tree / ".git"
    try:
        if git.is_file():  # a linked work tree or a submodule: `gitdir: PATH`
            git = (work_tree / git.read_text().strip().removeprefix("gitdir: ")).resolve()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        reference = head.removeprefix("ref: ")
        shared = git / "commondir"
        common = (git / shared.read_text().strip()).resolve() if shared.is_file() else git
        if (common / reference).is_file():
            return (common / reference).read_text().strip()
        packed = (common / "packed-refs").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((line.split()[0] for line in packed if line.endswith(f" {reference}")), None)


def _changed_files(work_tree: Path) -> int | None:
    """Count the modified tracked files; None if git is missing, too slow or fails."""
    command = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain", "--untracked-files=no"]
    try:
        result = subprocess.run(
            command, cwd=work_tree, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return len(result.stdout.splitlines()) if result.returncode == 0 else None
