"""The one reader of the process environment in the trainer, but for NVTE_* (`kernels/attention/flags.py`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

CONFIG_FOLDERS = "STOKER_CONF"
"""Folders of configuration files, separated like PATH, searched after `--config-dir` and `./conf`."""


def snapshot() -> Mapping[str, str]:
    """The environment of the caller, as it is now."""
    return MappingProxyType(dict(os.environ))


def config_folders(environ: Mapping[str, str]) -> list[Path]:
    """The folders that `STOKER_CONF` names."""
    return [Path(part).expanduser() for part in environ.get(CONFIG_FOLDERS, "").split(os.pathsep) if part]


def apply_to_this_process(variables: Mapping[str, str]) -> None:
    """Set what `env_vars` asks for, before torch is imported: the launcher's part for a run of one process."""
    os.environ.update(variables)
