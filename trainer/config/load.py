"""Load a configuration: compose, resolve and validate YAML files and overrides, reporting all errors at once.

Compose (Hydra) -> value overrides -> schema defaults -> interpolations -> state of each key -> types -> cross-field
rules. No step stops at the first problem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..utils import environment
from ..utils.errors import UserError
from . import dotted_paths
from .draft import Draft
from .hydra_node import HydraNode, RunContext
from .nemo.launcher_files import move_stage_to_root
from .problems import ConfigError
from .run_config import HydraSettings, Origin, Preset, RunConfig
from .schema.key_index import defaults_tree
from .schema.root import family_of

_NUM_PROCESSES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables of torchrun and srun, which may start several processes that each compose the configuration."""


def load_run_config(
    config_name: str | None = None,
    config_dir: Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    default_name: str = "train",
    fill_defaults: Callable[[Draft], None] | None = None,
    config_path: Path | None = None,
    context: RunContext | None = None,
    apply_options: Callable[[Draft], None] | None = None,
) -> RunConfig:
    """Compose, resolve and validate a configuration.

    Args:
        config_name: primary file, without `.yaml`; None: `default_name`.
        config_dir: the user's folder, searched before `./conf`, `$STOKER_CONF` and the packaged files.
        overrides: `group=choice`, `key=value`, `+key=value`, `++key=value`, `~key`.
        environ: environment variables for `oc.env`; None: those of this process.
        default_name: the primary file if none is named.
        fill_defaults: sets keys that neither files nor overrides give, before validation.
        config_path: folder of the primary file, in place of `./conf`.
        context: what `${hydra:...}` and `${now:...}` refer to; None: a run that starts now.
        apply_options: sets keys that options of the verb give, after the overrides.

    Raises:
        UserError: a file or choice does not exist, or a file cannot be read.
        ConfigError: the configuration is not valid; holds all problems.
    """
    draft, files = compose_draft(
        default_name if config_name is None else config_name,
        config_dir,
        overrides,
        environ,
        config_path=config_path,
        context=context,
    )
    if apply_options is not None:
        apply_options(draft)
    if fill_defaults is not None:
        fill_defaults(draft)
    return draft.finish(files)


def compose_draft(
    config_name: str,
    config_dir: Path | None,
    overrides: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    config_path: Path | None = None,
    context: RunContext | None = None,
) -> tuple[Draft, tuple[Path, ...]]:
    """Compose the files and apply the overrides; the arguments are those of `load_run_config`.

    Returns:
        The configuration before interpolation and validation, and its files.

    Raises:
        UserError: a file or choice does not exist, or a file cannot be read.
    """
    from .compose import Composer
    from .overrides import parse_overrides

    environ = environment.snapshot() if environ is None else environ
    try:
        Path.cwd()
    except OSError:
        raise UserError("the current directory no longer exists; change to one that does") from None
    composer = Composer(config_dir, environ, config_path=config_path)
    parsed = parse_overrides(overrides, composer.is_group)
    composition = composer.compose(config_name, parsed.group_choices)
    edits, stray = move_stage_to_root(composition, config_name, parsed.value_overrides)
    origins = {path: Origin("file", text) for path, text in composition.origins.items()}
    of_hydra = {path: Origin("file", text) for path, text in composition.hydra_origins.items()}
    draft = Draft(composition.tree, origins, environ)
    if context is None:
        is_one_of_several = any(environ.get(name, "1") != "1" for name in _NUM_PROCESSES)
        context = RunContext(now=None) if is_one_of_several else RunContext()
    draft.hydra = HydraNode(composition.hydra, of_hydra, composition.choices, config_name, context)
    draft.stage = composition.stage
    draft.packaged = frozenset(composition.packaged_paths)
    draft.preset = Preset(composition.preset_name, composition.preset)
    draft.prefer_users_form()
    draft.problems.extend(dict.fromkeys([*parsed.problems, *stray]))
    draft.findings.extend((*composition.notes, *parsed.notes))
    for edit in edits:
        draft.apply(edit)
    for edit in parsed.hydra_overrides:
        draft.hydra.apply(edit)
    return draft, tuple(composition.files)


def load_hydra_settings(
    config_name: str,
    config_dir: Path | None,
    overrides: Sequence[str],
    *,
    config_path: Path | None = None,
    context: RunContext,
) -> HydraSettings:
    """Return the settings of `hydra:` for a sweep, without validating a configuration; see `load_run_config`.

    Raises:
        UserError: a file or choice does not exist, or a file cannot be read.
        ConfigError: settings are not valid.
    """
    draft, _ = compose_draft(config_name, config_dir, overrides, config_path=config_path, context=context)
    assert draft.hydra is not None
    whole = dotted_paths.merged(defaults_tree(family_of(draft.tree.get("model"))), draft.tree)
    settings = draft.hydra.settings(draft.resolver(whole), [])
    if draft.hydra.problems:
        raise ConfigError(draft.hydra.problems)
    return settings


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
