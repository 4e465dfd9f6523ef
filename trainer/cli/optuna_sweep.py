"""A sweep whose values Optuna chooses (`hydra/sweeper=optuna`), with the keys of Hydra's Optuna sweeper.

Trial N is job N. Its objective is the best value of the metric that ranks checkpoints
(`exp_manager.checkpoint_callback_params`), as of the checkpoint that is kept. The study is kept in the sweep directory,
unless `hydra.sweeper.storage` names a database, so a sweep that was stopped goes on: jobs that were running are started
again and resume from their checkpoints.

Hydra's plugin itself is not used: it requires optuna 2, instantiates what files name, and needs Hydra's launchers.
"""

from __future__ import annotations

import importlib
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from ..config.overrides import OverrideError, parse_override
from ..config.problems import ConfigError, Problem
from ..config.run_config import HydraSettings, RunConfig
from ..config.schema import hydra as schema
from ..config.schema.exp_manager import canonical_metric_name
from ..config.sweep_overrides import Job, Options, alternatives_of
from ..config.yaml_reader import parse_scalar
from ..utils import environment
from ..utils.durable_files import atomic_write
from ..utils.errors import EXIT_BAD_INPUT, EXIT_OK, UserError
from ..utils.text import one_line, pluralize
from .launch_jobs import SIGNAL_EXIT_CODES, Launch
from .sweep_jobs import LoadJob, job_placement, new_run, print_table
from .sweep_record import (
    Sweep,
    SweepRun,
    job_label,
    job_table,
    mark_finished,
    read_metrics,
)

RESULTS_FILE = "optimization_results.yaml"
STUDY_FILE = "optuna_study.log"
_DIRECTORY = "directory"
"""Attribute of a trial: the sweep directory, so that another sweep with the same study leaves it alone."""

_MODES = {"minimize": "min", "maximize": "max"}
"""`exp_manager.checkpoint_callback_params.mode` of each direction."""

_OF_PROCESSES = ("trainer.devices", "trainer.log_every_n_steps", "model.data.num_workers", "env_vars.")
"""Prefixes of keys that a resumed search may change: with any other the objectives would not be comparable."""

OpenSweep = Callable[[Sequence[Job], LoadJob], Sweep]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Values that one key may have.

    Attributes:
        values: the values as override text; empty for an interval.
        low: of an interval or range of numbers, in which `values` are in order.
        step: of a range; None for an interval.
    """

    values: tuple[str, ...] = ()
    low: int | float | None = None
    high: int | float | None = None
    step: int | float | None = None
    is_log: bool = False

    def end(self, place: int) -> str:
        """Return the first (0) or last (-1) value, as override text."""
        return self.values[place] if self.values else repr((self.low, self.high)[place])

    def distribution(self, optuna: Any) -> Any:
        """Return Optuna's distribution."""
        if self.low is None or self.high is None:
            return optuna.distributions.CategoricalDistribution(self.values)
        kinds = (self.low, self.high, self.step or 0)
        if all(isinstance(number, int) for number in kinds):
            return optuna.distributions.IntDistribution(self.low, self.high, log=self.is_log, step=self.step or 1)
        return optuna.distributions.FloatDistribution(self.low, self.high, log=self.is_log, step=self.step)


class Search:
    """A search over the swept overrides.

    Args:
        settings: `hydra:`, with an `OptunaSweeper`.
        overrides: all overrides but those of `hydra`; swept ones span the search space.

    Raises:
        ConfigError: an override cannot be searched.
        UserError: optuna is not installed, or nothing varies.
    """

    def __init__(self, settings: HydraSettings, overrides: Sequence[str], options: Options) -> None:
        self._optuna = _import_optuna()
        assert isinstance(settings.sweeper, schema.OptunaSweeper)
        self._keys = settings.sweeper
        self._is_parallel = isinstance(settings.launcher, schema.SubmititLauncher)
        self._fixed: list[str] = []
        self._space: dict[str, Parameter] = {}
        problems: list[Problem] = []
        parser = OverridesParser.create()
        for typed in overrides:
            try:
                override = parse_override(parser, typed)
                if not override.is_sweep_override():
                    self._fixed.append(typed)
                    self._space.pop(override.get_key_element().lstrip("+"), None)
                    continue
                self._space[override.get_key_element().lstrip("+")] = _parameter(override, options)
            except OverrideError as error:
                problems.append(Problem(typed, None, "command line or hydra.sweeper.params", error.rule, error.fix))
        if problems:
            raise ConfigError(problems)
        if not self._space:
            raise UserError(
                "hydra/sweeper=optuna has nothing to search: give hydra.sweeper.params, or overrides such as "
                "'model.optim.lr=interval(1e-4,1e-2)'"
            )

        endless = [name for name, parameter in self._space.items() if not parameter.values]
        if isinstance(self._keys.sampler, schema.GridSampler) and endless:
            raise UserError(f"`{endless[0]}` is an interval, which has no grid; write range() or choice()")

    def run(self, open_sweep: OpenSweep, load: LoadJob, launch: Launch, log: Callable[[str], None]) -> int:
        """Train the jobs; return 0 if one succeeded, else the exit code of the first, or that of a signal.

        Raises:
            UserError: the configuration is invalid (nothing has been started then), or the sweep directory or the study
                cannot be used.
        """
        ends = [
            self._job(number, {name: parameter.end(-number) for name, parameter in self._space.items()})
            for number in range(min(2, self._keys.n_trials))
        ]
        config = load(ends[0])
        direction = self._direction(config)
        sweep = open_sweep(ends, load)
        known = {row.get("number"): row for row in sweep.recorded_jobs() or ()}
        study = self._open_study(sweep, direction)
        sweep.runs, sweep.total = [], self._keys.n_trials
        if isinstance(self._keys.sampler, schema.GridSampler):
            sweep.total = min(sweep.total, math.prod(len(parameter.values) for parameter in self._space.values()))
        stopped = self._run_trials(study, sweep, known, load, launch, log)
        sweep.record()
        if stopped == EXIT_OK:
            return self._report(study, sweep, config)
        print_table(sweep, stopped=stopped in SIGNAL_EXIT_CODES)
        return stopped

    def _direction(self, config: RunConfig) -> str:
        """Return the direction, which must agree with what ranks the checkpoints.

        Raises:
            UserError: it does not.
        """
        keys = config.root.exp_manager.checkpoint_callback_params
        ranked = next(name for name, mode in _MODES.items() if mode == keys.mode)
        asked = self._keys.direction
        if asked not in (None, ranked):
            raise UserError(
                f"hydra.sweeper.direction={asked} contradicts exp_manager.checkpoint_callback_params.mode={keys.mode}, "
                f"by which `{keys.monitor}` ranks the checkpoints; leave the direction out, or set the mode to "
                f"{_MODES.get(asked or '', 'min')}"
            )
        return ranked

    def _open_study(self, sweep: Sweep, direction: str) -> Any:
        optuna = self._optuna
        url = self._keys.storage
        try:
            if url is None:
                backend = optuna.storages.journal.JournalFileBackend(str(sweep.directory / STUDY_FILE))
                storage = optuna.storages.JournalStorage(backend)
            else:
                storage = optuna.storages.get_storage(url)
            name = self._keys.study_name or sweep.directory.name
            study = optuna.create_study(study_name=name, storage=storage, direction=direction, load_if_exists=True)
            study.sampler = self._sampler(len(study.get_trials(deepcopy=False)))
        except Exception as error:  # of any database driver
            raise UserError(
                f"hydra.sweeper.storage ({url or STUDY_FILE}): cannot open the study: {one_line(error)}"
            ) from None
        if study.direction.name.lower() != direction:
            raise UserError(
                f"the study `{name}` in {url or sweep.directory} was to {study.direction.name.lower()}, and "
                f"exp_manager.checkpoint_callback_params.mode={_MODES[direction]} is to {direction}; set the mode to "
                f"{_MODES[study.direction.name.lower()]}, or write elsewhere with another {sweep.elsewhere}"
            )
        return study

    def _check_same_space(self, study: Any, sweep: Sweep) -> None:
        """Check that the trials of a sweep have been chosen from what is searched now.

        Raises:
            UserError: they have not, or others of the study have kinds of values that Optuna cannot mix with these.
        """
        space = {name: item.distribution(self._optuna) for name, item in self._space.items()}
        for trial in study.get_trials(deepcopy=False):
            is_own = trial.user_attrs.get(_DIRECTORY) == str(sweep.directory)
            for name in {**trial.distributions, **space} if is_own else trial.distributions.keys() & space.keys():
                before, now = trial.distributions.get(name), space.get(name)
                mixes = not is_own and type(before) is type(now) and isinstance(now, _numbers(self._optuna))
                if before != now and not mixes:
                    raise UserError(
                        f"the study `{study.study_name}` has searched another space: `{name}` in {_domain(before)}, "
                        f"now {_domain(now)}; repeat its overrides to resume it, or write elsewhere with another "
                        f"{sweep.elsewhere}" + ("" if self._keys.storage is None else " and hydra.sweeper.study_name")
                    )

    def _sampler(self, num_trials: int) -> Any:
        """Return the sampler; after a resume it draws other values than at the start."""
        keys = self._keys.sampler
        options = {name: value for name, value in keys.model_dump().items() if value is not None}
        if "seed" in options:
            options["seed"] += num_trials
        if isinstance(keys, schema.GridSampler):
            if keys.seed is not None:
                options["seed"] = keys.seed
            options["search_space"] = {
                name: [_as_sampled(parameter, text) for text in parameter.values]
                for name, parameter in self._space.items()
            }
        return getattr(self._optuna.samplers, type(keys).__name__)(**options)

    def _run_trials(
        self,
        study: Any,
        sweep: Sweep,
        known: Mapping[Any, dict[str, Any]],
        load: LoadJob,
        launch: Launch,
        log: Callable[[str], None],
    ) -> int:
        """Run trials until there are enough; return the exit code of a signal, or of a sweep that fails too often.

        `known` are the recorded jobs by number.
        """
        state = self._optuna.trial.TrialState
        pending: list[int] = []
        self._check_same_space(study, sweep)
        for trial in study.get_trials(deepcopy=False):
            if trial.user_attrs.get(_DIRECTORY) != str(sweep.directory):
                continue
            try:
                self._add_run(sweep, trial, load)
            except UserError:  # reported when it was chosen
                sweep.total -= 1
                continue
            run, row = sweep.runs[-1], known.get(trial.number, {})
            if trial.state == state.RUNNING:
                sweep.runs[-1] = mark_finished(run, row)
                pending.append(len(sweep.runs) - 1)
            else:
                sweep.runs[-1] = replace(run, exit_code=row.get("exit_code"), metrics=read_metrics(run))
        sweep.check_same_configurations(sweep.runs, _OF_PROCESSES)
        for place, run in enumerate(sweep.runs):
            if place not in pending:
                print(f"job {run.job.number}: {job_label(run.job)}: already finished", flush=True)
        at_once = self._keys.n_jobs or (2 if self._is_parallel else 1)
        while pending or len(sweep.runs) < sweep.total:
            failed: dict[int, str] = {}
            while len(pending) < at_once and len(sweep.runs) < sweep.total:
                trial = study.ask({name: item.distribution(self._optuna) for name, item in self._space.items()})
                trial.set_user_attr(_DIRECTORY, str(sweep.directory))
                try:
                    self._add_run(sweep, trial, load)
                except UserError as error:
                    failed[trial.number] = error.lines[0]
                    sweep.total -= 1
                    log("\n".join([f"job {trial.number} is not valid:", *error.lines]))
                    self._tell(study, trial.number, None)
                    continue
                pending.append(len(sweep.runs) - 1)
            sweep.record()
            stopped = launch(sweep, pending)
            if stopped:
                return stopped
            codes = []
            for place in pending:
                run = sweep.runs[place]
                value, reason = _objective(run)
                if reason:
                    log(f"job {run.job.number} is a failed trial: {reason}")
                    codes.append(run.exit_code or EXIT_BAD_INPUT)
                self._tell(study, run.job.number, value)
            rate = (len(codes) + len(failed)) / max(1, len(pending) + len(failed))
            if rate > self._keys.max_failure_rate:
                log(f"{rate:.0%} of the jobs failed, more than hydra.sweeper.max_failure_rate; the sweep ends")
                return next(iter(codes), EXIT_BAD_INPUT)
            pending = []
        return EXIT_OK

    def _tell(self, study: Any, number: int, value: float | None) -> None:
        state = self._optuna.trial.TrialState
        try:
            study.tell(number, value, state=state.FAIL if value is None else state.COMPLETE)
        except RuntimeError as error:  # GridSampler, after the last point, ends a loop of Optuna's that there is not
            if "Study.stop" not in str(error):
                raise

    def _add_run(self, sweep: Sweep, trial: Any, load: LoadJob) -> None:
        job = self._job(trial.number, {name: _as_text(value) for name, value in trial.params.items()})
        config = load(job)
        run = new_run(sweep.directory, job, config, job_placement(config, environment.snapshot()))
        if any(other.directory == run.directory for other in sweep.runs):
            raise UserError("hydra.sweep.subdir gives several jobs one directory; put ${hydra.job.num} into it")
        sweep.runs.append(run)

    def _job(self, number: int, chosen: Mapping[str, str]) -> Job:
        swept = tuple(f"{name}={text}" for name, text in chosen.items())
        return Job(number, (*self._fixed, *swept), swept)

    def _report(self, study: Any, sweep: Sweep, config: RunConfig) -> int:
        """Print the table and the best job, and write them as Hydra's sweeper does."""
        lines = ["", *job_table(sweep.runs, sweep.directory)]
        try:
            best = study.best_trial
        except ValueError:
            print("\n".join([*lines, f"no job succeeded, of {len(sweep.runs)} in {sweep.directory}"]), flush=True)
            return next((run.exit_code for run in sweep.runs if run.exit_code), EXIT_BAD_INPUT)
        params = {name: parse_scalar(_as_text(value)) for name, value in best.params.items()}
        results = {"name": "optuna", "best_params": params, "best_value": best.value}
        atomic_write(sweep.directory / RESULTS_FILE, yaml.safe_dump(results, sort_keys=False).encode())
        metric = canonical_metric_name(config.root.exp_manager.checkpoint_callback_params.monitor)
        shown = " ".join(f"{name}={_as_text(value)}" for name, value in best.params.items())
        lines.append(f"best: job {best.number}, {metric} {best.value:.4f}: {shown}")
        print("\n".join([*lines, f"{pluralize(len(sweep.runs), 'job')} in {sweep.directory}"]), flush=True)
        return EXIT_OK


def _import_optuna() -> Any:
    try:
        optuna: Any = importlib.import_module("optuna")
        importlib.import_module("optuna.storages.journal")
    except ImportError:
        raise UserError("hydra/sweeper=optuna needs optuna 4 or newer: pip install 'stoker[sweep]'") from None
    optuna.logging.set_verbosity(logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def _objective(run: SweepRun) -> tuple[float | None, str]:
    """Return the best value of the metric that ranks checkpoints; or None and the reason."""
    if run.exit_code != EXIT_OK:
        return None, run.error or f"exit code {run.exit_code}"
    monitor = run.config.root.exp_manager.checkpoint_callback_params.monitor
    figures = run.metrics or {}
    value = figures.get("best")
    if figures.get("metric") != canonical_metric_name(monitor) or value is None:
        return None, (
            f"`{monitor}` was not measured; set trainer.val_check_interval to no more than trainer.max_steps, or "
            "exp_manager.checkpoint_callback_params.monitor to a metric of the run"
        )
    return (value, "") if math.isfinite(value) else (None, f"`{monitor}` is {value}")


def _parameter(override: Override, options: Options) -> Parameter:
    """Return what a swept override may be.

    Raises:
        OverrideError: it has no values.
    """
    value = override.value()
    if isinstance(value, IntervalSweep):
        low, high = value.start, value.end
        if low is None or high is None or low > high or ("log" in value.tags and low <= 0):
            raise OverrideError("is not an interval", "write interval(LOW,HIGH), with LOW above 0 for tag(log, ...)")
        return Parameter(low=low, high=high, is_log="log" in value.tags)
    texts = tuple(text.partition("=")[2] for text in alternatives_of(override, options))
    if isinstance(value, RangeSweep) and not value.shuffle:
        numbers = sorted(map(parse_scalar, texts))
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        if isinstance(step, float) and value.step:
            step = abs(float(value.step))
        return Parameter(texts, numbers[0], numbers[-1], step)
    return Parameter(tuple(dict.fromkeys(texts)))


def _numbers(optuna: Any) -> tuple[type, ...]:
    """Return the distributions whose bounds Optuna lets trials of one study differ in."""
    return optuna.distributions.IntDistribution, optuna.distributions.FloatDistribution


def _domain(distribution: Any) -> str:
    """Return what a distribution holds, for messages."""
    if distribution is None:
        return "nothing"
    if hasattr(distribution, "choices"):
        return f"{{{', '.join(map(str, distribution.choices))}}}"
    step = f" in steps of {distribution.step}" if distribution.step not in (None, 1) else ""
    return f"[{distribution.low}, {distribution.high}]{step}" + (", logarithmic" if distribution.log else "")


def _as_sampled(parameter: Parameter, text: str) -> Any:
    return text if parameter.low is None else parse_scalar(text)


def _as_text(value: Any) -> str:
    """Return a sampled value as the text of an override; choices are text already."""
    return value if isinstance(value, str) else repr(value)
