"""Cross-field rules of CPU offloading; paths are relative to the block of the stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .key_block import Finding
from .memory_slice import full_recompute_layers, last_chunk_start, num_offloaded_layers
from .stack import StackKeys

_SWITCH = "cpu_offloading"
_NUMBER = "cpu_offloading_num_layers"
_ACTIVATIONS = "cpu_offloading_activations"
_WEIGHTS = "cpu_offloading_weights"


def offload_rules(keys: StackKeys) -> Iterator[Finding]:
    """All cross-field checks of CPU offloading for one stack."""
    if not keys.cpu_offloading:
        yield from settings_need_the_switch(keys)
        return
    for rule in OFFLOAD_RULES:
        yield from rule(keys)


def settings_need_the_switch(keys: StackKeys) -> Iterator[Finding]:
    """Report keys without `cpu_offloading`, unless they have the values that all NeMo configurations have."""
    number = keys.cpu_offloading_num_layers
    ineffective = [name for name in (_ACTIVATIONS, _WEIGHTS) if not getattr(keys, name)]
    if number is not None and number != keys.num_layers - 1:
        ineffective.insert(0, _NUMBER)
    if ineffective:
        given = " and ".join(f"`{name}` ({getattr(keys, name)})" for name in ineffective)
        yield Finding(
            "info",
            (*ineffective, _SWITCH),
            f"{given} {'have' if len(ineffective) > 1 else 'has'} no effect without `{_SWITCH}`: nothing is offloaded.",
            f"use {_SWITCH}=true",
        )


def number_of_layers_is_valid(keys: StackKeys) -> Iterator[Finding]:
    """The last layer stays on the GPU, as the backward starts with it; if it is the only one, copies do not overlap.

    With fully recomputed layers they do, since only the layers' inputs are copied.
    """
    number, layers, last = num_offloaded_layers(keys), keys.num_layers, last_chunk_start(keys)
    if number >= layers:
        yield Finding(
            "error",
            (_NUMBER, "num_layers"),
            f"`{_NUMBER}` ({number}) must be less than `num_layers` ({layers}): the backward starts with the last "
            "layer.",
            f"use {_NUMBER}={max(layers - 2, 0)}, or {_SWITCH}=false",
        )
    elif number == 0:
        default_note = "" if keys.cpu_offloading_num_layers is not None else ", all but one of `num_layers` (1)"
        yield Finding(
            "info",
            (_NUMBER, _SWITCH),
            f"`{_NUMBER}` (0{default_note}) offloads nothing.",
            f"use {_NUMBER}={max(layers - 2, 1)}" if layers > 1 else f"use {_SWITCH}=false",
        )
    elif number > last:
        key = f"`{_NUMBER}` ({'null, which is ' * (keys.cpu_offloading_num_layers is None)}{number})"
        reason = "one recompute chunk (`activations_checkpoint_num_layers`), and the backward starts with it."
        message = (
            f"{key} offloads the first {last} layers: the others are {reason}"
            if last
            else f"{key} offloads nothing: all layers are {reason}"
        )
        fix = f"use {_NUMBER}={last}" if last else "use activations_checkpoint_num_layers=1"
        paths = (_NUMBER, "activations_checkpoint_num_layers")
        yield Finding("info" if last else "warning", paths, message, fix)
    elif number == layers - 1 and keys.cpu_offloading_activations and full_recompute_layers(keys)[1] < number:
        default_note = "null, which is " if keys.cpu_offloading_num_layers is None else ""
        fewer = f"use {_NUMBER}={layers - 2} or fewer" if layers > 2 else f"use {_SWITCH}=false"
        yield Finding(
            "warning",
            (_NUMBER, "num_layers"),
            f"`{_NUMBER}` ({default_note}{number}) leaves one layer of {layers} on the GPU: in the forward pass each "
            "layer waits for the copies of the previous one.",
            fewer,
        )


def something_is_offloaded(keys: StackKeys) -> Iterator[Finding]:
    """Activations, weights or both must be offloaded, as in TransformerEngine."""
    if not (keys.cpu_offloading_activations or keys.cpu_offloading_weights):
        yield Finding(
            "error",
            (_ACTIVATIONS, _WEIGHTS, _SWITCH),
            f"`{_SWITCH}` (True) needs `{_ACTIVATIONS}` or `{_WEIGHTS}`, which are both False.",
            f"use {_ACTIVATIONS}=true, or {_SWITCH}=false",
        )


OFFLOAD_RULES: tuple[Callable[[StackKeys], Iterator[Finding]], ...] = (
    number_of_layers_is_valid,
    something_is_offloaded,
)
