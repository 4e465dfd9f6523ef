"""Input of the cross-field rules, and helpers they share."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from ....models.config.key_block import Finding
from ..schema.key_index import schema_keys
from ..schema.root import RootBlock


@dataclass(frozen=True)
class RuleContext:
    """Input of a cross-field rule.

    Attributes:
        root: the typed keys.
        given: paths set by a file or an override; all others have their default.
        set_by_user: the subset of `given` set by the user, not by a packaged file.
        environment: the caller's environment variables.
        from_environment: paths whose values refer to the environment (`${oc.env:NAME}`); saved unresolved.
        is_saved: the configuration was read back from a run or a checkpoint.
    """

    root: RootBlock
    given: frozenset[str]
    set_by_user: frozenset[str]
    environment: Mapping[str, str]
    from_environment: frozenset[str] = frozenset()
    is_saved: bool = False


def is_changed(context: RuleContext, path: str) -> bool:
    """Return True if the user set a key to another value than its default, or any key of an open block."""
    key = schema_keys(context.root.model.family).get(path)
    if key is not None and attrgetter(path)(context.root) == key.default:
        return False
    return path in context.set_by_user or any(known.startswith(f"{path}.") for known in context.set_by_user)


def num_processes(context: RuleContext) -> int:
    """Return the number of processes; `devices: auto` counts as one until the run starts."""
    trainer = context.root.trainer
    return (trainer.devices if isinstance(trainer.devices, int) else 1) * trainer.num_nodes


def num_data_ranks(context: RuleContext) -> int:
    """Return the number of data-parallel ranks; with `devices: auto`, or devices that do not suffice, 1."""
    model = context.root.model
    ranks = model.tensor_model_parallel_size * model.context_parallel_size * model.pipeline_model_parallel_size
    return max(1, num_processes(context) // ranks)


def step_limit(context: RuleContext) -> int:
    """Return `trainer.max_steps`; if that is -1, a number that no run reaches: the data decide its length."""
    steps = context.root.trainer.max_steps
    return sys.maxsize if steps == -1 else steps


def defaults_to_fp32(context: RuleContext) -> bool:
    """Return True if `precision: null` means 32, as on CPU and MPS."""
    trainer = context.root.trainer
    return trainer.precision is None and trainer.accelerator in ("cpu", "mps")


def has_main_weights(context: RuleContext) -> bool:
    """Return True if the optimizer keeps fp32 main weights of 16-bit weights, as far as the keys decide that."""
    root = context.root
    mixed = root.trainer.precision in (None, "bf16", 16, "16")
    return mixed and root.model.megatron_amp_O2 and not defaults_to_fp32(context)


def has_16_bit_weights(context: RuleContext) -> bool:
    """Return True if weights are bf16 or fp16, as far as the keys decide that."""
    return context.root.trainer.precision in ("bf16-true", "16-true") or has_main_weights(context)


def choose_data(context: RuleContext, name: str, data_impl: str) -> str:
    """Return the override that chooses a data source: a group, or the key if the user has set that one."""
    path = "model.data.data_impl"
    return f"{path}={data_impl}" if path in context.set_by_user else f"data={name}"


def no_effect(path: str, other: str, when: str) -> Finding:
    """Return a warning that a key has no effect because of another; `when` begins with `with` or `without`."""
    return Finding.warning((path, other), f"`{path.rpartition('.')[2]}` has no effect {when}", f"~{path}")


def unused(context: RuleContext, path: str, other: str, when: str) -> Iterator[Finding]:
    """Yield the warning of `no_effect` if the user changed the key."""
    if is_changed(context, path):
        yield no_effect(path, other, when)
