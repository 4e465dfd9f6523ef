"""Base class of configuration blocks, and the findings of cross-field rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

NonEmptyText = Annotated[str, Field(min_length=1)]
"""Non-empty text: an empty path or name usually comes from an unset shell variable."""


class ConfigBlock(BaseModel):
    """Frozen, strictly typed block of keys without extra fields. Docstrings of the fields are their help texts."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @classmethod
    def own_keys(cls) -> tuple[str, ...]:
        """Return the names of the keys that this class declares, without inherited ones."""
        return tuple(name for name in cls.model_fields if name in cls.__annotations__)


def extension_field(default: Any = ..., **constraints: Any) -> Any:
    """Declare a key that NeMo does not have; the docs and `stoker config` mark it as stoker's own."""
    return Field(default, json_schema_extra={"own": True}, **constraints)


@dataclass(frozen=True, slots=True)
class ComponentName:
    """Marks the text, besides a closed list, that names a component of the user's own; a rule checks that it exists."""

    description: str


OpenBlock = dict[str, NonEmptyText | int | float | bool | list[NonEmptyText | int | float] | None]
"""Settings of a user's own component, by name."""
BlockT = TypeVar("BlockT", bound=ConfigBlock)


def block_default(kind: type[BlockT]) -> BlockT:
    """Return the default of a nested block: the block with all its defaults."""
    return kind.model_validate({})


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a cross-field rule.

    Attributes:
        level: `error` rejects the configuration, `warning` and `info` are printed once.
        keys: dotted paths involved, relative to the rule's block; the key to change comes first.
        message: rule and actual values, with keys in backticks.
        fix: replacement ready to be typed; empty if the message contains it.
        origin: description of where the value of the first key was set; empty if it is a default or unknown.
    """

    level: Literal["error", "warning", "info"]
    keys: tuple[str, ...]
    message: str
    fix: str = ""
    origin: str = ""

    @classmethod
    def error(cls, keys: tuple[str, ...], message: str, fix: str = "") -> Finding:
        """Return a finding that rejects the configuration."""
        return cls("error", keys, message, fix)

    @classmethod
    def warning(cls, keys: tuple[str, ...], message: str, fix: str = "") -> Finding:
        """Return a warning."""
        return cls("warning", keys, message, fix)

    @classmethod
    def info(cls, keys: tuple[str, ...], message: str, fix: str = "") -> Finding:
        """Return a note."""
        return cls("info", keys, message, fix)
