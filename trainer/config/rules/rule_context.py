"""What a rule between keys may look at, and what it says most often."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ....models.config.key_block import Finding
from ..schema.root import RootBlock


@dataclass(frozen=True)
class Facts:
    """What a rule may look at.

    Attributes:
        root: the typed keys.
        given: paths that a file or an override sets; the rest are defaults.
        own: those of them that the user set, not one of the packaged files.
        variables: the caller's environment.
        from_environment: paths whose values refer to it (`${oc.env:NAME}`); on disk they stay unresolved.
    """

    root: RootBlock
    given: frozenset[str]
    own: frozenset[str]
    variables: Mapping[str, str]
    from_environment: frozenset[str] = frozenset()


Rule = Callable[[Facts], Iterator[Finding]]


def processes(facts: Facts) -> int:
    """Processes of the run; those of `devices: auto` are counted when it starts."""
    trainer = facts.root.trainer
    return (trainer.devices if isinstance(trainer.devices, int) else 1) * trainer.num_nodes


def is_fp32_for_the_host(facts: Facts) -> bool:
    """Whether `precision: null` is 32, as on devices that have no tensor cores."""
    trainer = facts.root.trainer
    return trainer.precision is None and trainer.accelerator in ("cpu", "mps")


def no_effect(path: str, other: str, when: str) -> Finding:
    """The warning that a key changes nothing.

    Args:
        path: of the key.
        other: the key that makes it so.
        when: in words, beginning with `with` or `without`.
    """
    return Finding("warning", (path, other), f"`{path.rpartition('.')[2]}` has no effect {when}", f"~{path}")
