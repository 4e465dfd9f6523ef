"""Rules of fine-tuning data: prompts with answers and conversations, their files and how they become rows."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ....models.config.key_block import Finding
from ..data_task import task_name
from ..prompt_template import template_of
from ..schema.key_index import show_value
from ..schema.root import ModelBlock
from ..schema.trainer_and_data import DataBlock, TrainSetBlock
from .rule_context import Facts, Rule, no_effect

_AT = "model.data"
_SET = f"{_AT}.train_ds"
_FILES = f"{_SET}.file_names"
_CHAT = f"{_AT}.chat"
_OBJECTS = ("jsonl", "huggingface")
_NAMED = re.compile(r"\{([^{}]+)\}")
_PROMPTS = ("prompt_template", "truncation_field", "truncation_method", "add_bos", "add_eos")


def files_of_each_split(facts: Facts) -> Iterator[Finding]:
    """NeMo's lists of files: each split has its own, and nothing else names data beside them."""
    data = facts.root.model.data
    files = data.train_ds.file_names
    held_out = [name for name in ("validation_ds", "test_ds") if getattr(data, name).file_names is not None]
    if files is None:
        for name in held_out:
            yield Finding(
                "error",
                (f"{_AT}.{name}.file_names", _FILES),
                "held-out files go with files to train on",
                f"{_FILES}=[FILE]",
            )
        if data.train_ds.concat_sampling_probabilities is not None:
            yield no_effect(f"{_SET}.concat_sampling_probabilities", _FILES, "without `file_names`")
        return
    if data.data_impl != "jsonl":
        yield Finding(
            "error",
            (_FILES, f"{_AT}.data_impl"),
            f"`file_names` are read with `data_impl: jsonl`, but it is `{data.data_impl}`",
            f"{_AT}.data_impl=jsonl, or ~{_FILES}",
        )
        return
    if data.path is not None:
        yield Finding(
            "error",
            (_FILES, f"{_AT}.path"),
            "`path` and `file_names` both name the data; give one of them",
            f"~{_FILES}",
        )
    if data.validation_ds.file_names is None and facts.root.trainer.limit_val_batches:
        yield Finding(
            "error",
            (f"{_AT}.validation_ds.file_names", "trainer.limit_val_batches"),
            "validation is on, and there are no files for it",
            f"{_AT}.validation_ds.file_names=[FILE], or trainer.limit_val_batches=0",
        )
    weights, sets = data.train_ds.concat_sampling_probabilities, [files] if isinstance(files, str) else files
    if weights is not None and len(weights) != len(sets):
        yield Finding(
            "error",
            (f"{_SET}.concat_sampling_probabilities", _FILES),
            f"`concat_sampling_probabilities` ({show_value(weights)}) must be as many numbers as there are files, "
            f"{len(sets)}",
            f"~{_SET}.concat_sampling_probabilities",
        )
    elif weights is not None and facts.root.model.family != "gpt":
        yield no_effect(f"{_SET}.concat_sampling_probabilities", "model.family", "in a T5, which takes files by size")


def chat_is_for_a_gpt(facts: Facts) -> Iterator[Finding]:
    """Conversations are one text, which goes on; and a template writes all of it."""
    model = facts.root.model
    data = model.data
    template = "model.tokenizer.chat_template"
    if template in facts.own and model.tokenizer.chat_template is not None and model.family != "gpt":
        yield no_effect(template, "model.family", f"with `family: {model.family}`, which holds no conversations")
    if not data.chat:
        return
    if model.family != "gpt":
        yield Finding(
            "error",
            (_CHAT, "model.family"),
            f"a conversation is one text that goes on, which a model of `family: {model.family}` does not learn",
            f"{_CHAT}=false, with pairs of texts",
        )
    elif data.data_impl not in _OBJECTS:
        yield Finding(
            "error",
            (_CHAT, f"{_AT}.data_impl"),
            f"conversations are read with `data_impl: jsonl` or `huggingface`, but it is `{data.data_impl}`",
            f"data=chat, or {_CHAT}=false",
        )


def prompts_can_be_made(facts: Facts) -> Iterator[Finding]:
    """The template names the answer last, and `truncation_field` names texts of it."""
    data = facts.root.model.data
    if task_name(facts.root.model) != "sft" or data.chat or data.data_impl == "mock":
        return
    keys = (f"{_SET}.prompt_template", f"{_AT}.label_key")
    try:
        template = template_of(data)
    except ValueError as error:
        yield Finding("error", keys, f"`prompt_template` {error}", _answer_last(data))
        return
    field = data.train_ds.truncation_field
    names = [] if field is None else [name.strip() for name in field.split(",")]
    unknown = [name for name in names if name not in template.names[:-1]]
    if unknown:
        yield Finding(
            "error",
            (f"{_SET}.truncation_field", keys[0]),
            f"`truncation_field` names {', '.join(unknown)}, which is no text before the answer: those are "
            f"{', '.join(template.names[:-1]) or 'none'}",
            f"~{_SET}.truncation_field",
        )
    if data.data_impl == "pystd_docstring":
        missing = [name for name in template.names if name not in (data.context_key, data.label_key)]
        if missing:
            yield Finding(
                "error",
                (keys[0], f"{_AT}.data_impl"),
                f"`prompt_template` names {', '.join(missing)}, and docstrings have `{data.context_key}` and "
                f"`{data.label_key}` only",
                f"~{keys[0]}",
            )


def _answer_last(data: DataBlock) -> str:
    """What makes a template end with its answer.

    That is what `label_key` names, if it is there; else the last name, which `label_key` must be.
    """
    text, label = data.train_ds.prompt_template or "", data.label_key
    names = list(_NAMED.finditer(text))
    key = f"{_SET}.prompt_template"
    if not names or set("{}'\n") & set(_NAMED.sub("", text)):
        return f"{key}='{{{data.context_key}}} {{{label}}}'"
    answers = [name for name in names if name[1] == label]
    if not answers and names[-1][1] == data.context_key:
        return f"{key}='{text} {{{label}}}'"
    last = answers[0] if answers else names[-1]
    changes = [] if answers else [f"{_AT}.label_key={show_value(last[1])}"]
    if last.end() < len(text):
        changes.append(f"{key}='{text[: last.end()]}'")
    return " ".join(changes)


def answers_end(facts: Facts) -> Iterator[Finding]:
    """Characters have no token that ends an answer, and are made from text."""
    model = facts.root.model
    if task_name(model) == "sft" and model.tokenizer.library == "char" and model.data.data_impl != "mock":
        yield Finding(
            "error",
            ("model.tokenizer.library", f"{_AT}.dataset_type"),
            "`char` has no token that ends an answer, and is made from text",
            "tokenizer=byte, or the tokenizer of the model",
        )


def settings_of_prompts_act(facts: Facts) -> Iterator[Finding]:
    """Settings of fine-tuning that are set beside another task, or beside conversations."""
    model = facts.root.model
    data = model.data
    name = task_name(model)
    why = ""
    if name != "sft":
        why = f"with `dataset_type: {name}`"
    elif data.chat:
        why = "with `chat: true`: the chat template writes all of it"
    elif data.data_impl == "mock":
        why = "with `data_impl: mock`"
    for key in _PROMPTS:
        if why and _is_set(facts, key):
            yield no_effect(f"{_SET}.{key}", _CHAT if name == "sft" else f"{_AT}.dataset_type", why)
    if name == "sft" and data.data_impl in _OBJECTS:
        for key, unused in (("context_key", data.chat or data.train_ds.prompt_template), ("label_key", data.chat)):
            path = f"{_AT}.{key}"
            if unused and path in facts.own and getattr(data, key) != type(data).model_fields[key].default:
                told = "with `chat: true`" if data.chat else "with a `prompt_template`, which names the texts itself"
                yield no_effect(path, _CHAT if data.chat else f"{_SET}.prompt_template", told)
    if isinstance(model, ModelBlock) and model.answer_only_loss and name != "sft":
        yield no_effect("model.answer_only_loss", f"{_AT}.dataset_type", f"with `dataset_type: {name}`")
    if isinstance(model, ModelBlock) and name == "sft" and data.data_impl == "mock" and model.answer_only_loss is False:
        yield no_effect("model.answer_only_loss", f"{_AT}.data_impl", "with `data_impl: mock`")


def _is_set(facts: Facts, name: str) -> bool:
    default = TrainSetBlock.model_fields[name].default
    return f"{_SET}.{name}" in facts.own and getattr(facts.root.model.data.train_ds, name) != default


FINE_TUNING_RULES: tuple[Rule, ...] = (
    files_of_each_split,
    chat_is_for_a_gpt,
    prompts_can_be_made,
    answers_end,
    settings_of_prompts_act,
)
