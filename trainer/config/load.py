"""Load a configuration: compose, resolve and validate YAML files and overrides, reporting all errors at once.

Compose (Hydra) -> value overrides -> schema defaults -> interpolations -> state of each key -> types -> cross-field
rules. No step stops at the first problem.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..utils import environment
from ..utils.errors import UserError
from . import dotted_paths
from .draft import Draft
from .nemo.launcher_files import move_stage_to_root
from .run_config import Origin, Preset, RunConfig

MAX_BYTES = 1 << 20


def load_run_config(
    config_name: str | None = None,
    config_dir: Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    default_name: str = "train",
    fill_defaults: Callable[[Draft], None] | None = None,
) -> RunConfig:
    """Compose, resolve and validate a configuration.

    Args:
        config_name: primary file, without `.yaml`; None: `default_name`.
        config_dir: the user's folder, searched before `./conf`, `$STOKER_CONF` and the packaged files.
        overrides: `group=choice`, `key=value`, `+key=value`, `++key=value`, `~key`.
        environ: environment variables for `oc.env`; None: those of this process.
        default_name: the primary file if none is named.
        fill_defaults: sets keys that neither files nor overrides give, before validation.

    Raises:
        UserError: a file or choice does not exist, or a file cannot be read.
        ConfigError: the configuration is not valid; holds all problems.
    """
    from .compose import Composer
    from .overrides import parse_overrides

    environ = environment.snapshot() if environ is None else environ
    try:
        Path.cwd()
    except OSError:
        raise UserError("the current directory no longer exists; change to one that does") from None
    composer = Composer(config_dir, environment.config_folders(environ))
    parsed = parse_overrides(overrides, composer.is_group)
    config_name = default_name if config_name is None else config_name
    composition = composer.compose(config_name, parsed.group_choices)
    edits, stray = move_stage_to_root(composition, config_name, parsed.value_overrides)
    draft = Draft(composition.tree, {path: Origin("file", text) for path, text in composition.origins.items()}, environ)
    draft.stage = composition.stage
    draft.packaged = frozenset(composition.packaged_paths)
    draft.preset = Preset(composition.preset_name, composition.preset)
    draft.prefer_users_form()
    draft.problems.extend(dict.fromkeys([*parsed.problems, *stray]))
    draft.findings.extend((*composition.notes, *parsed.notes))
    for edit in edits:
        draft.apply(edit)
    if fill_defaults is not None:
        fill_defaults(draft)
    return draft.finish(tuple(composition.files))


def config_from_document(document: Mapping[str, Any], *, trusted: bool = False, origin: str = "document") -> RunConfig:
    """Validate a document with the same keys, types and rules as YAML files.

    Args:
        document: `RunConfig.document`, read back from JSON.
        trusted: resolve `${oc.env:NAME}` from this environment, as in the run that wrote it. A document that came with
            a checkpoint is not trusted: interpolations remain plain text.
        origin: of its values, for messages.

    Raises:
        ConfigError: the document is not valid.
    """
    tree = dotted_paths.merged({}, document)
    origins = {path: Origin("document", origin) for path, _ in dotted_paths.leaves(tree)}
    draft = Draft(tree, origins, environment.snapshot(), literal=not trusted)
    return draft.finish(())


def load_saved_config(path: Path, *, trusted: bool = False) -> RunConfig:
    """Read and validate a file written by `RunConfig.save`; see `config_from_document`.

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
    return config_from_document(document, trusted=trusted, origin=str(path))
