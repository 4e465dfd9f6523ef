"""Rules of `env_vars` and the environment: what can be set, what contradicts, and what must not be written down."""

from __future__ import annotations

from collections.abc import Iterator

from ....kernels.attention.flags import KNOWN_FLAGS
from ....models.config.key_block import Finding
from ...utils.environment import environment_text
from ...utils.redaction import has_user, is_ambiguous, is_secret
from ..schema.key_index import show_value
from ..suggest import closest
from .rule_context import Facts, Rule

_SECRET_LENGTH = 16
"""Characters that a key or token has at least, unlike most names of columns and texts of special tokens."""


def variables_can_be_set(facts: Facts) -> Iterator[Finding]:
    """What an operating system takes as a variable."""
    for name, value in facts.root.env_vars.items():
        if not name or "=" in name or "\0" in name or "\0" in environment_text(value):
            yield Finding(
                "error",
                (f"env_vars.{name}",),
                f"`env_vars` ({show_value(name)}) must not be empty, and neither name nor value may hold a null byte, "
                "nor the name a `=`",
                "write env_vars.NAME=VALUE",
            )


def environment_agrees(facts: Facts) -> Iterator[Finding]:
    """What the caller exported and what `env_vars` says must not differ."""
    for name, value in facts.root.env_vars.items():
        text = environment_text(value)
        present = facts.variables.get(name)
        if present is not None and present != text:
            yield Finding(
                "error",
                (f"env_vars.{name}",),
                f"`env_vars.{name}` ({text}) contradicts the environment, which has {name}={present}",
                f"unset {name}, or ~env_vars.{name}",
            )


def flags_are_known(facts: Facts) -> Iterator[Finding]:
    """A misspelt NVTE_* changes nothing, silently, everywhere else."""
    names = dict.fromkeys([*facts.root.env_vars, *facts.variables])
    for name in names:
        if name.upper().startswith("NVTE") and name not in KNOWN_FLAGS:
            near = closest(name, KNOWN_FLAGS)
            where = f"env_vars.{name}" if name in facts.root.env_vars else name
            yield Finding(
                "warning", (where,), f"`{name}` is not a flag of TransformerEngine that stoker knows", near or ""
            )


def secrets_stay_out(facts: Facts) -> Iterator[Finding]:
    """The configuration is written into the run directory, and sent to loggers; `${oc.env:NAME}` as it is."""
    variables, dataset = "env_vars", "model.data.dataset_kwargs"
    found = [(variables, name, value, is_secret(name)) for name, value in facts.root.env_vars.items()]
    found += [
        (dataset, name, value, _is_secret_argument(name, value))
        for name, value in facts.root.model.data.dataset_kwargs.items()
    ]
    for block, name, value, is_bad in found:
        path = f"{block}.{name}"
        # In the document of a checkpoint a reference stays text.
        if is_bad and path not in facts.from_environment and "${" not in str(value):
            export = f"export {name} before the run, or " if block == variables else ""
            yield Finding(
                "error",
                (path,),
                f"`{path}` looks like a secret; a configuration is written down and must hold none",
                f"{export}write {path}=${{oc.env:VARIABLE}}",
            )


def _is_secret_argument(name: str, value: object) -> bool:
    """Whether a data set is given a secret: by its name, unless that may mean a column or a token of a vocabulary."""
    texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    if any(has_user(text) for text in texts):
        return True
    if not is_secret(name):
        return False
    return not is_ambiguous(name) or any(len(text) >= _SECRET_LENGTH for text in texts)


ENVIRONMENT_RULES: tuple[Rule, ...] = (
    variables_can_be_set,
    environment_agrees,
    flags_are_known,
    secrets_stay_out,
)
