"""The jobs of `stoker train -m`: overrides with several values, in Hydra's grammar, to the overrides of each job.

`key=1,2`, `choice(1,2)`, `range(1,4)`, `sort(...)`, `shuffle(...)`, and `group=glob(pattern)`; jobs are the cartesian
product, the last override changing fastest. What has one value is passed on as typed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override

from ..utils.errors import UserError
from .duplicate_overrides import given_twice
from .overrides import UnreadableError, parse_one
from .problems import ConfigError, Problem

MAX_JOBS = 10_000

Options = Callable[[str], Sequence[str]]
"""The choices of a group; empty for what is no group."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of a sweep.

    Attributes:
        number: its place in the sweep, from 0.
        overrides: everything it is started with.
        swept: those of them that differ from job to job.
    """

    number: int
    overrides: tuple[str, ...]
    swept: tuple[str, ...]


def jobs_of(overrides: Sequence[str], options: Options) -> list[Job]:
    """The jobs that overrides make; a single one where nothing has several values.

    Raises:
        ConfigError: values that cannot be counted out.
        UserError: more than 10,000 jobs.
    """
    parser = OverridesParser.create()
    alternatives: list[list[str]] = []
    swept: list[bool] = []
    words_of: dict[str, list[str]] = {}
    varying: set[str] = set()
    problems: list[Problem] = []
    for typed in overrides:
        try:
            override = parse_one(parser, typed)
        except UnreadableError:
            override = None  # it is reported with everything else that is wrong with the configuration
        is_swept = override is not None and override.is_sweep_override()
        if override is not None:
            key = override.get_key_element().lstrip("+~")
            words_of.setdefault(key, []).append(typed)
            varying |= {key} if is_swept else set()
        try:
            alternatives.append(_values(override, options) if override is not None and is_swept else [typed])
            swept.append(is_swept)
        except UnreadableError as error:
            problems.append(Problem(typed, None, "command line", error.rule, error.fix))
    problems += [given_twice(key, words) for key, words in words_of.items() if key in varying and len(words) > 1]
    if problems:
        raise ConfigError(problems)
    count = math.prod(map(len, alternatives))
    if count > MAX_JOBS:
        raise UserError(f"-m: these overrides make {count:,} jobs, and at most {MAX_JOBS:,} are possible")
    return [
        Job(number, combination, tuple(text for text, varies in zip(combination, swept, strict=True) if varies))
        for number, combination in enumerate(itertools.product(*alternatives))
    ]


def _values(override: Override, options: Options) -> list[str]:
    key = override.get_key_element()
    values = override.value()
    if isinstance(values, Glob):
        names = values.filter(list(options(override.key_or_group)))
        if not names:
            raise UnreadableError("matches no file", "glob() is for groups of configuration files, such as model")
        return [f"{key}={name}" for name in names]
    if not override.is_discrete_sweep():
        raise UnreadableError(
            "is an interval, whose values only a search could choose", f"write {key}=range(...), or values with commas"
        )
    found = list(itertools.islice(override.sweep_string_iterator(), MAX_JOBS + 1))
    if not found:
        raise UnreadableError("has no values", "the stop of range(start,stop,step) is not part of it")
    return [f"{key}={value}" for value in found]
