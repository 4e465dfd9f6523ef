"""The `hydra:` block of files and command line: what it sets here, and the values of `${hydra:...}` and `${now:...}`.

`hydra.run.dir` is the run directory, `hydra.sweep` that of a sweep, `hydra.launcher` and `hydra.sweeper` start and
choose its jobs. Every other key is refused with a reason, or noted as having no effect. Does not import Hydra.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from ...models.config.key_block import ConfigBlock, Finding
from ..utils.redaction import redact
from . import dotted_paths
from .dotted_paths import Tree
from .interpolation import InterpolationError, MissingKeyError, Resolver, has_interpolation
from .override_typos import quoted_override
from .problems import Problem
from .run_config import HydraSettings, Origin
from .schema import hydra as schema
from .schema.key_index import format_value
from .suggest import closest
from .yaml_reader import SWEPT_DOT

if TYPE_CHECKING:
    from .overrides import ValueOverride

RUN_DIRECTORY = "exp_manager.explicit_log_dir"
_LOGGING = "stoker prints progress and writes its metrics to the run directory"
_UNUSED: Mapping[str, str] = {
    "verbose": _LOGGING,
    "job_logging": _LOGGING,
    "hydra_logging": _LOGGING,
    "output_subdir": "the run directory holds the configuration as config.resolved.json",
    "help": "`stoker VERB --help` is fixed",
    "hydra_help": "`stoker VERB --help` is fixed",
    "env": "it sets nothing",
    "searchpath": "add folders with --config-dir or the variable STOKER_CONF",
    "job.env_copy": "jobs have the environment of the sweep",
}
_REFUSED: Mapping[str, str] = {
    "job.chdir": "the working directory stays that of the command; write paths relative to it",
    "job.env_set": "write env_vars: {NAME: value}",
    "callbacks": "files name no code; register a callback from Python, with --import MODULE",
    "runtime": "it is what Hydra finds out; refer to it as ${hydra:runtime.cwd}",
    "overrides": "it is what the command line says",
    "job": "it is set for every job; refer to it as ${hydra:job.num}",
}
_HARMLESS = (None, False, [], {})
_WITHOUT_VALUE: Mapping[str, str] = {
    "hydra.job.num": "has a value in the jobs of `stoker train -m` only",
    "hydra.job.id": "has no value: a job is composed before it is submitted; use hydra:job.num",
    "hydra.runtime.output_dir": "has a value only if hydra.run.dir, exp_manager.explicit_log_dir or, in a sweep, "
    "hydra.sweep.dir sets the directory",
    "hydra.run.dir": "has no value; set it, or exp_manager.explicit_log_dir",
    "hydra.sweep.dir": "has no value; set it",
}
_REFERENCES = (
    *("job.num", "job.name", "job.override_dirname", "job.config_name", "runtime.cwd", "runtime.choices"),
    *("runtime.version", "runtime.output_dir", "run.dir", "sweep.dir", "sweep.subdir", "mode"),
)
"""Names that `${hydra:...}` can refer to."""
ModeNames = {"RUN": False, "MULTIRUN": True}


class _Draft(Protocol):
    """The part of a configuration that is being composed (`draft.py`) which is needed here."""

    tree: Tree
    origins: dict[str, Origin]
    findings: list[Finding]

    def origin_text(self, path: str) -> str:
        """Return the origin of the value at `path` as text."""
        ...


@dataclass(frozen=True, slots=True)
class RunContext:
    """Values of `${hydra:...}` and `${now:...}`, fixed before a run or sweep starts.

    Attributes:
        is_multirun: a sweep, or one of its jobs.
        job_number: of a job of a sweep.
        swept: the overrides that vary between its jobs.
        now: the local time; None if each of several processes would have its own.
    """

    is_multirun: bool = False
    job_number: int | None = None
    swept: tuple[str, ...] = ()
    now: time.struct_time | None = field(default_factory=time.localtime)


@dataclass
class HydraNode:
    """The `hydra:` block as composed.

    Attributes:
        tree: values as written, without `hydra.`.
        origins: origin by path, with `hydra.`.
        choices: the chosen file of each group.
        config_name: the primary file.
    """

    tree: Tree
    origins: dict[str, Origin]
    choices: Mapping[str, str | None]
    config_name: str
    context: RunContext
    problems: list[Problem] = field(default_factory=list)
    _has_run_directory: bool = False

    def apply(self, edit: ValueOverride) -> None:
        """Apply an override of a key below `hydra.`."""
        path = edit.path.removeprefix("hydra.")
        for known in [known for known in self.origins if f"{known}.".startswith(f"{edit.path}.")]:
            del self.origins[known]
        if edit.is_reset:
            dotted_paths.remove(self.tree, path)
            return
        dotted_paths.put(self.tree, path, edit.value)
        self.origins[edit.path] = Origin("override", edit.typed)

    @property
    def is_multirun(self) -> bool:
        """True for a sweep, of `-m` or `hydra.mode: MULTIRUN`."""
        return self.context.is_multirun or dotted_paths.get(self.tree, "mode") == "MULTIRUN"

    @property
    def references(self) -> Tree:
        """The tree that `${hydra:...}` refers to."""
        job = {"name": Path(self.config_name).name, "config_name": self.config_name, "chdir": False}
        known: Tree = {
            "mode": "MULTIRUN" if self.is_multirun else "RUN",
            "job": job,
            "runtime": {
                "cwd": str(Path.cwd()),
                "choices": {**self.choices},
                "version": importlib.metadata.version("hydra-core"),
            },
            "sweep": {"subdir": "${hydra.job.num}"},
        }
        found = dotted_paths.merged(known, self.tree)
        if self.context.job_number is not None:
            found["job"] |= {"num": self.context.job_number, "override_dirname": self._override_dirname()}
        if self.is_multirun and dotted_paths.get(found, "sweep.dir"):
            found["runtime"]["output_dir"] = "${hydra.sweep.dir}/${hydra.sweep.subdir}"
        elif not self.is_multirun and self._has_run_directory:
            found["runtime"]["output_dir"] = f"${{{RUN_DIRECTORY}}}"
        return found

    def _override_dirname(self) -> str:
        options = dotted_paths.get(self.tree, "job.config.override_dirname") or {}
        kv_sep, item_sep = options.get("kv_sep", "="), options.get("item_sep", ",")
        excluded = options.get("exclude_keys") or ()
        words = [text.lstrip("+").replace("/", "_").partition("=") for text in self.context.swept]
        return item_sep.join(sorted(f"{key}{kv_sep}{value}" for key, _, value in words if key not in excluded))

    def set_run_directory(self, draft: _Draft) -> None:
        """Set the run directory to `hydra.run.dir`; add a problem if another key sets another one."""
        written = dotted_paths.get(self.tree, "run.dir")
        self._has_run_directory = dotted_paths.get(draft.tree, RUN_DIRECTORY) is not None
        if self.is_multirun or written is None:
            return
        if written == ".":  # of NeMo's files, and of Hydra's before 1.2: no directory of its own
            rule = "`hydra.run.dir: .` has no effect: exp_manager names the run directory"
            draft.findings.append(Finding.info(("hydra.run.dir",), rule))
            return
        given = dotted_paths.get(draft.tree, RUN_DIRECTORY)
        if given in (None, written):
            dotted_paths.put(draft.tree, RUN_DIRECTORY, written)
            self._has_run_directory = True
            draft.origins[RUN_DIRECTORY] = self.origins.get("hydra.run.dir", Origin("default", "hydra.run.dir"))
            return
        also = (f"{RUN_DIRECTORY} = {format_value(given)} ({draft.origin_text(RUN_DIRECTORY)})",)
        rule = "and `exp_manager.explicit_log_dir` both set the run directory, to different values"
        self.problems.append(Problem(*self._shown("run.dir", written), rule, "give one of them", also))

    def settings(self, resolver: Resolver, findings: list[Finding]) -> HydraSettings:
        """Return the settings of the block; invalid ones are added to `problems`, ignored ones to `findings`."""
        unused: dict[str, str] = {}
        for path, value in dotted_paths.leaves(self.tree):
            head = path.partition(".")[0]
            if head not in ("launcher", "sweeper") and path not in ("run.dir", "sweep.dir", "sweep.subdir", "mode"):
                self._check_other(path, value, unused)
        for key, reason in unused.items():
            findings.append(Finding.info((f"hydra.{key}",), f"`hydra.{key}` has no effect: {reason}"))
        mode = dotted_paths.get(self.tree, "mode")
        if mode is not None and mode not in ModeNames:
            self._add("mode", mode, "must be RUN or MULTIRUN")
        launcher = self._block("launcher", schema.LAUNCHERS, resolver)
        sweeper = self._block("sweeper", schema.SWEEPERS, resolver)
        if not self.is_multirun:
            for name in ("launcher", "sweeper"):
                origins = [path for path, origin in self.origins.items() if path.startswith(f"hydra.{name}.")]
                if any(self.origins[path].kind == "override" for path in origins):
                    rule = f"`hydra.{name}` acts in a sweep only: stoker train -m"
                    findings.append(Finding.info((f"hydra.{name}",), rule))
        of_sweep = self.is_multirun and self.context.job_number is not None
        return HydraSettings(
            is_multirun=self.is_multirun,
            sweep_dir=self._directory("sweep.dir", resolver) if self.is_multirun else None,
            sweep_subdir=self._directory("sweep.subdir", resolver) or "" if of_sweep else "",
            launcher=launcher,
            sweeper=sweeper,
        )

    def _check_other(self, path: str, value: Any, unused: dict[str, str]) -> None:
        """Check a key that is neither a directory nor of a launcher or sweeper."""
        if path == "job.name" or path.startswith("job.config.override_dirname."):
            return
        above = (path, *dotted_paths.parents_of(path))
        for key in above:
            if key in _UNUSED:
                unused.setdefault(key, _UNUSED[key])
                return
        reason = next((_REFUSED[key] for key in above if key in _REFUSED), None)
        if reason is None:
            names = ["run.dir", "sweep.dir", "sweep.subdir", "job.name", "mode", "launcher", "sweeper", *_UNUSED]
            near = closest(path, names)
            self._add(path, value, "Hydra has no such key", f"did you mean hydra.{near}?" if near else "remove it")
        elif value not in _HARMLESS:
            self._add(path, value, "is not supported", reason)

    def _directory(self, path: str, resolver: Resolver) -> str | None:
        if dotted_paths.get(self.references, path) is None:
            return None
        value = self._resolved(path, resolver)
        if value is not None and (not isinstance(value, (str, int)) or value == ""):
            rule = "is empty; name a directory, or leave it out" if value == "" else "must be the path of a directory"
            self._add(path, value, rule)
        return None if value is None else str(value)

    def _resolved(self, path: str, resolver: Resolver) -> Any:
        try:
            return resolver.resolve(f"hydra.{path}").value
        except InterpolationError as error:
            self._add(path, dotted_paths.get(self.references, path), f"it {error}")
            return None

    def _block(self, name: str, kinds: Mapping[str, type[ConfigBlock]], resolver: Resolver) -> Any:
        """Return the typed block at `name`, which its `_target_` selects; the first of `kinds` if it is not valid."""
        given = dotted_paths.get(self.tree, name)
        tree: Tree = dict(given) if isinstance(given, dict) else {}
        target = tree.pop("_target_", next(iter(kinds)))
        kind = kinds.get(target)
        if kind is None:
            near = closest(str(target), kinds)
            fix = f"did you mean {near}?" if near else f"choose hydra/{name.replace('.', '/')}="
            self._add(f"{name}._target_", target, "is none that stoker knows; it imports nothing by name", fix)
            return next(iter(kinds.values()))()
        for key, value in tree.items():
            if has_interpolation(value):
                tree[key] = self._resolved(f"{name}.{key}", resolver)
        if "params" in tree and isinstance(tree["params"], dict):
            tree["params"] = {key.replace(SWEPT_DOT, "."): value for key, value in tree["params"].items()}
        if kind is schema.OptunaSweeper and "sampler" in tree:
            tree["sampler"] = self._block(f"{name}.sampler", schema.SAMPLERS, resolver)
        for key in [key for key in tree if f"hydra.{name}.{key}" in schema.REFUSED]:
            self._add(f"{name}.{key}", tree.pop(key), "is not supported", schema.REFUSED[f"hydra.{name}.{key}"])
        try:
            return kind.model_validate(tree)
        except ValidationError as error:
            for item in error.errors(include_url=False, include_context=False):
                key, *below = map(str, item["loc"])
                if key == "params" and below:
                    self._add_swept(f"{name}.params", below[0], tree["params"][below[0]])
                elif item["type"] == "extra_forbidden":
                    rule, fix = f"{kind.__name__} has no such key", _unknown_key_fix(name, key, kind, kinds)
                    self._add(f"{name}.{key}", item["input"], rule, fix)
                else:
                    path = ".".join([name, key, *below[:1]])
                    self._add(path, item["input"], item["msg"].replace("Input should be", "must be"))
            return kind()

    def _add_swept(self, block: str, key: str, value: Any) -> None:
        """Add one problem for a value of `params` that is not text or a number; pydantic has one for each type."""
        if any(problem.key == f"hydra.{block}.{key}" for problem in self.problems):
            return
        leaf = key
        if isinstance(value, dict) and value:
            below, value = next(iter(dotted_paths.leaves(value)))
            leaf = f"{key}.{below}"
        text = ",".join(map(format_value, value)) if isinstance(value, list) else format_value(value)
        text = '"' + text.replace('"', "") + '"'
        rule = "must be text that lists the values of a key, whose whole name stands before it"
        self._add(f"{block}.{key}", value, rule, f"write {quoted_override(f'hydra.{block}.{leaf}', text)}")

    def _add(self, path: str, value: Any, rule: str, fix: str = "") -> None:
        self.problems.append(Problem(*self._shown(path, value), rule, fix))

    def _shown(self, path: str, value: Any) -> tuple[str, str, str]:
        full = f"hydra.{path}"
        near = (full, *dotted_paths.parents_of(full), full.replace(".", SWEPT_DOT))
        origin = next((self.origins[key] for key in near if key in self.origins), None)
        text = "" if origin is None else origin.text
        if origin is not None and origin.kind == "override":
            text = f"{redact(text)} (command line)"
        return full, format_value(value), text


def missing_value(path: str) -> MissingKeyError:
    """Return the error for a reference to a value of `hydra:` that does not exist."""
    name = path.removeprefix("hydra.")
    reason = next((text for key, text in _WITHOUT_VALUE.items() if f"{path}.".startswith(f"{key}.")), None)
    near = None if reason else closest(name, _REFERENCES)
    if near:
        reason = f"does not exist here; did you mean ${{hydra:{near}}}?"
    return MissingKeyError(path, f"refers to `hydra:{name}`, which {reason or 'does not exist here'}")


def _unknown_key_fix(name: str, key: str, kind: type[ConfigBlock], kinds: Mapping[str, type[ConfigBlock]]) -> str:
    """Return the fix for a key that `kind` does not have: the choice that has it, or the nearest key."""
    selecting = [
        schema.CHOICES[other] for other in kinds.values() if other in schema.CHOICES and key in other.model_fields
    ]
    if selecting:
        return f"it is a key of {' and '.join(selecting)}: add {selecting[-1]}"
    near = closest(key, [field for block in (kind, *kinds.values()) for field in block.model_fields])
    if near:
        return f"did you mean hydra.{name}.{near}?"
    keys = ", ".join(kind.model_fields)
    return f"keys: {keys}" if keys else "it has no keys; leave it out"
