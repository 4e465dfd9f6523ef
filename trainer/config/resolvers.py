"""Arithmetic functions for interpolations, as in NeMo. No other resolver exists, and none can be registered."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

Number = int | float


def _divide(a: Number, b: Number) -> Number:
    """Return the quotient; an integer if it is exact, so that `${divide:4096,32}` can be a size."""
    return a // b if a % b == 0 and isinstance(a, int) and isinstance(b, int) else a / b


def _divide_ceil(a: Number, b: Number) -> Number:
    return -(-a // b)


_OF_ANY: Mapping[str, Callable[[tuple[Number, ...]], Number]] = {"multiply": math.prod, "sum": sum, "add": sum}
_OF_TWO: Mapping[str, Callable[[Number, Number], Number]] = {
    "subtract": operator.sub,
    "divide": _divide,
    "divide_floor": operator.floordiv,  # this and the next are the NeMo-Launcher's
    "divide_ceil": _divide_ceil,
}


def _call(name: str, *values: Any) -> Number:
    if name in _OF_TWO and len(values) != 2:
        raise ValueError(f"`{name}` takes 2 numbers, but was given {len(values)}")
    if not values:
        raise ValueError(f"`{name}` needs at least one number")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"`{name}` takes numbers, but was given {value!r}")
        if isinstance(value, int) and value.bit_length() > 64:
            raise ValueError(f"`{name}` was given a number beyond 64 bits")
    if name in _OF_ANY:
        return _OF_ANY[name](values)
    if name != "subtract" and values[1] == 0:
        raise ValueError(f"`{name}` cannot divide by zero")
    return _OF_TWO[name](*values)


RESOLVERS: Mapping[str, Callable[..., Number]] = MappingProxyType(
    {name: partial(_call, name) for name in (*_OF_ANY, *_OF_TWO)}
)
