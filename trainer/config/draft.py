"""A configuration between composition and validation: raw values, their origins, and the problems found so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.config.key_block import Finding
from ...models.config.model import Family
from ..utils.errors import UserError
from ..utils.redaction import is_secret, redact, redact_value
from ..utils.text import truncate_lines
from . import dotted_paths, expand_t5, infer_family, validate
from .dotted_paths import MISSING, Tree
from .hydra_node import HydraNode, missing_value
from .interpolation import ENVIRONMENT_NAME, InterpolationError, MissingKeyError, Resolver, has_interpolation
from .missing_values import fill_missing, missing_value_problems
from .nemo import launcher_files, nemo_spellings
from .nemo.key_states import OWN_VALUES, KeyStates, Verdict, is_known_key, suggest_keys
from .nemo.key_table import KeyState, find_row
from .override_typos import quoted_override
from .problems import ConfigError, KeyReport, Problem
from .rules import all_rules
from .rules.process_rules import PARALLEL_SIZE_KEYS
from .rules.rule_context import RuleContext
from .run_config import DEFAULT_ORIGIN, HydraSettings, Origin, Preset, RunConfig
from .schema.key_index import defaults_tree, find_key, format_value, schema_blocks, schema_keys
from .schema.optim import PHASES
from .schema.root import RootBlock, family_of

if TYPE_CHECKING:
    from .overrides import ValueOverride

_NO_SUCH_MODEL = "start from a preset (model=gpt_125m, t5_small or bert_base) instead of this file"
_GENERATE = "`stoker generate --checkpoint DIR --prompt TEXT`, whose options stand for the keys of `inference`"
_EVALUATE = "`stoker evaluate`, `stoker generate` or `stoker convert`, each with the path of a checkpoint"
_MODEL_FILES = ("gpt_model_file", "virtual_prompt_model_file")
_OTHER_PROGRAMS = (
    ("quantization", "quantization", "`stoker finetune` with a file without it: weights stay in 16 or 32 bits"),
    ("inference", "text generation", _GENERATE),
    ("common_inference_params", "text generation", _GENERATE),
    (_MODEL_FILES[0], "evaluation or export of a model", _EVALUATE),
    (_MODEL_FILES[1], "inference with learned prompts", _EVALUATE),
)
"""Keys of files of other programs of NeMo: key or block, program, and what to use instead."""
_TRAINING_BLOCKS = ("model.optim", "model.data.train_ds")
"""Blocks that only a file of training has."""
_SCHED = "model.optim.sched"
_STEPS_OR_RATIO = {
    f"{_SCHED}.{part}_{one}": f"{_SCHED}.{part}_{other}"
    for part in PHASES
    for one, other in (("steps", "ratio"), ("ratio", "steps"))
}
"""Key and its alternative form: `X_steps` and `X_ratio` set the same value."""


class Draft:
    """Configuration under construction: raw values, origins, and the problems found so far.

    Args:
        tree: values as written.
        origins: origin by path.
        environ: the caller's environment variables.
        literal: do not resolve interpolations (of untrusted documents).

    Attributes:
        packaged: paths set by packaged files.
        preset: the model's preset.
        stage: stage of the NeMo-Framework-Launcher that references to its own block name, if known.
        hydra: the `hydra:` block; None for a document.
    """

    def __init__(
        self, tree: Tree, origins: dict[str, Origin], environ: Mapping[str, str], literal: bool = False
    ) -> None:
        self.tree = tree
        self.origins = origins
        self.variables = environ
        self.literal = literal
        self.problems: list[Problem] = []
        self.findings: list[Finding] = []
        self.packaged: frozenset[str] = frozenset()
        self.preset = Preset()
        self.stage = ""
        self.hydra: HydraNode | None = None
        self._moved: dict[str, str] = {}
        self._raw: Tree = {}
        self._resolved: Tree = {}
        self._from_environment: set[str] = set()
        self._unset: dict[str, frozenset[str]] = {}
        self._used_variables: set[str] = set()
        self._referenced: set[str] = set()
        self._family: Family = "gpt"
        self._family_hint = infer_family.infer_family(tree)  # before overrides reset the keys it is inferred from

    def apply(self, edit: ValueOverride) -> None:
        """Apply one value override. An unknown key stays in the tree, to be reported with all others."""
        origin = Origin("override", edit.typed)
        if edit.is_reset:
            if edit.has_value and is_known_key(edit.path) and not self._matches_reset_value(edit):
                return
            for path in [known for known in self.origins if _is_at_or_below(known, edit.path)]:
                del self.origins[path]
            if dotted_paths.remove(self.tree, edit.path):
                self._remove_emptied(dotted_paths.parent_of(edit.path))
            elif not is_known_key(edit.path):
                dotted_paths.put(self.tree, edit.path, None)
                self.origins[edit.path] = origin
            return
        value = _text_keys(edit.value) if isinstance(edit.value, dict) else edit.value
        if isinstance(value, dict) and value and not _is_open(edit.path):
            for path, leaf in dotted_paths.leaves(value, edit.path):
                dotted_paths.put(self.tree, path, leaf)
                self.origins[path] = origin
            return
        for path in [known for known in self.origins if known.startswith(edit.path + ".")]:
            del self.origins[path]
        dotted_paths.put(self.tree, edit.path, value)
        self.origins[edit.path] = origin
        if edit.value is not None and self.kind_of(_STEPS_OR_RATIO.get(edit.path, "")) == "file":
            self._replace_other_form(edit.path)

    def _remove_emptied(self, block: str) -> None:
        """Remove a block whose last key was reset, and those above it that are empty then: they are as if not given."""
        while block and dotted_paths.get(self.tree, block) == {}:
            dotted_paths.remove(self.tree, block)
            block = dotted_paths.parent_of(block)

    def _matches_reset_value(self, edit: ValueOverride) -> bool:
        """Return True if the value matches that of `~key=VALUE`; otherwise report a problem."""
        key = find_key(edit.path)
        current = dotted_paths.get(self.tree, edit.path, key.default if key else None)
        if current == edit.value and isinstance(current, bool) == isinstance(edit.value, bool):
            return True
        expected = format_value(edit.value)
        origin = self.origin_text(edit.path)
        rule = f"is reset only if it is {redact_value(edit.path, expected)}; its value is from {origin}"
        fix = f"~{edit.path}, or {quoted_override(edit.path, expected)}"
        typed = f"{redact(edit.typed)} (command line)"
        self.problems.append(Problem(edit.path, format_value(current), typed, rule, fix))
        return False

    def prefer_users_form(self) -> None:
        """Let `X_steps` of a user's file replace `X_ratio` of a packaged one, and vice versa."""
        for path, other in _STEPS_OR_RATIO.items():
            if path not in self.packaged and other in self.packaged and dotted_paths.get(self.tree, path) is not None:
                self._replace_other_form(path)

    def _replace_other_form(self, path: str) -> None:
        other = _STEPS_OR_RATIO[path]
        value = dotted_paths.get(self.tree, other)
        if value is None:
            return
        rule = f"it replaces `{other}={format_value(value)}` of {self.origins.get(other, DEFAULT_ORIGIN)}"
        self.findings.append(Finding.info((path,), rule))
        dotted_paths.remove(self.tree, other)
        del self.origins[other]

    def finish(self, files: tuple[Path, ...]) -> RunConfig:
        """Resolve and validate after all overrides are applied.

        Raises:
            UserError: a configuration of another program of NeMo.
            ConfigError: the configuration is not valid.
        """
        self._infer_family()
        settings = self._resolve()
        self._family = family_of(self._resolved.get("model"))
        for finding in expand_t5.expand_stack_keys(self._resolved, self.kind_of, self._moved):
            self._add_finding(finding)
        for finding in nemo_spellings.apply_nemo_aliases(self._resolved, self._moved):
            self._add_finding(finding)
        account = list(self._take_used_variables())
        states = KeyStates(
            self._resolved, self.origin_text, lambda path: self.kind_of(path) == "override", self._referenced
        )
        acting: Tree = {}
        for verdict in states.verdicts:
            if verdict.state is KeyState.ACTS:
                dotted_paths.put(acting, verdict.path, verdict.value)
            else:
                account.append(self._key_account(verdict))
        self.problems.extend(states.problems())
        self.findings.extend(states.findings())
        needed = self._report_missing(acting)
        facts, wrong_types, wrong = self._typed(acting)
        root = facts.root
        self.problems.extend(wrong_types)
        wrong |= needed.union(problem.key for problem in self.problems)
        # A rule about a value that a fix above replaces would contradict that fix, or be moot after it.
        unknown = wrong.union(*(problem.paths_in_fix() for problem in self.problems))
        # With an invalid parallel size the data-parallel size is unknown.
        unknown |= {"trainer.devices"} if wrong & PARALLEL_SIZE_KEYS else set()
        for finding in all_rules.run_rules(facts):
            if not unknown.intersection(finding.keys):
                self._add_finding(finding)
        list_key_reports = partial(self._key_reports, root, wrong, account)
        findings = tuple(replace(finding, origin=self._finding_origin(finding)) for finding in self.findings)
        if self.problems:
            raise ConfigError(list(dict.fromkeys(self.problems)), list_key_reports(), findings)
        document = self._document(root)
        origins = {path: DEFAULT_ORIGIN for path, _ in dotted_paths.leaves(document)} | self.origins
        return RunConfig(
            root=root,
            origins=origins,
            document=document,
            findings=findings,
            list_key_reports=list_key_reports,
            files=files,
            preset_keys=frozenset(path for path in self.packaged if self.kind_of(path) == "file"),
            preset=self.preset,
            hydra=settings,
        )

    def origin_text(self, path: str) -> str:
        """Return the origin of the value at `path` as text."""
        origin = self._origin_at(path)
        return f"{redact(origin.text)} (command line)" if origin.kind == "override" else origin.text

    def _origin_at(self, path: str) -> Origin:
        old = self._moved.get(path)
        absent = dotted_paths.get(self._resolved, path, self._resolved) is self._resolved
        if old is None and path in self._moved.values() and absent:
            return DEFAULT_ORIGIN  # the value given here was moved to another key
        path = old or path
        while path:
            if path in self.origins:
                return self.origins[path]
            path = dotted_paths.parent_of(path)
        return DEFAULT_ORIGIN

    def kind_of(self, path: str) -> str:
        """Return the kind of origin: `file`, `override`, `document` or `default`."""
        return self.origins.get(path, DEFAULT_ORIGIN).kind

    def _infer_family(self) -> None:
        """Infer `model.family` of a NeMo file from its keys, and reject files of other programs and models."""
        trains = any(dotted_paths.get(self.tree, path) is not None for path in _TRAINING_BLOCKS)
        for name, program, instead in _OTHER_PROGRAMS:
            if trains and instead is _GENERATE:  # a file of fine-tuning, with options for generation afterwards
                continue
            options = self.tree.get(name)
            if (options and isinstance(options, dict)) or (name in _MODEL_FILES and name in self.tree):
                first = f"{name}.{next(iter(options))}" if isinstance(options, dict) else name
                origin = self.origin_text(first)
                raise UserError(f"{origin}: a file of NeMo's {program}, not of training; use {instead}")
        other = infer_family.unsupported_model(self.tree)
        if other is not None:  # further problems would be misleading
            path, model_name = other
            rule = f"a configuration of NeMo's {model_name}; stoker supports GPT, T5 and BERT"
            raise ConfigError([self._problem(path, dotted_paths.get(self.tree, path), rule, _NO_SUCH_MODEL)])
        path = "model.family"
        inferred = infer_family.infer_family(self.tree) or self._family_hint
        if inferred is not None and dotted_paths.get(self.tree, path) is None:
            family, reason = inferred
            dotted_paths.put(self.tree, path, family)
            self.origins[path] = Origin("default", reason)
            self.findings.append(Finding.info((path,), f"`{family}`, since {reason}", f"{path}={family}"))
        self._family = family_of(self.tree.get("model"))

    def _set_by_user(self, given: frozenset[str]) -> frozenset[str]:
        """Return the paths set by an override, a document or a user's file."""
        return frozenset(path for path in given if path not in self.packaged or self.kind_of(path) != "file")

    def resolver(self, tree: Tree) -> Resolver:
        """Return a resolver of the interpolations of `tree`."""
        alias = partial(launcher_files.without_stage, stage=self.stage)
        if self.hydra is not None:
            tree = {**tree, "hydra": self.hydra.references}
        now = None if self.hydra is None else self.hydra.context.now
        return Resolver(tree, self.variables, nemo_default, takes_only_text, launcher_files.is_variable, alias, now)

    def _resolve(self) -> HydraSettings | None:
        """Fill `_resolved`, and return the settings of `hydra:`.

        An interpolation that cannot be resolved is a problem if its key could have an effect.
        """
        if self.hydra is not None:
            self.hydra.set_run_directory(self)
        whole = dotted_paths.merged(defaults_tree(self._family), self.tree)
        resolver = self.resolver(whole)
        settings = None if self.hydra is None else self.hydra.settings(resolver, self.findings)
        broken: dict[tuple[str, str], list[str]] = {}
        self.problems.extend([] if self.hydra is None else self.hydra.problems)
        for path, raw in list(dotted_paths.leaves(self.tree)):
            if self.literal or not has_interpolation(raw):
                dotted_paths.put(self._resolved, path, raw)
                continue
            try:
                found = resolver.resolve(path)
                if found.from_environment or has_interpolation(found.value):
                    expanded = resolver.expand(path, lambda key: key in schema_keys(self._family))
                    self._from_environment.add(path)
                    dotted_paths.put(self._raw, path, expanded)
            except InterpolationError as error:
                row = find_row(path, self._family)
                acts = path in schema_keys(self._family)
                if row is not None and not acts and (row.state is KeyState.HISTORICAL or row.switch):
                    dotted_paths.put(self._resolved, path, raw)
                else:
                    at = broken.setdefault((f"it {error}", self._reference_suggestion(path, error)), [])
                    at.insert(0 if error.at == path else len(at), path)
                continue
            unset = found.sources & resolver.unset
            if unset:
                self._unset[path] = unset
            row = None if path in schema_keys(self._family) else find_row(path, self._family)
            value = MISSING if unset else found.value
            if row is not None and not row.same_as and any(map(launcher_files.is_variable, unset)):
                value = raw  # a value was given: a key that is not supported is refused before the variable is set
            dotted_paths.put(self._resolved, path, value)
            if row is None:
                self._used_variables.update(filter(launcher_files.is_variable, found.sources))
            self._referenced |= found.sources - {path}
        self.problems.extend(self._broken(rule, fix, paths) for (rule, fix), paths in broken.items())
        return settings

    def _broken(self, rule: str, fix: str, paths: Sequence[str]) -> Problem:
        """Return one problem for all keys with an interpolation that cannot be resolved for the same reason."""
        first, *others = paths
        values = {path: redact_value(path, format_value(dotted_paths.get(self.tree, path))) for path in others}
        also = [f"{path} = {value} ({self.origin_text(path)})" for path, value in values.items()]
        problem = self._problem(first, dotted_paths.get(self.tree, first), rule, fix)
        return replace(problem, also=tuple(truncate_lines(also, 5)))

    def _reference_suggestion(self, path: str, error: InterpolationError) -> str:
        if not isinstance(error, MissingKeyError):
            return ""
        above = dotted_paths.parent_of(error.target)
        if find_row(error.target, self._family) or find_row(above, self._family):
            return f"{path}=VALUE"  # the key does not act, and may have been left out as advised
        blocks = schema_blocks(self._family)
        near = [path for path in suggest_keys(error.target, self._family) if path not in blocks]
        if near:
            return f"did you mean ${{{near[0]}}}?"
        return "" if error.target.startswith("hydra.") else OWN_VALUES

    def _problem(self, path: str, value: Any, rule: str, fix: str) -> Problem:
        return Problem(path, format_value(value), self.origin_text(path), rule, fix)

    def _typed(self, acting: Tree) -> tuple[RuleContext, list[Problem], set[str]]:
        """Return the typed keys for the rules, the problems of types, and the paths of invalid keys."""
        given = frozenset(path for path, _ in dotted_paths.leaves(acting))
        root, problems, wrong = validate.validate_types(acting, self.origin_text)
        environment = frozenset(self._from_environment)
        is_saved = any(origin.kind == "document" for origin in self.origins.values())
        facts = RuleContext(root, given, self._set_by_user(given), self.variables, environment, is_saved)
        return facts, problems, wrong

    def _take_used_variables(self) -> Iterator[KeyReport]:
        """Remove the launcher's keys that keys with an effect refer to, and yield their reports."""
        for path in sorted(self._used_variables):
            value = dotted_paths.get(self._resolved, path, MISSING)
            if value != MISSING and dotted_paths.remove(self._resolved, path):
                shown = format_value(dotted_paths.get(self._raw, path, value))
                yield KeyReport(path, shown, KeyState.HISTORICAL, self.origin_text(path), f"used as ${{{path}}}")

    def _report_missing(self, acting: Tree) -> set[str]:
        """Remove keys without a value from `acting`; report those that a run needs, and return their paths.

        These get any value, so that no rule reports their absence too.
        """
        missing = [path for path, value in dotted_paths.leaves(acting) if value == MISSING]
        for path in missing:
            dotted_paths.remove(acting, path)
        unread = fill_missing(acting, missing, self._family, lambda keys: all_rules.run_rules(self._typed(keys)[0]))
        if unread:
            rule = f"no value, and no effect here: {', '.join(sorted(unread))}"
            self.findings.append(Finding.info(tuple(sorted(unread)), rule))
        causes: dict[str, list[str]] = {}
        for path in (path for path in missing if path not in unread):
            for cause in sorted(self._unset.get(self._moved.get(path, path), {path})):
                causes.setdefault(cause, []).append(path)
        self.problems.extend(missing_value_problems(causes, self.origin_text))
        return set(missing) - unread

    def _add_finding(self, finding: Finding) -> None:
        """Record a finding; an error becomes a problem with values and origins."""
        for key in finding.keys:
            if key in self._moved and finding.fix == f"~{key}":
                finding = replace(finding, fix=f"~{self._moved[key]}")
        if finding.level != "error":
            self.findings.append(finding)
            return
        first, *others = finding.keys
        also = tuple(f"{key} = {self._shown(key)} ({self.origin_text(key)})" for key in others)
        self.problems.append(
            Problem(first, self._shown(first), self.origin_text(first), finding.message, finding.fix, also)
        )

    def _finding_origin(self, finding: Finding) -> str:
        """Return the origin of the first key of a finding; empty for a default."""
        first = next(iter(finding.keys), "")
        return "" if self._origin_at(first).kind == "default" else self.origin_text(first)

    def _shown(self, path: str) -> str:
        value = dotted_paths.get(self._raw, path)
        if value is None:
            key = schema_keys(self._family).get(path)
            value = dotted_paths.get(self._resolved, path, key.default if key else None)
        return redact_value(path, format_value(value))

    def _key_account(self, verdict: Verdict) -> KeyReport:
        raw = dotted_paths.get(self._raw, verdict.path, verdict.value)
        return KeyReport(verdict.path, format_value(raw), verdict.state, self.origin_text(verdict.path), verdict.note)

    def _key_reports(self, root: RootBlock, wrong: set[str], account: Sequence[KeyReport]) -> tuple[KeyReport, ...]:
        """Return the reports of the effective keys, and those of `account`, given keys that do not act."""
        inactive, rows = {row.path for row in account}, []
        for path, value in dotted_paths.leaves(self._document(root)):
            if path in inactive:
                continue
            shown = self._shown(path) if path in wrong else format_value(value)
            if path in self._from_environment and path not in wrong:
                shown = self._resolved_unless_secret(path, shown)
            rows.append(KeyReport(path, shown, KeyState.ACTS, self.origin_text(path), "error" if path in wrong else ""))
        return (*rows, *account)

    def _resolved_unless_secret(self, path: str, reference: str) -> str:
        """Return a value from the environment as text; the reference if path, variable or value is a secret."""
        text = format_value(dotted_paths.get(self._resolved, path))
        variables = ENVIRONMENT_NAME.findall(reference)
        hidden = [value for name, value in self.variables.items() if is_secret(name) and value and value in text]
        if hidden or any(map(is_secret, (path, *variables))) or redact_value(path, text) != text:
            return reference
        return text

    def _document(self, root: RootBlock) -> Tree:
        """Return the effective keys as saved; values from the environment stay unresolved."""
        document = root.model_dump(mode="json")
        for path in self._from_environment:
            if path in schema_keys(self._family) or _is_open(dotted_paths.parent_of(path)):
                dotted_paths.put(document, path, dotted_paths.get(self._raw, path))
        return document


def nemo_default(path: str) -> Any:
    """Return NeMo's default of a key, for references to keys that no file sets.

    Raises:
        KeyError: the key is not in the key table.
        MissingKeyError: it is a value of `hydra:` that does not exist.
    """
    if path.startswith("hydra."):
        raise missing_value(path)
    row = find_row(path)
    if row is None or row.pattern != path:
        raise KeyError(path)
    return row.default


def takes_only_text(path: str) -> bool:
    """Return True if a key takes text only, or is unknown."""
    key = find_key(path)
    return key is None or key.is_text


def _is_at_or_below(path: str, above: str) -> bool:
    return path == above or path.startswith(above + ".")


def _is_open(path: str) -> bool:
    key = find_key(path)
    return key is not None and key.is_open


def _text_keys(block: Mapping[Any, Any]) -> Tree:
    """Return a block of an override with text keys; Hydra may parse names as numbers."""
    return {str(name): _text_keys(value) if isinstance(value, dict) else value for name, value in block.items()}
