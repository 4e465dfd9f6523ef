"""Keys whose value is a built-in name or that of a component of a user's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from .extensions import Kind, extension_names

GLU_SUFFIX = "-glu"
"""After the name of an activation: the gate of a GLU, such as `my_activation-glu`."""


@dataclass(frozen=True, slots=True)
class ExtensionName:
    """Pydantic constraint of text: the name of a component of a kind, registered or of an installed package.

    An activation may be the gate of a GLU (`GLU_SUFFIX`).
    """

    kind: Kind

    def names(self) -> tuple[str, ...]:
        """Return the names of all components of the kind."""
        return extension_names(self.kind)

    def check(self, value: str) -> str:
        """Return the value.

        Raises:
            ValueError: there is no component of this name.
        """
        names = self.names()
        if value not in names and not (self.kind == "activation" and value.removesuffix(GLU_SUFFIX) in names):
            raise ValueError(f"there is no {self.kind} {value!r}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))
