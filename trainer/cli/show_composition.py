"""Print how a configuration is composed, as Hydra's `--cfg` and `--info` do. Does not import torch.

Nothing is validated beyond what composing needs, so that a configuration with errors can be looked at; `stoker config`
shows the validated one, with the origin of every value.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from typing import Any

from omegaconf import OmegaConf

from ...models.config.extensions import KINDS, extension_names, extension_source
from ..config import dotted_paths
from ..config.compose import Composer, display_path
from ..config.draft import Draft
from ..config.hydra_node import RunContext
from ..config.interpolation import ENVIRONMENT_NAME, InterpolationError, has_interpolation
from ..config.load import compose_draft
from ..config.nemo.key_states import is_known_key, suggest_keys
from ..config.overrides import parse_overrides
from ..config.problems import ConfigError, Problem
from ..config.schema.key_index import defaults_tree
from ..config.schema.root import family_of
from ..config.sweep_overrides import first_values
from ..config.yaml_reader import SWEPT_DOT
from ..utils.errors import EXIT_OK, UserError
from ..utils.redaction import is_secret, redact, redact_value
from ..utils.text import format_table

_PLUGINS = {
    "hydra/sweeper=basic": "",
    "hydra/sweeper=optuna": "optuna",
    "hydra/launcher=basic": "",
    "hydra/launcher=submitit_local": "submitit",
    "hydra/launcher=submitit_slurm": "submitit",
}


def show_composition(args: argparse.Namespace) -> int:
    """Print what `--cfg` and `--info` ask for.

    Raises:
        UserError: a file, choice or key does not exist, or `--resolve` cannot resolve a value.
    """
    name = args.config_name or ("finetune" if args.finetune else "train")
    composer = Composer(args.config_dir, config_path=args.config_path)
    context, overrides = RunContext(), args.overrides
    if getattr(args, "multirun", False):
        overrides, swept = first_values(overrides, composer.options)
        context = RunContext(is_multirun=True, job_number=0 if swept else None, swept=tuple(swept))
        if swept:
            print(f"note: as in the first job, with {' '.join(map(redact, swept))}", file=sys.stderr, flush=True)
    draft, _ = compose_draft(name, args.config_dir, overrides, config_path=args.config_path, context=context)
    _check_overrides(draft)
    if args.cfg is not None:
        sys.stdout.write(_composed(draft, args.cfg, args.package, args.resolve))
    if args.info is not None:
        choices = parse_overrides(overrides, composer.is_group).group_choices
        found = composer.defaults_list(name, choices)
        parts = {
            "searchpath": lambda: map(display_path, composer.directories),
            "defaults": lambda: format_table(
                [
                    ("file", "package", "from"),
                    *(
                        (path, package or "_global_", display_path(composer.source_of(path).directory))
                        for path, package in found.files
                    ),
                ]
            ),
            "defaults-tree": lambda: [f"{'  ' * depth}{path}" for depth, path in found.tree],
            "plugins": _plugins,
            "config": lambda: [_composed(draft, "all", None, False).rstrip()],
        }
        for part, lines in parts.items():
            if args.info in ("all", part):
                print(f"# {part}", *lines(), sep="\n", end="\n\n" if args.info == "all" else "\n")
    return EXIT_OK


def _check_overrides(draft: Draft) -> None:
    """Check that overrides set keys that exist, as Hydra does.

    Raises:
        ConfigError: the problems.
    """
    problems = list(draft.problems)
    for path, origin in draft.origins.items():
        if origin.kind == "override" and not is_known_key(path):
            near = suggest_keys(path)
            problems.append(
                Problem(path, None, origin.text, "there is no such key", f"did you mean {near[0]}?" if near else "")
            )
    if problems:
        raise ConfigError(problems)


def _composed(draft: Draft, part: str, package: str | None, resolve: bool) -> str:
    """Return the composed YAML of `job`, `hydra` or `all`, or the block at `package`."""
    assert draft.hydra is not None
    draft.hydra.set_run_directory(draft)
    node = {"hydra": draft.hydra.references}
    whole = {"job": draft.tree, "hydra": node, "all": {**node, **draft.tree}}[part]
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    resolver = draft.resolver(dotted_paths.merged(defaults_tree(family_of(draft.tree.get("model"))), draft.tree))
    for path, raw in dotted_paths.leaves(whole):
        value = raw
        if resolve and has_interpolation(raw):
            try:
                found = resolver.resolve(path)
                variables = ENVIRONMENT_NAME.findall(str(resolver.expand(path, _no))) if found.from_environment else []
                value = raw if any(map(is_secret, variables)) else found.value
            except InterpolationError as error:
                problems.append(Problem(path, str(raw), draft.origin_text(path), f"it {error}"))
        shown = redact_value(path, str(value))
        dotted_paths.put(values, path, value if shown == str(value) else shown)
    if problems and resolve and part == "job":
        raise ConfigError(problems)
    values = _with_dots(values)
    if package in (None, "_global_"):
        return OmegaConf.to_yaml(OmegaConf.create(values))
    found = dotted_paths.get(values, package or "", dotted_paths.MISSING)
    if found == dotted_paths.MISSING:
        near = suggest_keys(package or "")
        raise UserError(
            f"--package {package}: the composed configuration has no such key"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    if not isinstance(found, (dict, list)):
        return f"{found}\n"
    return f"# @package {package}\n{OmegaConf.to_yaml(OmegaConf.create(found))}"


def _no(path: str) -> bool:
    return False


def _with_dots(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        name.replace(SWEPT_DOT, "."): _with_dots(value) if isinstance(value, dict) else value
        for name, value in tree.items()
    }


def _plugins() -> list[str]:
    rows = []
    for choice, package in _PLUGINS.items():
        try:
            state = f"{package} {importlib.metadata.version(package)}" if package else "built in"
        except importlib.metadata.PackageNotFoundError:
            state = f"{package} is not installed"
        rows.append((choice, state))
    rows += [(f"{kind} {name}", extension_source(kind, name)) for kind in KINDS for name in extension_names(kind)]
    return format_table([("plugin", "provided by"), *rows])
