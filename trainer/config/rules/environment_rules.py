"""Rules of `env_vars` and the environment: valid names, conflicts, unknown NVTE_* flags and secrets."""

from __future__ import annotations

from collections.abc import Iterator

from ....kernels.attention.flags import KNOWN_FLAGS
from ....models.config.key_block import Finding
from ...utils.environment import format_variable
from ...utils.redaction import holds_secret, is_ambiguous_secret, is_secret, redact_value
from ..schema.key_index import format_value
from ..suggest import closest
from .rule_context import RuleContext

_SECRET_LENGTH = 16
"""Minimum length of an API key or token; most column names and special tokens are shorter."""


def variable_names_are_valid(context: RuleContext) -> Iterator[Finding]:
    """Names and values must be valid environment variables."""
    for name, value in context.root.env_vars.items():
        if not name or "=" in name or "\0" in name or "\0" in format_variable(value):
            yield Finding.error(
                (f"env_vars.{name}",),
                f"`env_vars` ({format_value(name)}) must not be empty, and neither name nor value may hold a "
                "null byte, nor the name a `=`",
                "write env_vars.NAME=VALUE",
            )


def env_vars_match_environment(context: RuleContext) -> Iterator[Finding]:
    """`env_vars` must not conflict with the caller's environment."""
    for name, value in context.root.env_vars.items():
        text = format_variable(value)
        exported = context.environment.get(name)
        if exported is not None and exported != text:
            text, exported = redact_value(name, text), redact_value(name, exported)
            yield Finding.error(
                (f"env_vars.{name}",),
                f"`env_vars.{name}` ({text}) contradicts the environment, which has {name}={exported}",
                f"unset {name}, or ~env_vars.{name}",
            )


def nvte_flags_are_known(context: RuleContext) -> Iterator[Finding]:
    """Warn about unknown NVTE_* variables, which TransformerEngine ignores silently."""
    names = dict.fromkeys([*context.root.env_vars, *context.environment])
    for name in names:
        if name.upper().startswith("NVTE") and name not in KNOWN_FLAGS:
            near = closest(name, KNOWN_FLAGS)
            where = f"env_vars.{name}" if name in context.root.env_vars else name
            yield Finding.warning((where,), f"`{name}` is not a TransformerEngine flag known to stoker", near or "")


def config_holds_no_secrets(context: RuleContext) -> Iterator[Finding]:
    """The configuration must hold no secrets: it is saved and logged, with `${oc.env:NAME}` unresolved."""
    variables, model = "env_vars", context.root.model
    blocks = {
        "model.data.dataset_kwargs": model.data.dataset_kwargs,
        "model.tokenizer.kwargs": model.tokenizer.kwargs,
        "model.optim.kwargs": model.optim.kwargs,
        "model.optim.sched.kwargs": model.optim.sched.kwargs,
    }
    found = [
        (variables, name, value, is_secret(name) or holds_secret(str(value)))
        for name, value in context.root.env_vars.items()
    ]
    found += [
        (block, name, value, _is_secret_argument(name, value))
        for block, values in blocks.items()
        for name, value in values.items()
    ]
    for block, name, value, is_bad in found:
        path = f"{block}.{name}"
        # In the configuration of a checkpoint a reference is plain text.
        if is_bad and path not in context.from_environment and "${" not in str(value):
            export = f"export {name} before the run, or " if block == variables else ""
            yield Finding(
                # Earlier versions recognized fewer names, and what they have saved must load.
                "warning" if context.is_saved else "error",
                (path,),
                f"`{path}` looks like a secret; the configuration is saved and logged and must not hold one",
                f"{export}write {path}=${{oc.env:VARIABLE}}",
            )


def _is_secret_argument(name: str, value: object) -> bool:
    """Return True if a dataset argument looks like a secret; an ambiguous name (column, token) needs a long value."""
    texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    if any(holds_secret(text) for text in texts):
        return True
    if not is_secret(name):
        return False
    return not is_ambiguous_secret(name) or any(len(text) >= _SECRET_LENGTH for text in texts)
