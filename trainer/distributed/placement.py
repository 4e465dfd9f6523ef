"""Process placement: who starts the processes, how many, and the rank of this one. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..config.schema.trainer_and_data import TrainerBlock
from ..utils.errors import UserError

_SLURM_RANK, _SLURM_TASKS = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
"""Only srun sets the second: a batch script, which is not a rank, has SLURM_PROCID and SLURM_NTASKS too."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Processes of a run, as seen by this process.

    Attributes:
        rank: rank of this process, if torchrun or srun started one process per device; None if the launcher starts
            them.
        node_rank: number of this node, which orders the nodes; 0 if they have none.
        rendezvous: rendezvous host and port, or None for a single-node run started by the launcher.
    """

    world_size: int
    ranks_per_node: int
    node_rank: int = 0
    num_nodes: int = 1
    rank: int | None = None
    rendezvous: tuple[str, int] | None = None

    @property
    def is_single(self) -> bool:
        """True for a run of one process."""
        return self.world_size == 1

    @property
    def local_rank(self) -> int:
        """Local rank of this process, if `rank` is set."""
        return (self.rank or 0) % self.ranks_per_node


def resolve_placement(trainer: TrainerBlock, environ: Mapping[str, str]) -> Placement:
    """Determine the placement from `trainer.devices`, `trainer.num_nodes` and the variables of torchrun or SLURM.

    Raises:
        UserError: they contradict each other, or there is no rendezvous address.
    """
    per_node = num_local_devices(trainer)
    world = per_node * trainer.num_nodes
    keys = f"`trainer.devices` ({trainer.devices}) on `trainer.num_nodes` ({trainer.num_nodes})"
    started = "RANK" in environ and "WORLD_SIZE" in environ
    if started or (world > 1 and _SLURM_RANK in environ and environ.get(_SLURM_TASKS) == str(world)):
        rank, size = ("RANK", "WORLD_SIZE") if started else (_SLURM_RANK, _SLURM_TASKS)
        if _number(environ, size) != world:
            raise UserError(
                f"{keys} make {world} processes, but {environ[size]} were started ({size}); "
                f"set trainer.devices and trainer.num_nodes to what was started"
            )
        if trainer.max_restarts or trainer.min_nodes not in (None, trainer.num_nodes):
            raise UserError(
                f"`trainer.max_restarts` and `trainer.min_nodes` need processes that stoker starts, but {rank} is set: "
                "start `stoker train` once on each machine, or set trainer.max_restarts=0 trainer.min_nodes=null"
            )
        if world == 1:
            return Placement(1, 1)
        place = _number(environ, rank)
        local = "LOCAL_RANK" if started else "SLURM_LOCALID"
        if local in environ and _number(environ, local) != place % per_node:
            raise UserError(
                f"process {place} ({rank}) is number {environ[local]} of its machine ({local}), but with {per_node} on "
                f"each it must be number {place % per_node}: fill one machine after the other, "
                "with srun --distribution=block"
            )
        return Placement(world, per_node, place // per_node, trainer.num_nodes, place, _address(environ))
    machines = range(trainer.min_nodes or trainer.num_nodes, trainer.num_nodes + 1)
    if world > 1 and environ.get(_SLURM_TASKS) not in (None, "1", *map(str, machines)):
        raise UserError(
            f"{keys} make {world} processes, but srun started {environ[_SLURM_TASKS]} ({_SLURM_TASKS}); start one for "
            "each device, one for each machine, or set trainer.devices to what was started"
        )
    if trainer.num_nodes == 1:
        return Placement(world, per_node)
    if "NODE_RANK" not in environ and "SLURM_NODEID" in environ and _SLURM_TASKS not in environ:
        raise UserError(
            f"`trainer.num_nodes` is {trainer.num_nodes}, and SLURM runs a batch script on the first machine alone; "
            "start stoker with srun in it (scripts/slurm.sh does)"
        )
    name = next((name for name in ("NODE_RANK", "SLURM_NODEID") if name in environ), None)
    node = 0 if name is None else _number(environ, name)
    return Placement(world, per_node, node, trainer.num_nodes, rendezvous=_address(environ))


def torchrun_ranks(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Return rank, number of ranks and local rank of a process that torchrun has started; (0, 1, 0) for another.

    Raises:
        UserError: the variables are not numbers, or there is no rendezvous address.
    """
    if not {"RANK", "WORLD_SIZE"} <= environ.keys() or _number(environ, "WORLD_SIZE") == 1:
        return 0, 1, 0
    _address(environ)
    rank = _number(environ, "RANK")
    return rank, _number(environ, "WORLD_SIZE"), _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank


def num_local_devices(trainer: TrainerBlock) -> int:
    """Return the processes on this node: `trainer.devices`, where `auto` is one per GPU."""
    if trainer.devices != "auto":
        return trainer.devices
    if trainer.accelerator in ("cpu", "mps"):
        return 1
    import torch  # takes seconds, so only if the number is not given

    return max(1, torch.cuda.device_count())


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None or not text.isdecimal():
        raise UserError(f"{name} ({str(text)[:40]}) must be a number; it comes from the environment")
    return int(text)


def _address(environ: Mapping[str, str]) -> tuple[str, int]:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not host or not port or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(
            "MASTER_ADDR and MASTER_PORT must name the first machine and a free port there; "
            "set them (scripts/slurm.sh does)"
        )
    return host, int(port)
