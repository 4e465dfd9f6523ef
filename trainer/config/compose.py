"""Compose YAML files with Hydra's defaults lists, recording the file and line of every value.

Hydra computes the defaults list (groups, packages, `override`, `optional`). Files are read by `yaml_reader.py` with
size limits and merged here, leaf by leaf, later files over earlier ones. No Hydra run directory, `hydra` node, global
state or instantiation; interpolations are not resolved here.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from ...models.config.key_block import Finding
from ..utils import environment
from ..utils.errors import UserError
from . import yaml_reader
from .dotted_paths import Tree, get, join, merged, parents_of, put
from .hydra_defaults import DefaultsError, DefaultsList, Repository, compute_defaults_list
from .overrides import UNUSED_HYDRA_GROUPS, chosen_group
from .schema.hydra import REPLACED_CHOICES
from .suggest import closest
from .yaml_reader import YamlError, YamlFile

_SAMPLER = "hydra/sweeper/sampler"
"""The group that only one choice of another group has."""
PACKAGED_CONF = Path(__file__).resolve().parents[2] / "conf"


@dataclass
class Composition:
    """Merged configuration files.

    Attributes:
        tree: keys and values as written.
        origins: file and line of each leaf, `conf/model/x.yaml:12`.
        files: the files, in merge order.
        packaged_paths: leaves set by a file of this package.
        notes: notes on content that is ignored.
        preset_name: the last file of the group `model`.
        preset: its values and those of the files of that group it starts from, by path.
        hydra: the `hydra:` block, which is no part of `tree`.
        hydra_origins: file and line of each of its leaves, `hydra.sweep.dir`.
        choices: the chosen file of each group.
        stage: the stage of the NeMo-Framework-Launcher whose block was moved to the root; empty if unknown.
    """

    tree: Tree = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    packaged_paths: set[str] = field(default_factory=set)
    notes: list[Finding] = field(default_factory=list)
    preset_name: str = ""
    preset: dict[str, Any] = field(default_factory=dict)
    hydra: Tree = field(default_factory=dict)
    hydra_origins: dict[str, str] = field(default_factory=dict)
    choices: dict[str, str | None] = field(default_factory=dict)
    stage: str = ""


class YamlSource(ConfigSource):
    """Hydra config source for one directory of YAML files, read by `yaml_reader.py`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(provider="stoker", path=f"{self.scheme()}://{directory}")
        self.directory = directory
        self._read: dict[Path, YamlFile] = {}

    @staticmethod
    def scheme() -> str:
        """Return the scheme; unused, since the source is created directly."""
        return "stoker"

    def available(self) -> bool:
        """Return True if the directory exists."""
        return self.directory.is_dir()

    def is_group(self, config_path: str) -> bool:
        """Return True if the folder exists."""
        return ".." not in config_path.split("/") and os.path.isdir(self.directory / config_path)

    def is_config(self, config_path: str) -> bool:
        """Return True if the file exists."""
        return ".." not in config_path.split("/") and os.path.isfile(self.file(config_path))

    def file(self, config_path: str) -> Path:
        """Return the file of a config path; `.yaml` is optional."""
        return self.directory / (config_path if config_path.endswith(".yaml") else config_path + ".yaml")

    def read(self, config_path: str) -> YamlFile:
        """Read a file, once.

        Raises:
            UserError: the file cannot be read or is not valid.
        """
        path = self.file(config_path)
        if path not in self._read:
            try:
                self._read[path] = yaml_reader.read_yaml(path)
            except YamlError as error:
                raise UserError(_error_text(path, error)) from None
        return self._read[path]

    def load_config(self, config_path: str) -> ConfigResult:
        """Return defaults list and package to Hydra, without the values."""
        parsed = self.read(config_path)
        defaults = [item for item in parsed.defaults or [] if _logging_group(config_path, item) is None]
        content = {"defaults": defaults} if parsed.defaults is not None else {}
        return ConfigResult(
            provider=self.provider,
            path=str(self.directory),
            config=OmegaConf.create(content),
            header={"package": parsed.package},
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:  # pyrefly: ignore[not-a-type]
        """Return the names of files and folders in a folder."""
        found = []
        folder = self.directory / config_path
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            if entry.is_dir() and results_filter in (None, ObjectType.GROUP) and not entry.name.startswith(("_", ".")):
                found.append(entry.name)
            elif entry.suffix == ".yaml" and entry.is_file() and results_filter in (None, ObjectType.CONFIG):
                found.append(entry.stem)
        return found


def _logging_group(config_path: str, item: Any) -> str | None:
    """Return the group of an entry such as `override hydra/job_logging: colorlog`, which has no effect; else None."""
    name = next(iter(item), "") if isinstance(item, dict) else item
    group = name.split(" ")[-1].partition("@")[0].lstrip("/")
    if config_path.startswith("hydra/") and group.partition("/")[0] in UNUSED_HYDRA_GROUPS:
        group = f"hydra/{group}"
    head, _, below = group.partition("/")
    return group if head == "hydra" and below.partition("/")[0] in UNUSED_HYDRA_GROUPS else None


class Composer:
    """Find and merge configuration files.

    Args:
        config_dir: the user's folder, searched first.
        environ: the environment, whose `STOKER_CONF` names folders that are searched after `./conf` and before the
            packaged files; None: that of this process.
        config_path: folder of the primary file, searched before all others and in place of `./conf`.

    Raises:
        UserError: `config_dir` or `config_path` is not a folder.
    """

    def __init__(
        self, config_dir: Path | None, environ: Mapping[str, str] | None = None, *, config_path: Path | None = None
    ) -> None:
        for option, folder in (("--config-path", config_path), ("--config-dir", config_dir)):
            if folder is not None and not folder.is_dir():
                raise UserError(f"{option} {folder}: there is no such folder")
        own = [folder for folder in (config_path, config_dir) if folder is not None]
        folders = environment.config_folders(environment.snapshot() if environ is None else environ)
        candidates = [*own, *([] if config_path else [Path("conf")]), *folders, PACKAGED_CONF]
        directories: list[Path] = []
        for candidate in candidates:
            if candidate.is_dir() and not any(candidate.samefile(known) for known in directories):
                directories.append(candidate.absolute())
        self._sources = [YamlSource(directory) for directory in directories]
        self._repository = Repository(self._sources)
        self.directories = tuple(directories)

    def is_group(self, name: str) -> bool:
        """Return True if `name` is a config group, such as `model`."""
        return bool(name) and self._repository.group_exists(name)

    def options(self, group: str) -> list[str]:
        """Return the options of a group, none of what is no group; with an empty name, the primary files."""
        return self._repository.get_group_options(group)

    def compose(self, config_name: str, choices: Sequence[Override]) -> Composition:
        """Merge the files that `config_name`, its defaults list and `choices` select.

        Raises:
            UserError: a file or choice does not exist, or a file cannot be read.
        """
        config_name = config_name.removesuffix(".yaml")
        self._check_exists(config_name)
        for choice in choices:
            self._check_choice(choice)
        found = self.defaults_list(config_name, choices)
        composition = Composition(choices=dict(found.known_choices))
        for config_path, package in found.files:
            self._merge(composition, config_path, package)
        composition.hydra = composition.tree.pop("hydra", None) or {}
        for path in [path for path in composition.origins if path.partition(".")[0] == "hydra"]:
            composition.hydra_origins[path] = composition.origins.pop(path)
        return composition

    def _check_exists(self, config_name: str) -> None:
        if self._repository.config_exists(config_name):
            return
        config_name = config_name.removesuffix(".yml")
        lines = [f"--config-name {config_name}: there is no such file"]
        for path in filter(Path.is_file, [*self._yml_files(config_name), Path(f"{config_name}.yml")]):
            lines = [f"--config-name {config_name}: rename {display_path(path)} to {config_name}.yaml"]
        names = self.options("")
        near = closest(config_name, names)
        if near:
            lines.append(f"    did you mean {near}?")
        local_file = Path(f"{config_name}.yaml")
        if local_file.is_file():
            lines.append(
                f"    {display_path(local_file)} exists: --config-dir {shlex.quote(str(local_file.parent))} "
                f"--config-name {shlex.quote(local_file.stem)}"
            )
        lines.append("    searched: " + ", ".join(map(display_path, self.directories)))
        lines.append("    found: " + (", ".join(names) or "nothing"))
        raise UserError(lines)

    def _yml_files(self, config_path: str) -> list[Path]:
        return [directory / f"{config_path.removesuffix('.yml')}.yml" for directory in self.directories]

    def _check_choice(self, choice: Override) -> None:
        value = choice.value()
        group = choice.key_or_group
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and not self._repository.config_exists(f"{group}/{name}"):
                raise UserError(self._no_option(group, name, f"{choice.input_line} (command line)"))

    def _no_option(self, group: str, name: str, origin: str) -> list[str]:
        options = self.options(group)
        near = closest(name, options)
        lines = [f"{origin}: there is no {group} `{name}`"]
        if replacement := REPLACED_CHOICES.get(f"{group}={name}"):
            lines.append(f"    fix: {replacement}")
        elif wrong := [*filter(os.path.isfile, self._yml_files(f"{group}/{name}"))]:
            lines.append(f"    fix: rename {display_path(wrong[0])} to {name.removesuffix('.yml')}.yaml")
        elif near:
            lines.append(f"    did you mean {group}={near}?")
        lines.append(f"    {group} can be: {', '.join(options) or 'nothing'}")
        return lines

    def source_of(self, config_path: str) -> YamlSource:
        """Return the source of a file that exists."""
        return next(source for source in self._sources if source.is_config(config_path))

    def defaults_list(self, config_name: str, choices: Sequence[Override]) -> DefaultsList:
        """Return the files that `config_name`, its defaults list and `choices` select.

        Raises:
            UserError: a file does not exist, or a defaults list is not valid.
        """
        try:
            found = compute_defaults_list(self._repository, config_name, [])
            outer = [choice for choice in choices if choice.key_or_group != _SAMPLER]
            for part in [outer] if len(outer) == len(choices) else [outer, choices]:
                known = found.known_choices
                adapted = [override for choice in part if (override := _as_change_or_add(choice, known)) is not None]
                if adapted:
                    found = compute_defaults_list(self._repository, config_name, adapted)
            return found
        except UserError:
            raise
        except DefaultsError as error:
            raise UserError(f"defaults list of {config_name}: {error}") from None
        except (HydraException, ValueError, AttributeError, TypeError, AssertionError) as error:
            raise UserError(self._defaults_problem(str(error), config_name)) from None

    def _defaults_problem(self, message: str, config_name: str) -> list[str]:
        """Return Hydra's message on a defaults list without its search path, with the nearest option."""
        shown = message.partition("Config search path")[0].strip().strip("\"'")
        lines = [line.strip() for line in shown.splitlines() if line.strip()]
        missing = re.search(r"(?:In '([^']*)': )?Could not find '(?:([^']*)/)?([^'/]*)'", message)
        if missing is None:
            found = re.match(r"(?:In '?([^':]+)'?: )?(.*)", lines[0] if lines else message)
            assert found is not None
            fix = "correct or remove the entry"
            if overridden := re.match(r"Could not override '([^'@]+)", found[2]):
                groups = self._repository.get_group_options("", ObjectType.GROUP)
                if not self.is_group(overridden[1]):
                    near = closest(overridden[1], groups)
                    return [
                        f"{self._entry(overridden[1]) or f'defaults list of {found[1]}'}: there is no group "
                        f"`{overridden[1]}`",
                        *([f"    did you mean {near}?"] if near else []),
                    ]
                fix = "name the group without `override`"
            elif (twice := re.match(r"(\S+) appears more than once", found[2])) and (at := self._entry(twice[1])):
                return [
                    f"{at}: the group {twice[1]} is chosen already, before this entry",
                    f"    fix: - override /{twice[1]}: NAME",
                ]
            return [
                f"defaults list of {found[1] or config_name}: {found[2]}",
                *(f"    {line}" for line in lines[1:12]),
                f"    fix: {fix}",
            ]
        where, group, name = missing.groups()
        where = config_name if where == "hydra/config" else where  # an `override` of the user's file
        origin = self._entry(group, name) or (f"defaults list of {where}" if where else "defaults list")
        if group and self.is_group(group):
            return self._no_option(group, name, origin)
        groups = self._repository.get_group_options("", ObjectType.GROUP)
        near = closest(group, groups) if group else closest(name, self.options(""))
        return [
            f"{origin}: there is no {f'group `{group}`' if group else f'file `{name}`'}",
            *([f"    did you mean {near}?"] if near else []),
        ]

    def _entry(self, group: str, name: str = "") -> str:
        """Return file and line of the last entry with a group, and name, in the defaults lists of the user's files that
        have been read; empty if there is none.
        """
        value = re.escape(name) or r"[^\s{]"
        choice = rf"(?:override\s+)?/?{re.escape(group or '')}(?:@\S+)?\s*:\s*{value}"
        entry, found = re.compile(rf"\s*(?:-|defaults\s*:\s*\[(?:.*,)?)\s*{choice}"), ""
        for config_path in self._repository.loaded:
            file = self.source_of(config_path).read(config_path)
            if file.path.is_relative_to(PACKAGED_CONF) or not file.defaults:
                continue
            for number, line in enumerate(file.path.read_text(encoding="utf-8").splitlines(), 1):
                if entry.match(line):
                    found = f"{display_path(file.path)}:{number}"
        return found

    def _merge(self, composition: Composition, config_path: str, package: str) -> None:
        source = self.source_of(config_path)
        file = source.read(config_path)
        is_own = source.directory == PACKAGED_CONF and config_path.startswith("hydra/")
        if file.path not in composition.files and not is_own:
            composition.files.append(file.path)
        tree = dict(file.tree)
        for item in file.defaults or []:
            if (group := _logging_group(config_path, item)) is not None:
                rule = (
                    f"`{group}` in the defaults list of {display_path(file.path)} has no effect: stoker logs by itself"
                )
                composition.notes.append(Finding.info(("hydra",), rule))
        placed: Tree = {}
        if package:
            put(placed, package, tree)
        else:
            placed = tree
        written = {path: get(tree, path) for path in file.lines}
        replaced = {join(package, path) for path, value in written.items() if not isinstance(value, dict)}
        shown = display_path(file.path)
        for stale in [known for known in composition.origins if not replaced.isdisjoint(parents_of(known))]:
            del composition.origins[stale]
        for path, line in file.lines.items():
            if isinstance(written[path], dict) and written[path]:
                continue
            full = join(package, path)
            composition.origins[full] = f"{shown}:{line}"
            if config_path.startswith("model/"):
                composition.preset_name = config_path.removeprefix("model/")
                composition.preset[full] = written[path]
            if source.directory == PACKAGED_CONF:
                composition.packaged_paths.add(full)
            else:
                composition.packaged_paths.discard(full)
        composition.tree = merged(composition.tree, placed)


def display_path(path: Path) -> str:
    """Return a path for messages: relative to the working directory or the package, if it is below one of them."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    with contextlib.suppress(ValueError):
        return str(Path("stoker/conf") / path.relative_to(PACKAGED_CONF))
    return str(path)


def _as_change_or_add(choice: Override, known: Mapping[str, object]) -> Override | None:
    """Return the choice as `group=x` or `+group=x`, whichever Hydra needs; None if `group=null` changes nothing."""
    if choice.key_or_group == _SAMPLER and _SAMPLER not in known:
        raise UserError(f"{choice.input_line} (command line): acts with hydra/sweeper=optuna only; add that")
    group = chosen_group(choice)
    if choice.is_delete():
        return _check_deletion(choice, group, known)
    adapted = copy(choice)
    if choice.value() is None:
        adapted.type = OverrideType.DEL
        return adapted if known.get(group) is not None else None
    adapted.type = OverrideType.CHANGE if group in known else OverrideType.ADD
    return adapted


def _check_deletion(choice: Override, group: str, known: Mapping[str, object]) -> Override:
    """Check that `~group` deletes a chosen file, and `~group=x` the file x.

    Raises:
        UserError: there is no such choice to delete.
    """
    chosen, named = known.get(group), choice.value()
    if group in known and named in (None, chosen):
        return choice
    lines = [f"{choice.input_line} (command line): "]
    if chosen is None:
        lines[0] += f"no file of the group {group} is chosen, so there is none to remove"
        lines.append("    fix: leave it out; ~KEY resets one key to its default")
    else:
        lines[0] += f"the file of the group {group} is {chosen}, not {named}"
        lines.append(f"    fix: ~{group}, or ~{group}={chosen}")
    raise UserError(lines)


def _error_text(path: Path, error: YamlError) -> str:
    where = f"{display_path(path)}:{error.line}" if error.line else display_path(path)
    return f"{where}: {error.message}"
