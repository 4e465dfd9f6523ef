"""Frozen configuration of one run, with the origin of every value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...models.config.key_block import Finding
from ..utils.durable_files import atomic_write
from .problems import KeyReport
from .resolved_run import ResolvedRun, resolve_run
from .schema.hydra import AnyLauncher, AnySweeper
from .schema.root import RootBlock


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a value.

    Attributes:
        kind: `file`, `override`, `document` or `default`.
        text: `conf/model/x.yaml:12`, an override as typed, or `default`.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


DEFAULT_ORIGIN = Origin("default", "default")


@dataclass(frozen=True, slots=True)
class Preset:
    """Values of the chosen file of the group `model`.

    Attributes:
        name: of the choice, such as `gpt_125m`.
        values: value by dotted path, as written, of the file and those that it starts from.
    """

    name: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HydraSettings:
    """Settings of the `hydra:` block; `hydra.run.dir` is in `exp_manager.explicit_log_dir`.

    Attributes:
        is_multirun: `-m`, or `hydra.mode: MULTIRUN`.
        sweep_dir: `hydra.sweep.dir`.
        sweep_subdir: `hydra.sweep.subdir` of a job of a sweep; empty without one.
        launcher: `hydra.launcher`.
        sweeper: `hydra.sweeper`.
    """

    is_multirun: bool
    sweep_dir: str | None
    sweep_subdir: str
    launcher: AnyLauncher
    sweeper: AnySweeper


@dataclass(frozen=True)
class RunConfig:
    """Validated configuration.

    Attributes:
        root: the typed keys.
        origins: origin by dotted path, for every leaf of `root` and every key of the user's files.
        document: the configuration as saved, in plain containers; environment values unresolved (`${oc.env:NAME}`).
        findings: warnings and notes to print once.
        list_key_reports: returns `key_reports`.
        files: the YAML files that were merged.
        preset_keys: paths whose values come from files of this package.
        preset: the model's preset, before other files and overrides changed it.
        hydra: settings of the `hydra:` block; None for a document.
    """

    root: RootBlock
    origins: dict[str, Origin] = field(default_factory=dict)
    document: dict[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    list_key_reports: Callable[[], tuple[KeyReport, ...]] = field(default=tuple, repr=False, compare=False)
    files: tuple[Path, ...] = ()
    preset_keys: frozenset[str] = frozenset()
    preset: Preset = field(default_factory=Preset)
    hydra: HydraSettings | None = None

    @cached_property
    def resolved(self) -> ResolvedRun:
        """The keys, resolved for one process without a GPU (`resolve_run` for others)."""
        return resolve_run(self.root)

    @cached_property
    def key_reports(self) -> tuple[KeyReport, ...]:
        """Every effective key and every given key that does not act, for `stoker config`; no run needs their texts."""
        return self.list_key_reports()

    def is_set(self, path: str) -> bool:
        """Return True if the user has set a key: in a file of their own, by an override or in a saved document."""
        return path not in self.preset_keys and self.origins.get(path, DEFAULT_ORIGIN).kind != "default"

    @property
    def digest(self) -> str:
        """SHA-256 of the document as canonical JSON; equal on all ranks of a run."""
        return hashlib.sha256(json.dumps(self.document, sort_keys=True).encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Write the document as JSON."""
        atomic_write(path, (json.dumps(self.document, indent=2) + "\n").encode())

    def provenance(self) -> dict[str, Any]:
        """Return what `document` lacks as a JSON object, for a process that gets it (`with_provenance`)."""
        origins = {path: [origin.kind, origin.text] for path, origin in self.origins.items()}
        findings = [asdict(finding) for finding in self.findings]
        keys = {"preset": asdict(self.preset), "preset_keys": sorted(self.preset_keys)}
        return {"origins": origins, "findings": findings, **keys}

    def with_provenance(self, provenance: Mapping[str, Any]) -> RunConfig:
        """Return this configuration, made from a document, with the `provenance` of the one that it was saved from."""
        origins = {path: Origin(*parts) for path, parts in provenance["origins"].items()}
        findings = tuple(Finding(**(each | {"keys": tuple(each["keys"])})) for each in provenance["findings"])
        return replace(
            self,
            origins=origins,
            findings=findings,
            preset=Preset(**provenance["preset"]),
            preset_keys=frozenset(provenance["preset_keys"]),
        )
