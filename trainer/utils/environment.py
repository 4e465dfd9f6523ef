"""All access to environment variables in the trainer, except NVTE_* (`kernels/attention/flags.py`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from .errors import UserError

CONFIG_FOLDERS_VARIABLE = "STOKER_CONF"
"""Folders of configuration files, separated like PATH, searched after `--config-dir` and `./conf`."""
BENCH_VARIABLE = "STOKER_BENCH"
"""File that `stoker bench` has written, or `none`."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables with settings of torch's device memory allocator."""


def snapshot() -> Mapping[str, str]:
    """Return a read-only copy of the environment."""
    return MappingProxyType(dict(os.environ))


def config_folders(environ: Mapping[str, str]) -> list[Path]:
    """Return the folders listed in `STOKER_CONF`."""
    return [
        user_path(part, CONFIG_FOLDERS_VARIABLE)
        for part in environ.get(CONFIG_FOLDERS_VARIABLE, "").split(os.pathsep)
        if part
    ]


def bench_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of the files of `stoker bench` in the user's configuration folder."""
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "stoker" / "bench"


def user_path(text: str, source: str) -> Path:
    """Parse a path given by the user, expanding `~`.

    Args:
        text: the path.
        source: configuration key or variable it comes from, for error messages.

    Raises:
        UserError: no such home directory, or not a valid path.
    """
    if "\0" in text:
        raise UserError(f"`{source}`: {text!r} is not a path: it contains a null byte")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"`{source}` ({text}): there is no such home directory; write the whole path") from None


def restore_visible_devices(value: str | None) -> None:
    """Set CUDA_VISIBLE_DEVICES, or remove it for None."""
    if value is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = value


def format_variable(value: str | int | float | bool) -> str:
    """Format a value of `env_vars` as an environment variable: true and false become 1 and 0."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def disable_tokenizer_threads() -> None:
    """Disable threads of the tokenizers library, for worker processes that use one core each."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def available_cores() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_rendezvous() -> bool:
    """Return True if torchrun's rendezvous variables are set."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def import_torch_quietly() -> None:
    """Import torch without its C++ warnings, in a process that reports lost connections itself; its children warn."""
    variable = "TORCH_CPP_LOG_LEVEL"
    if variable in os.environ:
        return
    os.environ[variable] = "ERROR"
    import torch  # noqa: F401

    del os.environ[variable]


def share_no_second_store() -> None:
    """Keep torch's rendezvous from opening a second store, on all interfaces, which stoker does not use."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


def worker_environment(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    ranks_per_node: int,
    address: tuple[str, int],
    env_vars: Mapping[str, str | int | float | bool],
) -> dict[str, str]:
    """Build the environment of one rank: the current one, `env_vars` and torchrun's variables.

    OMP_NUM_THREADS is set so that the ranks of a node share its cores, unless the user has set it.
    """
    return {
        "OMP_NUM_THREADS": str(max(1, available_cores() // ranks_per_node)),
        **os.environ,
        **{name: format_variable(value) for name, value in env_vars.items()},
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
    }


def prepare_process(env_vars: Mapping[str, str | int | float | bool] | None = None) -> None:
    """Set environment variables before torch is imported.

    OpenMP threads spin while they wait for work. On busy cores they keep the thread they wait for from running: on two
    busy cores a training step of 33 ms took 450 to 2,500 ms. A shorter spin count (GNU libgomp, which torch uses on
    Linux) costs nothing on idle cores and brings that step to 67 ms. A wait policy or spin count set by the user is
    kept.

    Args:
        env_vars: variables from the configuration.
    """
    set_variables(env_vars or {})
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def set_variables(env_vars: Mapping[str, str | int | float | bool]) -> None:
    """Set the environment variables of the configuration."""
    os.environ.update({name: format_variable(value) for name, value in env_vars.items()})


def enable_expandable_segments() -> None:
    """Enable expandable segments in torch's CUDA allocator, unless the user has set allocator options.

    They reduce fragmentation: with full recompute the 1.2 B model trains 133,120 tokens within 40 GiB instead of
    106,496 (docs/benchmarks.md). Torch reads the setting at the first CUDA allocation, so this is called when the
    device is chosen, after `env_vars` are set. Linux only: Windows builds of torch do not support them.

    NCCL would register the buffers of collectives that a CUDA graph captures as one allocation each, which such
    segments are not: replaying the graph then hangs (pytorch/pytorch#158029). So it is told not to, as by Megatron-LM.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def set_cublas_workspace() -> None:
    """Set the cuBLAS workspace size that makes it deterministic, unless the user has set one."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
