"""Arithmetic functions for interpolations, as in NeMo. No other resolver exists, and none can be registered."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

Number = int | float
_MAX_RESULT_BITS = 128
"""Of the product of two sizes; Python does not convert integers of thousands of digits to text."""


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
            raise ValueError(f"`{name}` takes numbers, but was given {reprlib.repr(value)}")
        if isinstance(value, int) and value.bit_length() > 64:
            raise ValueError(f"`{name}` was given a number beyond 64 bits")
    if name not in ("subtract", *_OF_ANY) and values[1] == 0:
        raise ValueError(f"`{name}` cannot divide by zero")
    result = _OF_ANY[name](values) if name in _OF_ANY else _OF_TWO[name](*values)
    if isinstance(result, int) and result.bit_length() > _MAX_RESULT_BITS:
        raise ValueError(f"`{name}` gives a number beyond {_MAX_RESULT_BITS} bits")
    return result


RESOLVERS: Mapping[str, Callable[..., Number]] = MappingProxyType(
    {name: partial(_call, name) for name in (*_OF_ANY, *_OF_TWO)}
)
