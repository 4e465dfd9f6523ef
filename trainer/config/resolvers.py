"""Arithmetic functions for interpolations, as in NeMo. No other resolver exists, and none can be registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType
from typing import Any

Number = int | float


def _numbers(name: str, values: tuple[Any, ...], count: int | None = None) -> tuple[Number, ...]:
    if count is not None and len(values) != count:
        raise ValueError(f"`{name}` takes {count} numbers, but was given {len(values)}")
    if not values:
        raise ValueError(f"`{name}` needs at least one number")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"`{name}` takes numbers, but was given {value!r}")
        if isinstance(value, int) and value.bit_length() > 64:
            raise ValueError(f"`{name}` was given a number beyond 64 bits")
    return values


def multiply(*values: Any) -> Number:
    """Return the product of all values."""
    return prod(_numbers("multiply", values))


def add(*values: Any) -> Number:
    """Return the sum of all values; NeMo calls it `sum`."""
    return sum(_numbers("sum", values))


def subtract(*values: Any) -> Number:
    """Return the first minus the second value."""
    a, b = _numbers("subtract", values, 2)
    return a - b


def _divisible(name: str, values: tuple[Any, ...]) -> tuple[Number, Number]:
    a, b = _numbers(name, values, 2)
    if b == 0:
        raise ValueError(f"`{name}` cannot divide by zero")
    return a, b


def divide(*values: Any) -> Number:
    """Return the quotient; an integer if it is exact, so that `${divide:4096,32}` can be a size."""
    a, b = _divisible("divide", values)
    return a // b if a % b == 0 and isinstance(a, int) and isinstance(b, int) else a / b


def divide_floor(*values: Any) -> Number:
    """Return the quotient rounded down (NeMo-Launcher)."""
    a, b = _divisible("divide_floor", values)
    return a // b


def divide_ceil(*values: Any) -> Number:
    """Return the quotient rounded up (NeMo-Launcher)."""
    a, b = _divisible("divide_ceil", values)
    return -(-a // b)


RESOLVERS: Mapping[str, Callable[..., Number]] = MappingProxyType(
    {
        "multiply": multiply,
        "sum": add,
        "add": add,
        "subtract": subtract,
        "divide": divide,
        "divide_floor": divide_floor,
        "divide_ceil": divide_ceil,
    }
)
