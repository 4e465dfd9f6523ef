"""Components of users' own code (`models.config.extensions`), loaded by the key that selects them."""

from __future__ import annotations

from typing import Any

from ...models.config.extensions import Kind, load_extension
from ..utils.errors import UserError

IMPORT_HINT = "if it is your own, give its module with --import"


def load_component(kind: Kind, name: str, key: str) -> Any:
    """Return the component `name` that the user chose with `key`.

    Raises:
        UserError: it is not registered, or cannot be imported.
    """
    try:
        return load_extension(kind, name)
    except LookupError as error:
        raise UserError(f"`{key}` ({name}): {error}; {IMPORT_HINT}") from None
    except ValueError as error:
        raise UserError(f"`{key}` ({name}): {error}") from None
