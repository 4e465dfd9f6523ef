"""Components of users' own code, by kind and name: registered in Python, or entry points of installed packages.

A configuration selects them by name, as it does built-in ones, so it can only run code that was installed, or imported,
on purpose. A package provides an activation, for example, in its pyproject.toml:

    [project.entry-points."stoker.activations"]
    my_activation = "my_package.layers:my_activation"

Without a package, a module given with `--import` (or a Python script) has the same effect with

    @stoker.register("activation", "my_activation")
    def my_activation(inputs): ...

Listing names imports nothing; a component is imported when it is needed.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, get_args

Kind = Literal[
    "activation",
    "attention_bias",
    "block",
    "callback",
    "dataset",
    "logger",
    "loss",
    "metric",
    "optimizer",
    "resolver",
    "schedule",
    "tokenizer",
    "weight_map",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

ComponentT = TypeVar("ComponentT", bound=Callable[..., Any])

_PLURALS: Mapping[Kind, str] = {"attention_bias": "attention_biases", "loss": "losses"}
_registered: dict[Kind, dict[str, Any]] = {kind: {} for kind in KINDS}


def entry_point_group(kind: Kind) -> str:
    """Return the entry-point group of a kind, such as `stoker.activations`."""
    return f"stoker.{_PLURALS.get(kind, f'{kind}s')}"


@cache
def _entry_points(kind: Kind) -> Mapping[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=entry_point_group(kind))}


def extension_names(kind: Kind) -> tuple[str, ...]:
    """Return the names of all components of a kind, sorted, without importing them."""
    return tuple(sorted({*_entry_points(kind), *_registered[kind]}))


def register(kind: Kind, name: str) -> Callable[[ComponentT], ComponentT]:
    """Return a decorator that registers a function or class as the component `name` of a kind.

    Registering the same object again, as a module that is reloaded does, replaces it.

    Raises:
        ValueError: the kind is unknown, the name is empty or belongs to an entry point, or (from the decorator) to
            another component.
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` ({kind!r}) must be one of {', '.join(KINDS)}.")
    if not name:
        raise ValueError("`name` must not be empty.")
    if name in _entry_points(kind):
        raise ValueError(f"the {kind} {name!r} is already provided by {_entry_points(kind)[name].value}; use another.")

    def add(component: ComponentT) -> ComponentT:
        known = _registered[kind].get(name)
        if known is not None and _place(known) != _place(component):
            raise ValueError(f"the {kind} {name!r} is already provided by {_place(known)}; use another name.")
        _registered[kind][name] = component
        return component

    return add


def load_extension(kind: Kind, name: str) -> Any:
    """Return the component of a name, importing it if it is an entry point.

    Raises:
        LookupError: there is none of this name.
        ValueError: it cannot be imported.
    """
    if name in _registered[kind]:
        return _registered[kind][name]
    point = _entry_points(kind).get(name)
    if point is None:
        raise LookupError(f"no {kind} {name!r} is installed or registered")
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the {kind} {name!r} ({point.value}) cannot be imported: {error}") from None


def extension_source(kind: Kind, name: str) -> str:
    """Return the module and name of a component, and the version of its package if it is an entry point: for records.

    Raises:
        LookupError: there is none of this name.
    """
    if name in _registered[kind]:
        return _place(_registered[kind][name])
    point = _entry_points(kind).get(name)
    if point is None:
        raise LookupError(f"no {kind} {name!r} is installed or registered")
    return f"{point.value} {point.dist.version}" if point.dist else point.value


class ExtensionError(ValueError):
    """A component of a user's own does not do what its kind must."""


def extension_frame(error: BaseException) -> str | None:
    """Return the file and line of the innermost frame of an error in a module of registered components, or None."""
    modules = {getattr(component, "__module__", "") for known in _registered.values() for component in known.values()}
    found, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") in modules:
            found = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _place(component: Any) -> str:
    return f"{getattr(component, '__module__', '?')}:{getattr(component, '__qualname__', repr(component))}"
