"""Expand sweep overrides of `stoker train -m` (Hydra's grammar) into the overrides of each job.

`key=1,2`, `choice(1,2)`, `range(1,4)`, `sort(...)`, `shuffle(...)`, and `group=glob(pattern)`; jobs are the Cartesian
product, the last override changing fastest. Overrides with one value are passed on as typed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override

from ..utils.errors import UserError
from .overrides import OverrideError, duplicate_problem, parse_override
from .problems import ConfigError, Problem

MAX_JOBS = 10_000

Options = Callable[[str], Sequence[str]]
"""Maps a group to its choices; empty if it is not a group."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of a sweep.

    Attributes:
        number: index in the sweep, from 0.
        overrides: all overrides of the job.
        swept: the overrides that vary between jobs.
    """

    number: int
    overrides: tuple[str, ...]
    swept: tuple[str, ...]


def hydra_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide overrides into those of Hydra's own keys and groups, which no job varies, and the others."""
    parts: tuple[list[str], list[str]] = ([], [])
    for typed in overrides:
        parts[not re.match(r"[+~]*hydra[./]", typed)].append(typed)
    return parts


def _parsed(overrides: Sequence[str]) -> Iterator[tuple[str, Override | None]]:
    """Yield each override as typed and parsed; None for an invalid one, which is reported with those of a job."""
    parser = OverridesParser.create()
    for typed in overrides:
        try:
            yield typed, parse_override(parser, typed)
        except OverrideError:
            yield typed, None


def fixed_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that hold in every job."""
    return [typed for typed, override in _parsed(overrides) if override and not override.is_sweep_override()]


def expand_jobs(overrides: Sequence[str], options: Options) -> list[Job]:
    """Return the jobs of a sweep; a single one if no override has several values.

    Raises:
        ConfigError: an override has no finite list of values.
        UserError: more than 10,000 jobs.
    """
    alternatives: list[list[str]] = []
    swept: list[bool] = []
    words_of: dict[str, list[str]] = {}
    varying: set[str] = set()
    problems: list[Problem] = []
    for typed, override in _parsed(overrides):
        is_swept = override is not None and override.is_sweep_override()
        if override is not None:
            key = override.get_key_element().lstrip("+~")
            words_of.setdefault(key, []).append(typed)
            varying |= {key} if is_swept else set()
        try:
            alternatives.append(alternatives_of(override, options) if override is not None and is_swept else [typed])
            swept.append(is_swept)
        except OverrideError as error:
            problems.append(Problem(typed, None, "command line", error.rule, error.fix))
    problems += [duplicate_problem(key, words) for key, words in words_of.items() if key in varying and len(words) > 1]
    if problems:
        raise ConfigError(problems)
    count = math.prod(map(len, alternatives))
    if count > MAX_JOBS:
        raise UserError(f"-m: these overrides make {count:,} jobs; at most {MAX_JOBS:,} are supported")
    return [
        Job(number, combination, tuple(text for text, varies in zip(combination, swept, strict=True) if varies))
        for number, combination in enumerate(itertools.product(*alternatives))
    ]


def first_values(overrides: Sequence[str], options: Options) -> tuple[list[str], list[str]]:
    """Return the overrides of a sweep with the first value of each that varies, and those alone."""
    words, of_jobs = hydra_overrides(overrides)
    swept: list[str] = []
    for typed, override in _parsed(of_jobs):
        if override is not None and override.is_sweep_override():
            value = override.value()
            with contextlib.suppress(OverrideError):  # reported with the other problems of the configuration
                typed = (
                    f"{override.get_key_element()}={value.start}"
                    if isinstance(value, IntervalSweep)
                    else alternatives_of(override, options)[0]
                )
                swept.append(typed)
        words.append(typed)
    return words, swept


def alternatives_of(override: Override, options: Options) -> list[str]:
    """Return a swept override once for each of its values.

    Raises:
        OverrideError: it has none, or they cannot be counted.
    """
    key = override.get_key_element()
    values = override.value()
    if isinstance(values, Glob):
        names = values.filter(list(options(override.key_or_group)))
        if not names:
            raise OverrideError("matches no file", "glob() is for groups of configuration files, such as model")
        return [f"{key}={name}" for name in names]
    if not override.is_discrete_sweep():
        raise OverrideError(
            "is an interval, which a grid sweep does not support",
            f"write {key}=range(...), or values with commas, or choose hydra/sweeper=optuna",
        )
    found = list(itertools.islice(override.sweep_string_iterator(), MAX_JOBS + 1))
    if not found:
        raise OverrideError("has no values", "range(start,stop,step) excludes stop")
    return [f"{key}={value}" for value in found]
