"""What every block of keys is built from: the closed base class, and the finding a rule reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Block(BaseModel):
    """A closed, typed, frozen group of keys. The docstring under each field is its help text, unit and NeMo meaning."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


def own(default: Any = ..., **constraints: Any) -> Any:
    """A key that NeMo does not have: the docs and `stoker config` mark it as stoker's own."""
    return Field(default, json_schema_extra={"own": True}, **constraints)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a cross-field rule has to say about a configuration.

    Attributes:
        level: `error` refuses the run, `warning` and `info` are printed once.
        keys: dotted paths the rule is about, the one to change first. Relative to the block the rule is for.
        message: the rule and the actual values, naming keys in backticks.
        fix: what to write instead, ready to be typed; empty when the message says it.
        origin: where the value of the first key came from, in words; empty where nobody has set it, or it is not known.
    """

    level: Literal["error", "warning", "info"]
    keys: tuple[str, ...]
    message: str
    fix: str = ""
    origin: str = ""
