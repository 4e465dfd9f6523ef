"""Frozen configuration of one run, with the origin of every value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...models.config.key_block import Finding
from ..utils.errors import UserError
from .problems import KeyAccount
from .schema.root import RootBlock

MAX_BYTES = 1 << 20


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


DEFAULT = Origin("default", "default")


@dataclass(frozen=True)
class RunConfig:
    """Validated configuration.

    Attributes:
        root: the typed keys.
        origins: origin by dotted path, for every leaf of `root` and every key of the user's files.
        document: the configuration as saved, in plain containers; environment values unresolved (`${oc.env:NAME}`).
        findings: warnings and notes to print once.
        historical: paths of accepted keys that have no effect here.
        account: every effective key and every given key that does not act, for `stoker config`.
        files: the YAML files that were merged.
    """

    root: RootBlock
    origins: dict[str, Origin] = field(default_factory=dict)
    document: dict[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    historical: tuple[str, ...] = ()
    account: tuple[KeyAccount, ...] = ()
    files: tuple[Path, ...] = ()

    @property
    def digest(self) -> str:
        """SHA-256 of the document as canonical JSON; equal on all ranks of a run."""
        return hashlib.sha256(json.dumps(self.document, sort_keys=True).encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Write the document as JSON."""
        path.write_text(json.dumps(self.document, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path, *, trusted: bool = False) -> RunConfig:
        """Read and validate a file written by `save`.

        Args:
            path: the JSON file.
            trusted: resolve `${oc.env:NAME}` from this environment, as in the run that wrote it. A document that came
                with a checkpoint is not trusted: interpolations remain plain text.

        Raises:
            UserError: the file cannot be read or is not valid.
        """
        try:
            if path.stat().st_size > MAX_BYTES:
                raise UserError(f"{path}: is larger than {MAX_BYTES // 1024} KiB")
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: is not JSON: {error}") from None
        if not isinstance(document, dict):
            raise UserError(f"{path}: must hold a JSON object")
        return cls.from_document(document, trusted=trusted, origin=str(path))

    @classmethod
    def from_document(
        cls, document: Mapping[str, Any], *, trusted: bool = False, origin: str = "document"
    ) -> RunConfig:
        """Validate a document with the same keys, types and rules as YAML files.

        Raises:
            ConfigError: the document is not valid.
        """
        from .load import config_from_document

        return config_from_document(document, trusted=trusted, origin=origin)
