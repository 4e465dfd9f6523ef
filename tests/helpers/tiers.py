"""Tiers of the tests: which cases run in the one that STOKER_TEST_TIER names, `fast` (default), `full` or `gpu`."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import random
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

TIER = os.environ.get("STOKER_TEST_TIER", "fast")
assert TIER in ("fast", "full", "gpu"), f"STOKER_TEST_TIER={TIER}: it is fast, full or gpu"
DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if TIER == "gpu" else [])]

# the same examples in every run, so that no test fails at random
settings.register_profile("stoker", derandomize=True, deadline=None, max_examples=25 if TIER == "fast" else 100)
settings.load_profile("stoker")

T = TypeVar("T")
Test = TypeVar("Test", bound=Callable[..., Any])


def cases(values: Iterable[T], fast: int) -> list[T]:
    """Return all values, in the fast tier a subset of `fast` of them, always the same, in their order."""
    values = list(values)
    if TIER != "fast" or len(values) <= fast:
        return values
    return [values[i] for i in sorted(random.Random(0).sample(range(len(values)), fast))]


def spread(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return all combinations of the values of these axes, in the fast tier few that have each value at least once.

    There the row has a place in the longest axis and digits, its places in the others. A tuple is several parameters.
    """
    lists = [list(axis) for axis in axes]
    rows = list(itertools.product(*lists))
    if TIER == "fast":
        longest = max(range(len(lists)), key=lambda place: len(lists[place]))
        strides, stride = [1] * len(lists), 1
        for place in sorted(set(range(len(lists))) - {longest}, key=lambda place: len(lists[place])):
            strides[place], stride = stride, stride * len(lists[place])
        number = max((len(values) - 1) * each + 1 for values, each in zip(lists, strides, strict=True))
        rows = [
            tuple(values[row // each % len(values)] for values, each in zip(lists, strides, strict=True))
            for row in range(number)
        ]
    return [tuple(itertools.chain(*(each if isinstance(each, tuple) else (each,) for each in row))) for row in rows]


def extra(*values: T) -> tuple[T, ...]:
    """Return values that the fast tier leaves out."""
    return () if TIER == "fast" else values


def full_only(test: Test) -> Test:
    """The outermost decorator of a test that the fast tier does not collect."""
    return None if TIER == "fast" else test  # pyrefly: ignore[bad-return]


def examples(full: int) -> settings:
    """A decorator like `hypothesis.settings(max_examples=full)`; the fast tier makes a quarter of them, at least 10."""
    return settings(max_examples=max(full // 4, min(full, 10)) if TIER == "fast" else full)


def looped(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, but all cases are one test, which fails with every case that fails.

    For cases that take milliseconds and share no fixture: a test of pytest costs more than they do.
    """
    keys = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names
    values = list(values)
    assert values

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(**rest: Any) -> None:
            failures: list[BaseException] = []
            for value in values:
                case = dict(zip(keys, value if len(keys) > 1 else (value,), strict=True))
                try:
                    test(**case, **rest)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"in the case {case}")
                    failures.append(error)
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(values)} cases of {test.__name__}", failures)

        parameters = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=parameters)  # pyrefly: ignore[missing-attribute]
        return run

    return decorate
