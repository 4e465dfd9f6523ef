"""Arithmetic functions for interpolations, as in NeMo.

Further resolvers are functions of installed packages (entry points `stoker.resolvers`) or of modules that were imported
on purpose (`stoker.register("resolver", name)`); no file names one by its module.

NeMo registers `multiply` and `sum`, its launcher `divide_ceil` and `divide_floor`, NeMo-Aligner `int_div`, `subtract`
and `not`.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from .yaml_reader import parse_scalar

Number = int | float
_MAX_RESULT_BITS = 128
"""Of the product of two sizes; Python does not convert integers of thousands of digits to text."""


def _divide(a: Number, b: Number) -> Number:
    """Return the quotient; an integer if it is exact, so that `${divide:4096,32}` can be a size."""
    return a // b if a % b == 0 and isinstance(a, int) and isinstance(b, int) else a / b


def _divide_ceil(a: Number, b: Number) -> Number:
    return int(-(-a // b))


def _divide_floor(a: Number, b: Number) -> Number:
    return int(a // b)


_OF_ANY: Mapping[str, Callable[[tuple[Number, ...]], Number]] = {"multiply": math.prod, "sum": sum, "add": sum}
_OF_TWO: Mapping[str, Callable[[Number, Number], Number]] = {
    "subtract": operator.sub,
    "divide": _divide,
    "int_div": operator.floordiv,
    "divide_floor": _divide_floor,
    "divide_ceil": _divide_ceil,
}


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"`{name}` takes numbers, but was given {reprlib.repr(value)}")
    if isinstance(value, int) and value.bit_length() > 64:
        raise ValueError(f"`{name}` was given a number beyond 64 bits")


def _call(name: str, *values: Any) -> Number:
    if name in _OF_TWO and len(values) != 2:
        raise ValueError(f"`{name}` takes 2 numbers, but was given {len(values)}")
    if not values:
        raise ValueError(f"`{name}` needs at least one number")
    for value in values:
        _check_number(name, value)
    if name not in ("subtract", *_OF_ANY) and values[1] == 0:
        raise ValueError(f"`{name}` cannot divide by zero")
    return _bounded(name, _OF_ANY[name](values) if name in _OF_ANY else _OF_TWO[name](*values))


def _bounded(name: str, result: Number) -> Number:
    if isinstance(result, int) and result.bit_length() > _MAX_RESULT_BITS:
        raise ValueError(f"`{name}` gives a number beyond {_MAX_RESULT_BITS} bits")
    return result


def _int(*values: Any) -> Number:
    """Return a number without its fraction, as Python's `int`; also of its text, such as a value of `oc.env`."""
    if len(values) != 1:
        raise ValueError(f"`int` takes one number, but was given {len(values)}")
    value = parse_scalar(values[0]) if isinstance(values[0], str) else values[0]
    _check_number("int", value)
    return _bounded("int", int(value))


def _not(*values: Any) -> bool:
    if len(values) != 1 or not isinstance(values[0], bool):
        given = ", ".join(map(reprlib.repr, values)) or "nothing"
        raise ValueError(f"`not` takes true or false, but was given {given}")
    return not values[0]


RESOLVERS: Mapping[str, Callable[..., Number]] = MappingProxyType(
    {name: partial(_call, name) for name in (*_OF_ANY, *_OF_TWO)} | {"int": _int, "not": _not}
)
