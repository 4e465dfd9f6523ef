"""Rules between the keys of offloading; paths are relative to the block of their stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .key_block import Finding
from .memory_slice import last_chunk, offloaded_layers, whole_layers
from .stack import StackKeys

_SWITCH = "cpu_offloading"
_NUMBER = "cpu_offloading_num_layers"
_ACTIVATIONS = "cpu_offloading_activations"
_WEIGHTS = "cpu_offloading_weights"


def offload_rules(keys: StackKeys) -> Iterator[Finding]:
    """Everything the keys of offloading of one stack have against each other."""
    if not keys.cpu_offloading:
        yield from settings_need_the_switch(keys)
        return
    for rule in OFFLOAD_RULES:
        yield from rule(keys)


def settings_need_the_switch(keys: StackKeys) -> Iterator[Finding]:
    """Every file of NeMo has these keys; told only where somebody changed one."""
    number = keys.cpu_offloading_num_layers
    unheard = [name for name in (_ACTIVATIONS, _WEIGHTS) if not getattr(keys, name)]
    if number is not None and number != keys.num_layers - 1:
        unheard.insert(0, _NUMBER)
    if unheard:
        given = " and ".join(f"`{name}` ({getattr(keys, name)})" for name in unheard)
        yield Finding(
            "info",
            (*unheard, _SWITCH),
            f"{given} {'have' if len(unheard) > 1 else 'has'} no effect without `{_SWITCH}`: nothing is offloaded.",
            f"use {_SWITCH}=true",
        )


def layers_are_left(keys: StackKeys) -> Iterator[Finding]:
    """The backward begins with the last layer, which stays; where it is alone, activations are waited for.

    Not where layers are recomputed as a whole: only their inputs are copied.
    """
    number, layers, last = offloaded_layers(keys), keys.num_layers, last_chunk(keys)
    if number >= layers:
        yield Finding(
            "error",
            (_NUMBER, "num_layers"),
            f"`{_NUMBER}` ({number}) must be less than `num_layers` ({layers}): the backward begins with the last "
            "layer.",
            f"use {_NUMBER}={max(layers - 2, 0)}, or {_SWITCH}=false",
        )
    elif number == 0:
        left = "" if keys.cpu_offloading_num_layers is not None else ", all but one of `num_layers` (1)"
        yield Finding(
            "info",
            (_NUMBER, _SWITCH),
            f"`{_NUMBER}` (0{left}) offloads nothing.",
            f"use {_NUMBER}={max(layers - 2, 1)}" if layers > 1 else f"use {_SWITCH}=false",
        )
    elif number > last:
        reach = f"`{_NUMBER}` ({'null, which is ' * (keys.cpu_offloading_num_layers is None)}{number})"
        why = "recomputed together (`activations_checkpoint_num_layers`), and the backward begins with them."
        told = (
            f"{reach} offloads the first {last} layers: the others are {why}"
            if last
            else f"{reach} offloads nothing: all layers are {why}"
        )
        fix = f"use {_NUMBER}={last}" if last else "use activations_checkpoint_num_layers=1"
        keys_of_both = (_NUMBER, "activations_checkpoint_num_layers")
        yield Finding("info" if last else "warning", keys_of_both, told, fix)
    elif number == layers - 1 and keys.cpu_offloading_activations and whole_layers(keys)[1] < number:
        left = "null, which is " if keys.cpu_offloading_num_layers is None else ""
        fewer = f"use {_NUMBER}={layers - 2} or fewer" if layers > 2 else f"use {_SWITCH}=false"
        yield Finding(
            "warning",
            (_NUMBER, "num_layers"),
            f"`{_NUMBER}` ({left}{number}) leaves one layer of {layers} on the GPU: in the forward each layer waits "
            "for the copies of the one before.",
            fewer,
        )


def something_is_offloaded(keys: StackKeys) -> Iterator[Finding]:
    """Activations, weights or both, as TransformerEngine demands."""
    if not (keys.cpu_offloading_activations or keys.cpu_offloading_weights):
        yield Finding(
            "error",
            (_ACTIVATIONS, _WEIGHTS, _SWITCH),
            f"`{_SWITCH}` (True) needs `{_ACTIVATIONS}` or `{_WEIGHTS}`, which are both False.",
            f"use {_ACTIVATIONS}=true, or {_SWITCH}=false",
        )


OFFLOAD_RULES: tuple[Callable[[StackKeys], Iterator[Finding]], ...] = (
    layers_are_left,
    something_is_offloaded,
)
