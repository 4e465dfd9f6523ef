"""The frozen configuration of one run, with the origin of every value."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...models.config.block import Finding
from .schema import RootBlock


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: `conf/model/x.yaml:12`, an override as typed, `default`, or `NeMo default`."""

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class RunConfig:
    """A validated configuration.

    Attributes:
        root: the typed keys.
        origins: dotted path to origin, for every leaf of `root` and every key of the user's files.
        document: plain containers as they go to disk; environment values stay unresolved (`${oc.env:NAME}`).
        findings: warnings and notes to print once.
        historical: dotted paths that were accepted though they have no meaning here.
    """

    root: RootBlock
    origins: dict[str, Origin] = field(default_factory=dict)
    document: dict[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    historical: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical document: equal on every rank of a run."""
        return hashlib.sha256(json.dumps(self.document, sort_keys=True).encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Write the document as JSON."""
        path.write_text(json.dumps(self.document, indent=2) + "\n")
