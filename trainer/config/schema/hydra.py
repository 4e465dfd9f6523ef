"""Launchers and sweepers of `stoker train -m`: the keys of `hydra.launcher` and `hydra.sweeper`, with Hydra's names.

`_target_` selects the block from the tables here; it is compared with the names in them, and never imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from ....models.config.key_block import ConfigBlock, NonEmptyText

Count = Annotated[int, Field(ge=1)]
Swept = str | int | float | bool | None
Number = int | float


class BasicLauncher(ConfigBlock):
    """Run the jobs one after another in this process's own launcher."""


class SubmititLauncher(ConfigBlock):
    """Keys of both submitit launchers."""

    submitit_folder: NonEmptyText | None = None
    """Folder of submitit's files and logs; `%j` is the job id. null: `.submitit/%j` in the sweep directory."""
    timeout_min: Count = 60
    """Time limit of a job in minutes."""
    cpus_per_task: Count | None = None
    """CPU cores of a job."""
    gpus_per_node: Annotated[int, Field(ge=0)] | None = None
    """GPUs of a job; null: all of this machine, and on SLURM what the cluster gives."""
    tasks_per_node: Literal[1] = 1
    """One: the job starts its own ranks."""
    mem_gb: Annotated[Number, Field(gt=0)] | None = None
    """Memory of a job in GiB."""
    nodes: Literal[1] = 1
    """One: a job of a sweep runs on one machine."""
    name: NonEmptyText = "stoker"
    """Name of the jobs."""
    setup: list[str] | None = None
    """Shell commands to run in the job before it starts."""
    array_parallelism: Count | None = None
    """Jobs that run at the same time; null: all, and on SLURM 256."""


class LocalLauncher(SubmititLauncher):
    """Processes of this machine."""


class SlurmLauncher(SubmititLauncher):
    """Jobs of SLURM; the keys are those of sbatch."""

    partition: NonEmptyText | None = None
    qos: NonEmptyText | None = None
    comment: NonEmptyText | None = None
    constraint: NonEmptyText | None = None
    exclude: NonEmptyText | None = None
    account: NonEmptyText | None = None
    gres: NonEmptyText | None = None
    cpus_per_gpu: Count | None = None
    gpus_per_task: Count | None = None
    mem_per_gpu: NonEmptyText | None = None
    mem_per_cpu: NonEmptyText | None = None
    signal_delay_s: Count = 120
    """Seconds before the time limit at which the job is told to stop."""
    additional_parameters: dict[str, Swept] = Field(default_factory=dict)
    """Further options of sbatch."""


class BasicSweeper(ConfigBlock):
    """Every combination of the values."""

    params: dict[str, Swept] = Field(default_factory=dict)
    """Values by key, as on the command line, which wins."""


class Sampler(ConfigBlock):
    """Keys of every sampler."""

    seed: Annotated[int, Field(ge=0)] | None = None


class TPESampler(Sampler):
    """Tree-structured Parzen estimator."""

    n_startup_trials: Annotated[int, Field(ge=0)] = 10
    n_ei_candidates: Count = 24
    multivariate: bool = False


class CmaEsSampler(Sampler):
    """Covariance matrix adaptation."""

    sigma0: Annotated[Number, Field(gt=0)] | None = None
    n_startup_trials: Count = 1


class NSGAIISampler(Sampler):
    """Genetic algorithm."""

    population_size: Annotated[int, Field(ge=2)] = 50
    mutation_prob: Annotated[Number, Field(ge=0, le=1)] | None = None
    crossover_prob: Annotated[Number, Field(ge=0, le=1)] = 0.9
    swapping_prob: Annotated[Number, Field(ge=0, le=1)] = 0.5


class RandomSampler(Sampler):
    """Random values."""


class GridSampler(Sampler):
    """Every combination, in random order."""


AnySampler = TPESampler | CmaEsSampler | NSGAIISampler | RandomSampler | GridSampler


class OptunaSweeper(BasicSweeper):
    """Values chosen by Optuna."""

    sampler: AnySampler = TPESampler()
    direction: Literal["minimize", "maximize"] | None = None
    """null: that of exp_manager.checkpoint_callback_params.mode."""
    storage: NonEmptyText | None = None
    """URL of a database, such as sqlite:///sweep.db; null: a journal file in the sweep directory."""
    study_name: NonEmptyText | None = None
    """null: the name of the sweep directory."""
    n_trials: Count = 20
    """Jobs in all, also after a resume."""
    n_jobs: Count | None = None
    """Jobs that are chosen, and with a submitit launcher run, at the same time; null: 2, or 1 without submitit."""
    max_failure_rate: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """Ends the sweep when more than this fraction of the jobs chosen at once fails."""


AnyLauncher = BasicLauncher | LocalLauncher | SlurmLauncher
AnySweeper = BasicSweeper | OptunaSweeper

_SUBMITIT = "hydra_plugins.hydra_submitit_launcher.submitit_launcher"
LAUNCHERS: Mapping[str, type[ConfigBlock]] = {
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher": BasicLauncher,
    f"{_SUBMITIT}.LocalLauncher": LocalLauncher,
    f"{_SUBMITIT}.SlurmLauncher": SlurmLauncher,
}
SWEEPERS: Mapping[str, type[ConfigBlock]] = {
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper": BasicSweeper,
    "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper": OptunaSweeper,
}
SAMPLERS: Mapping[str, type[ConfigBlock]] = {
    f"optuna.samplers.{kind.__name__}": kind
    for kind in (TPESampler, CmaEsSampler, NSGAIISampler, RandomSampler, GridSampler)
}
CHOICES: Mapping[type[ConfigBlock], str] = {
    LocalLauncher: "hydra/launcher=submitit_local",
    SlurmLauncher: "hydra/launcher=submitit_slurm",
    OptunaSweeper: "hydra/sweeper=optuna",
    TPESampler: "hydra/sweeper/sampler=tpe",
    CmaEsSampler: "hydra/sweeper/sampler=cmaes",
    NSGAIISampler: "hydra/sweeper/sampler=nsgaii",
}
"""The override that selects a block with keys of its own."""
REPLACED_CHOICES: Mapping[str, str] = {
    **dict.fromkeys(
        [f"hydra/launcher={name}" for name in ("joblib", "ray", "rq", "submitit")],
        "hydra/launcher=submitit_local with hydra.launcher.array_parallelism=JOBS, or hydra/launcher=submitit_slurm",
    ),
    **dict.fromkeys([f"hydra/sweeper={name}" for name in ("ax", "nevergrad")], "hydra/sweeper=optuna"),
}
"""Choices of Hydra's other plugins, and what stoker has in their place."""
REFUSED: Mapping[str, str] = {
    "hydra.launcher.max_num_timeout": "jobs are not requeued after their time limit: repeat the sweep with "
    "exp_manager.resume_if_exists=True",
    "hydra.launcher.stderr_to_stdout": "both streams of a job are in .submitit/job_N.log; leave it out",
    "hydra.sweeper.search_space": "write hydra.sweeper.params, as since Hydra 1.2",
    "hydra.sweeper.custom_search_space": "it would run code that a file names; write hydra.sweeper.params",
    "hydra.sweeper.max_batch_size": "the jobs of a sweep are composed at once; leave it out",
    **{
        f"hydra.sweeper.sampler.{name}": "Optuna no longer has it; leave it out"
        for name in ("consider_prior", "prior_weight", "consider_magic_clip", "consider_endpoints")
    },
    "hydra.sweeper.sampler.warn_independent_sampling": "it changes no result; leave it out",
    "hydra.sweeper.sampler._partial_": "leave it out",
}
"""Keys of Hydra's plugins that are refused, and why."""
