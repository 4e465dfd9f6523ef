"""Rules for fine-tuning data: files of each split, prompt templates and chats."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ....models.config.key_block import Finding
from ..data_task import PAIR_TASKS, task_name
from ..prompt_template import prompt_template_from_config
from ..schema.key_index import format_value
from ..schema.root import ModelBlock
from ..schema.trainer_and_data import DataBlock
from .rule_context import RuleContext, choose_data, no_effect, unused

_AT = "model.data"
_SET = f"{_AT}.train_ds"
_FILES = f"{_SET}.file_names"
_CHAT = f"{_AT}.chat"
_JSON_IMPLS = ("jsonl", "huggingface")
_FIELD = re.compile(r"\{([^{}]+)\}")
_PROMPT_KEYS = ("prompt_template", "truncation_field", "truncation_method", "add_bos", "add_eos")


def each_split_has_files(context: RuleContext) -> Iterator[Finding]:
    """`file_names` need `data_impl: jsonl`, one list per used split, no `path`, and matching sampling weights."""
    data = context.root.model.data
    files = data.train_ds.file_names
    held_out = [name for name in ("validation_ds", "test_ds") if getattr(data, name).file_names is not None]
    if files is None:
        for name in held_out:
            yield Finding.error(
                (f"{_AT}.{name}.file_names", _FILES), "held-out files need training files", f"{_FILES}=[FILE]"
            )
        if data.train_ds.concat_sampling_probabilities is not None:
            yield no_effect(f"{_SET}.concat_sampling_probabilities", _FILES, "without `file_names`")
        return
    if data.data_impl != "jsonl":
        yield Finding.error(
            (_FILES, f"{_AT}.data_impl"),
            f"`file_names` are read with `data_impl: jsonl` only, but it is `{data.data_impl}`",
            f"{_AT}.data_impl=jsonl, or ~{_FILES}" if context.root.model.family in PAIR_TASKS else f"~{_FILES}",
        )
        return
    if data.path is not None:
        yield Finding.error(
            (_FILES, f"{_AT}.path"), "`path` and `file_names` both set the data; only one may be given", f"~{_FILES}"
        )
    if data.validation_ds.file_names is None and context.root.trainer.limit_val_batches:
        yield Finding.error(
            (f"{_AT}.validation_ds.file_names", "trainer.limit_val_batches"),
            "validation is on, but `validation_ds.file_names` is not set",
            f"{_AT}.validation_ds.file_names=[FILE], or trainer.limit_val_batches=0",
        )
    weights, paths = data.train_ds.concat_sampling_probabilities, [files] if isinstance(files, str) else files
    if weights is not None and len(weights) != len(paths):
        yield Finding.error(
            (f"{_SET}.concat_sampling_probabilities", _FILES),
            f"`concat_sampling_probabilities` ({format_value(weights)}) must have one number per file, {len(paths)}",
            f"~{_SET}.concat_sampling_probabilities",
        )
    elif weights is not None and context.root.model.family != "gpt":
        yield no_effect(
            f"{_SET}.concat_sampling_probabilities", "model.family", "with a T5, which weights files by size"
        )


def chat_needs_gpt(context: RuleContext) -> Iterator[Finding]:
    """Chats need `family: gpt` and JSON data; a chat template has no effect for other families."""
    model = context.root.model
    data = model.data
    template = "model.tokenizer.chat_template"
    if template in context.set_by_user and model.tokenizer.chat_template is not None and model.family != "gpt":
        yield no_effect(template, "model.family", f"with `family: {model.family}`, which does not support chats")
    if not data.chat:
        return
    if model.family != "gpt":
        yield Finding.error(
            (_CHAT, "model.family"),
            f"`chat` (True) is not supported with `family: {model.family}`",
            f"{_CHAT}=false, with pairs of input and target",
        )
    elif data.data_impl not in _JSON_IMPLS:
        yield Finding.error(
            (_CHAT, f"{_AT}.data_impl"),
            f"`chat` (True) needs `data_impl: jsonl` or `huggingface`, but it is `{data.data_impl}`",
            f"{choose_data(context, 'chat', 'jsonl')}, or {_CHAT}=false",
        )


def prompt_template_is_valid(context: RuleContext) -> Iterator[Finding]:
    """The prompt template must end with the answer, and `truncation_field` must name its other fields."""
    data = context.root.model.data
    if task_name(context.root.model) != "sft" or data.chat or data.data_impl == "mock":
        return
    keys = (f"{_SET}.prompt_template", f"{_AT}.label_key")
    try:
        template = prompt_template_from_config(data)
    except ValueError as error:
        yield Finding.error(keys, f"`prompt_template` {error}", _template_with_answer_last(data))
        return
    field = data.train_ds.truncation_field
    names = [] if field is None else [name.strip() for name in field.split(",")]
    unknown = [name for name in names if name not in template.fields[:-1]]
    if unknown:
        yield Finding.error(
            (f"{_SET}.truncation_field", keys[0]),
            f"`truncation_field` ({', '.join(unknown)}) must name template fields before the answer: "
            f"{', '.join(template.fields[:-1]) or 'there are none'}",
            f"~{_SET}.truncation_field",
        )
    if data.data_impl == "pystd_docstring":
        missing = [name for name in template.fields if name not in (data.context_key, data.label_key)]
        if missing:
            yield Finding.error(
                (keys[0], f"{_AT}.data_impl"),
                f"`prompt_template` names {', '.join(missing)}, but docstring data have only `{data.context_key}` and "
                f"`{data.label_key}`",
                f"~{keys[0]}",
            )


def _template_with_answer_last(data: DataBlock) -> str:
    """Return overrides that make the template end with the answer.

    The answer is the field `label_key` if the template has it, else the template's last field.
    """
    text, label = data.train_ds.prompt_template or "", data.label_key
    names = list(_FIELD.finditer(text))
    key = f"{_SET}.prompt_template"
    if not names or set("{}'\n") & set(_FIELD.sub("", text)):
        return f"{key}='{{{data.context_key}}} {{{label}}}'"
    answers = [name for name in names if name[1] == label]
    if not answers and names[-1][1] == data.context_key:
        return f"{key}='{text} {{{label}}}'"
    last = answers[0] if answers else names[-1]
    changes = [] if answers else [f"{_AT}.label_key={format_value(last[1])}"]
    if last.end() < len(text):
        changes.append(f"{key}='{text[: last.end()]}'")
    return " ".join(changes)


def sft_needs_eos_token(context: RuleContext) -> Iterator[Finding]:
    """Supervised fine-tuning needs a tokenizer with an eos token; `char` has none and is built from plain text."""
    model = context.root.model
    if task_name(model) == "sft" and model.tokenizer.library == "char" and model.data.data_impl != "mock":
        yield Finding.error(
            ("model.tokenizer.library", f"{_AT}.dataset_type"),
            "`char` has no eos token to end an answer, and is built from plain text",
            "model.tokenizer.library=byte-level, or the model's tokenizer",
        )


def unused_prompt_settings(context: RuleContext) -> Iterator[Finding]:
    """Warn about prompt settings that have no effect with another task, with chats or with mock data."""
    model = context.root.model
    data = model.data
    name = task_name(model)
    why = ""
    if name != "sft":
        why = f"with `dataset_type: {name}`"
    elif data.chat:
        why = "with `chat: true`: the chat template formats the whole chat"
    elif data.data_impl == "mock":
        why = "with `data_impl: mock`"
    for key in _PROMPT_KEYS if why else ():
        yield from unused(context, f"{_SET}.{key}", _CHAT if name == "sft" else f"{_AT}.dataset_type", why)
    if name == "sft" and data.data_impl in _JSON_IMPLS:
        if data.chat:
            for key in ("context_key", "label_key"):
                yield from unused(context, f"{_AT}.{key}", _CHAT, "with `chat: true`")
        elif data.train_ds.prompt_template:
            when = "with a `prompt_template`, which names the fields itself"
            yield from unused(context, f"{_AT}.context_key", f"{_SET}.prompt_template", when)
    if isinstance(model, ModelBlock) and model.answer_only_loss and name != "sft":
        yield no_effect("model.answer_only_loss", f"{_AT}.dataset_type", f"with `dataset_type: {name}`")
    if isinstance(model, ModelBlock) and name == "sft" and data.data_impl == "mock" and model.answer_only_loss is False:
        yield no_effect("model.answer_only_loss", f"{_AT}.data_impl", "with `data_impl: mock`")
