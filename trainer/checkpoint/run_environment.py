"""What a run depends on besides its configuration: versions, device, source commits, command line. No secrets.

Nothing here is read back by a run: it is for the person who asks, a year later, what exactly made these weights.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..utils.redaction import REDACTED, is_secret, without_secrets, words_without_secrets

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
"""Variables that can change what is computed, or say where."""
_GIT_SECONDS = 10


def describe_environment(device: torch.device, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Everything a result depends on besides the configuration, for JSON.

    Args:
        device: where the run computes.
        variables: the environment of the process; what can change the computation is recorded. None records nothing.
    """
    packages: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    environment: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "implementation": sys.implementation.name,
        "stoker": stoker_version(),
        "commit": head_commit(Path(__file__).resolve().parents[2]),
        "packages": packages,
        "device": device_name(device),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "command": words_without_secrets(sys.argv),
        "project": describe_project(Path.cwd()),
        "variables": {
            name: REDACTED if is_secret(name) else without_secrets(value)
            for name, value in sorted((variables or {}).items())
            if _VARIABLES.fullmatch(name)
        },
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


def describe_project(directory: Path) -> dict[str, Any]:
    """The user's project: its directory, and where git keeps it the commit and whether files differ from it.

    Returns:
        `directory`; in a git work tree also `commit` and `changed`, the number of tracked files that are not as
        committed, or None where git cannot tell.
    """
    top = next((path for path in (directory, *directory.parents) if (path / ".git").exists()), None)
    if top is None:
        return {"directory": str(directory)}
    return {"directory": str(directory), "commit": head_commit(top), "changed": _changed_files(top)}


def head_commit(work_tree: Path) -> str | None:
    """The commit checked out in a git work tree, read from its files; None where there is none."""
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
    """Tracked files that differ from the commit; None where git is missing, slow or refuses."""
    command = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain", "--untracked-files=no"]
    try:
        done = subprocess.run(command, cwd=work_tree, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return len(done.stdout.splitlines()) if done.returncode == 0 else None
