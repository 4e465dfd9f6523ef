"""The one reader of the process environment in the trainer, but for NVTE_* (`kernels/attention/flags.py`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from .errors import UserError

CONFIG_FOLDERS = "STOKER_CONF"
"""Folders of configuration files, separated like PATH, searched after `--config-dir` and `./conf`."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""What torch reads settings of its allocator of device memory from."""


def snapshot() -> Mapping[str, str]:
    """The environment of the caller, as it is now."""
    return MappingProxyType(dict(os.environ))


def config_folders(environ: Mapping[str, str]) -> list[Path]:
    """The folders that `STOKER_CONF` names."""
    return [user_path(part, CONFIG_FOLDERS) for part in environ.get(CONFIG_FOLDERS, "").split(os.pathsep) if part]


def user_path(text: str, named_by: str) -> Path:
    """A path as a user writes it, `~` read as in a shell.

    Args:
        text: the path.
        named_by: the key or variable that gave it, for the message.

    Raises:
        UserError: no such home directory, or no path at all.
    """
    if "\0" in text:
        raise UserError(f"`{named_by}`: {text!r} is no path: it holds a null byte")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"`{named_by}` ({text}): there is no such home directory; write the whole path") from None


def environment_text(value: str | int | float | bool) -> str:
    """A value of `env_vars` as the environment holds it: true and false are 1 and 0."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def use_one_core() -> None:
    """Keep the tokenizers library from starting threads: several processes each take a core already."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_rendezvous() -> bool:
    """Whether torchrun's variables are set, with which torch finds the other processes by itself."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def worker_environment(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    per_node: int,
    address: tuple[str, int],
    env_vars: Mapping[str, str | int | float | bool],
) -> dict[str, str]:
    """The environment of one rank: the caller's, `env_vars`, and what libraries that know torchrun's variables expect.

    The cores of the machine are shared by its ranks; a thread count of the caller's own is kept.
    """
    return {
        "OMP_NUM_THREADS": str(max(1, available_cores() // per_node)),
        **os.environ,
        **{name: environment_text(value) for name, value in env_vars.items()},
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
    }


def prepare_process(env_vars: Mapping[str, str | int | float | bool] | None = None) -> None:
    """Set up this process before torch is imported: the launcher's part for a run of one process.

    OpenMP threads that wait for work spin. On a machine whose cores have other work too they keep the thread they wait
    for from running: on two busy cores a training step of 33 ms took 450 to 2,500 ms. A shorter spin (GNU's libgomp,
    which torch uses on Linux) costs nothing on idle cores and brings that step to 67 ms; it is left to the caller who
    has set a wait policy or a spin count.

    Args:
        env_vars: the variables that the configuration asks for.
    """
    set_variables(env_vars or {})
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def set_variables(env_vars: Mapping[str, str | int | float | bool]) -> None:
    """Set the variables that the configuration asks for."""
    os.environ.update({name: environment_text(value) for name, value in env_vars.items()})


def let_segments_grow() -> None:
    """Have torch's allocator take device memory in segments that grow, unless the caller has settings for it.

    Segments of a fixed size leave gaps that are of no use to a tensor larger than they are: with all layers recomputed
    the 1.2 B trains 133,120 tokens within 40 GiB instead of 106,496 (docs/benchmarks.md). Torch reads the settings with
    the first tensor on a device, so this comes where a device is chosen, when `env_vars` are set. Not on Windows, where
    torch has no such segments.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def make_cublas_deterministic() -> None:
    """Give cuBLAS the workspace with which it repeats its results; a setting of the caller's own is kept."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
