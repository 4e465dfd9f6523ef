"""Fill in the model keys of `stoker finetune` from the pretrained model, and reject keys that contradict it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...models.config.model import Family
from ..config import dotted_paths
from ..config.dotted_paths import MISSING
from ..config.draft import Draft, nemo_default, takes_only_text
from ..config.interpolation import InterpolationError, Resolver, has_interpolation
from ..config.load import load_run_config
from ..config.nemo.nemo_spellings import has_nemo_file_names
from ..config.problems import Problem
from ..config.run_config import DEFAULT_ORIGIN, Origin, RunConfig
from ..config.schema.key_index import format_value, schema_keys
from ..utils import environment
from . import pretrained_config
from .pretrained_config import StartingPoint


def load_finetune_config(
    config_name: str | None = None,
    config_dir: Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> RunConfig:
    """Load a configuration as `load_run_config` does, for `stoker finetune`.

    Keys of the model and its tokenizer that are not given are those of `model.restore_from_path`, which is required.

    Raises:
        UserError: a file, choice or pretrained model does not exist, or a file cannot be read.
        ConfigError: the configuration is not valid; holds all problems.
    """
    return load_run_config(
        config_name, config_dir, overrides, environ, default_name="finetune", fill_defaults=fill_pretrained_keys
    )


def fill_pretrained_keys(draft: Draft) -> None:
    """Set the keys of the pretrained model, its tokenizer and adapter where the user gives none.

    Keys that contradict the weights are added to `draft.problems`.
    """
    key = pretrained_config.KEY
    location = _resolved_text(draft, key)
    if not isinstance(location, str) or not location or location == MISSING:
        rule = "must be the pretrained model: a stoker run or checkpoint, or a Hugging Face folder"
        draft.problems.append(Problem(key, format_value(location), draft.origin_text(key), rule, f"{key}=FOLDER"))
        return
    source = "model.data.data_impl"
    if dotted_paths.get(draft.tree, source) is None and not has_nemo_file_names(draft.tree):
        rule = "must be set: the fine-tuning data"
        fix = "data=sft, data=chat or data=text (a T5: data=jsonl), each with model.data.path=FILE"
        draft.problems.append(Problem(source, None, draft.origin_text(source), rule, fix))
    pretrained = pretrained_config.starting_point(environment.user_path(location, key))
    family = dotted_paths.get(draft.tree, "model.family")
    if family not in (None, pretrained.family):
        _report_conflicts(draft, {"model.family": (family, pretrained.family)}, pretrained)
        return
    _fill(draft, "model.family", pretrained.family, pretrained.origin, pretrained.family)
    conflicts: dict[str, tuple[Any, Any]] = {}
    for path, value in pretrained.keys.items():
        name = path.rpartition(".")[2]
        given = dotted_paths.get(draft.tree, path, draft.tree)
        shared = dotted_paths.get(draft.tree, f"model.{name}", draft.tree)  # a T5 key given once for both stacks
        at, given = (f"model.{name}", shared) if given is draft.tree else (path, given)
        if given is draft.tree:
            _fill(draft, path, value, pretrained.origin, pretrained.family)
        elif name in pretrained_config.SHAPES and not has_interpolation(given) and given != value:
            conflicts[at] = (given, value)
    _report_conflicts(draft, conflicts, pretrained)
    if not dotted_paths.get(draft.tree, "model.tokenizer") and not pretrained.tokenizer:
        rule = f"must be set: {location} has no supported tokenizer"
        fix = "tokenizer=byte, or tokenizer=huggingface model.tokenizer.type=FOLDER"
        draft.problems.append(Problem("model.tokenizer.library", None, draft.origin_text(key), rule, fix))
    if (
        dotted_paths.get(draft.tree, "model.tokenizer.library") is None
    ):  # else it is compared when the weights are loaded
        for path, value in pretrained.tokenizer.items():
            if dotted_paths.get(draft.tree, path, draft.tree) is draft.tree:
                _fill(draft, path, value, pretrained.origin, pretrained.family)
    adapter = _resolved_text(draft, pretrained_config.ADAPTER_KEY)
    if isinstance(adapter, str):
        adapter_path = environment.user_path(adapter, pretrained_config.ADAPTER_KEY)
        base_path = environment.user_path(location, key)
        for path, value in pretrained_config.adapter_keys(adapter_path, base_path).items():
            given = dotted_paths.get(draft.tree, path, draft.tree)
            from_preset = path in draft.packaged and draft.kind_of(path) == "file"
            if path == pretrained_config.SCHEME_KEY and given not in (draft.tree, None, value):
                preset = f"peft={value}" if value in pretrained_config.PRESETS else f"{path}={value}"
                draft.problems.append(_conflict(draft, path, given, value, adapter, preset))
            elif given is draft.tree or from_preset:
                _fill(draft, path, value, adapter, pretrained.family)
            elif path in pretrained_config.ADAPTER_SHAPES and not has_interpolation(given) and given != value:
                draft.problems.append(_conflict(draft, path, given, value, adapter))


def _resolved_text(draft: Draft, key: str) -> Any:
    """Return the value of `key`, with interpolations resolved if they can be at this stage."""
    value = dotted_paths.get(draft.tree, key)
    if isinstance(value, str) and has_interpolation(value):
        resolver = Resolver(draft.tree, draft.variables, nemo_default, takes_only_text)
        with contextlib.suppress(InterpolationError):  # reported with all the others
            value = resolver.resolve(key).value
    return value


def _fill(draft: Draft, path: str, value: Any, origin: str, family: Family) -> None:
    key = schema_keys(family).get(path)
    if key is None or key.default != value or path == "model.family" or path in draft.packaged:
        dotted_paths.put(draft.tree, path, value)
        draft.origins[path] = Origin("file", origin)
        draft.packaged |= {path}


def _report_conflicts(draft: Draft, conflicts: Mapping[str, tuple[Any, Any]], pretrained: StartingPoint) -> None:
    """Report keys that contradict the weights: one problem per key, or one for all keys of a model preset.

    Args:
        draft: takes the problems.
        conflicts: path to (given value, value of the weights).
        pretrained: the model whose weights are loaded.
    """
    presets: dict[Path, list[str]] = {}
    for path, (given, value) in conflicts.items():
        file = Path(draft.origins.get(path, DEFAULT_ORIGIN).text.rpartition(":")[0])
        if draft.kind_of(path) == "file" and file.parent.name == "model":
            presets.setdefault(file, []).append(path)
        else:
            draft.problems.append(_conflict(draft, path, given, value, pretrained.origin))
    for file, keys in presets.items():
        names = ", ".join(path.removeprefix("model.") for path in keys)
        rule = f"is another model than that of {pretrained.origin}, whose weights are loaded; they differ in {names}"
        fix = f"leave out model={file.stem}: the shape comes from the pretrained model"
        draft.problems.append(Problem(f"model={file.stem}", None, str(file), rule, fix))
        for path in keys:  # otherwise rules would report a mixture of the two models
            if path != "model.family":
                dotted_paths.put(draft.tree, path, conflicts[path][1])


def _conflict(draft: Draft, path: str, given: Any, value: Any, origin: str, fix: str = "") -> Problem:
    rule = f"must be {format_value(value)}, as in {origin}: its weights have that shape"
    return Problem(path, format_value(given), draft.origin_text(path), rule, fix or f"~{path}")
