"""How `stoker finetune` begins: what is not given of the model is that of the weights, and what is must be theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.config.model_keys import Family
from ..utils import environment
from . import dotted_paths, pretrained_config
from .dotted_paths import MISSING
from .interpolation import InterpolationError, Resolver, holds_interpolation
from .load import nemo_default, takes_only_text
from .nemo.nemo_spellings import names_files_of_prompts
from .problems import Problem
from .run_config import DEFAULT, Origin
from .schema.key_index import schema_keys, show_value

if TYPE_CHECKING:
    from .load import Draft
    from .pretrained_config import StartingPoint


def begin(draft: Draft) -> None:
    """Fill in the keys of the model that a run begins with, where the user gives none."""
    key = pretrained_config.KEY
    named = _text_at(draft, key)
    if not isinstance(named, str) or not named or named == MISSING:
        rule = "must name the model to begin with: a stoker run or checkpoint, or a folder of Hugging Face's"
        draft.problems.append(Problem(key, show_value(named), draft.origin_text(key), rule, f"{key}=FOLDER"))
        return
    source = "model.data.data_impl"
    if dotted_paths.get(draft.tree, source) is None and not names_files_of_prompts(draft.tree):
        rule = "must be named: what the model is to learn"
        fix = "data=sft, data=chat or data=text (a T5: data=jsonl), each with model.data.path=FILE"
        draft.problems.append(Problem(source, None, draft.origin_text(source), rule, fix))
    begins = pretrained_config.starting_point(environment.user_path(named, key))
    family = dotted_paths.get(draft.tree, "model.family")
    if family not in (None, begins.family):
        _clash(draft, {"model.family": (family, begins.family)}, begins)
        return
    _fill(draft, "model.family", begins.family, begins.origin, begins.family)
    clashes: dict[str, tuple[Any, Any]] = {}
    for path, value in begins.keys.items():
        name = path.rpartition(".")[2]
        given = dotted_paths.get(draft.tree, path, draft.tree)
        spread = dotted_paths.get(draft.tree, f"model.{name}", draft.tree)  # one key of a T5 for both stacks
        at, given = (f"model.{name}", spread) if given is draft.tree else (path, given)
        if given is draft.tree:
            _fill(draft, path, value, begins.origin, begins.family)
        elif name in pretrained_config.SHAPES and not holds_interpolation(given) and given != value:
            clashes[at] = (given, value)
    _clash(draft, clashes, begins)
    if not dotted_paths.get(draft.tree, "model.tokenizer") and not begins.tokenizer:
        rule = f"must be named: {named} holds no tokenizer that is read here"
        fix = "tokenizer=byte, or tokenizer=huggingface model.tokenizer.type=FOLDER"
        draft.problems.append(Problem("model.tokenizer.library", None, draft.origin_text(key), rule, fix))
    if dotted_paths.get(draft.tree, "model.tokenizer.library") is None:  # else it is compared when the weights are read
        for path, value in begins.tokenizer.items():
            if dotted_paths.get(draft.tree, path, draft.tree) is draft.tree:
                _fill(draft, path, value, begins.origin, begins.family)
    adapter = _text_at(draft, pretrained_config.ADAPTER_KEY)
    if isinstance(adapter, str):
        places = [
            environment.user_path(text, at) for text, at in ((adapter, pretrained_config.ADAPTER_KEY), (named, key))
        ]
        for path, value in pretrained_config.adapter_keys(*places).items():
            given = dotted_paths.get(draft.tree, path, draft.tree)
            of_preset = path in draft.packaged and draft.kind_of(path) == "file"
            if path == pretrained_config.SCHEME_KEY and given not in (draft.tree, None, value):
                preset = f"peft={value}" if value in pretrained_config.PRESETS else f"{path}={value}"
                draft.problems.append(_contradiction(draft, path, given, value, adapter, preset))
            elif given is draft.tree or of_preset:
                _fill(draft, path, value, adapter, begins.family)
            elif path in pretrained_config.ADAPTER_SHAPES and not holds_interpolation(given) and given != value:
                draft.problems.append(_contradiction(draft, path, given, value, adapter))


def _text_at(draft: Draft, key: str) -> Any:
    """A value that may refer to others, where it can be told already."""
    named = dotted_paths.get(draft.tree, key)
    if isinstance(named, str) and holds_interpolation(named):
        resolver = Resolver(draft.tree, draft.variables, nemo_default, takes_only_text)
        with contextlib.suppress(InterpolationError):  # told with all the others
            named = resolver.value(key).value
    return named


def _fill(draft: Draft, path: str, value: Any, origin: str, family: Family) -> None:
    key = schema_keys(family).get(path)
    if key is None or key.default != value or path == "model.family" or path in draft.packaged:
        dotted_paths.put(draft.tree, path, value)
        draft.origins[path] = Origin("file", origin)
        draft.packaged |= {path}


def _clash(draft: Draft, clashes: Mapping[str, tuple[Any, Any]], begins: StartingPoint) -> None:
    """Tell what contradicts the weights: each key, but those of a preset once, which is another model."""
    presets: dict[Path, list[str]] = {}
    for path, (given, value) in clashes.items():
        file = Path(draft.origins.get(path, DEFAULT).text.rpartition(":")[0])
        if draft.kind_of(path) == "file" and file.parent.name == "model":
            presets.setdefault(file, []).append(path)
        else:
            draft.problems.append(_contradiction(draft, path, given, value, begins.origin))
    for file, keys in presets.items():
        names = ", ".join(path.removeprefix("model.") for path in keys)
        rule = f"is another model than that of {begins.origin}, whose weights are read; they differ in {names}"
        fix = f"leave out model={file.stem}: the shape comes with the weights"
        draft.problems.append(Problem(f"model={file.stem}", None, str(file), rule, fix))
        for path in keys:  # so that no rule speaks of a mixture of the two
            if path != "model.family":
                dotted_paths.put(draft.tree, path, clashes[path][1])


def _contradiction(draft: Draft, path: str, given: Any, value: Any, origin: str, fix: str = "") -> Problem:
    rule = f"must be {show_value(value)}, as in {origin}: its weights have that shape"
    return Problem(path, show_value(given), draft.origin_text(path), rule, fix or f"~{path}")
