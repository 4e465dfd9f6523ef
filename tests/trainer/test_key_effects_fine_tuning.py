"""Every key of fine-tuning data acts: changed alone, it changes the samples; where it is idle, that is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from config_helpers import load, problems
from resolved import build_data
from test_data_chat import SMOL, bpe
from tiers import extra, looped

from stoker.trainer.config import dotted_paths
from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.data.datasets.samples import IGNORE_INDEX

DATA, SET = "model.data.", "model.data.train_ds."
LONG = "a long question which does not fit "


def files(folder: Path) -> dict[str, str]:
    """JSONL files by name: prompts with answers, and conversations."""
    found: dict[str, str] = {}
    for name in ("first", "second", "third"):
        path = folder / f"{name}.jsonl"
        objects = [
            {"input": f"{name} {LONG}{n}", "other": f"{name} other {n}", "output": f"answer {n}"} for n in range(20)
        ]
        path.write_text("".join(json.dumps(one) + "\n" for one in objects))
        found[name] = str(path)
    turns = ("user", "What?"), ("assistant", "That."), ("user", "And?"), ("assistant", "This.")
    chats = [{"messages": [{"role": role, "content": f"{text} {n}"} for role, text in turns]} for n in range(20)]
    (folder / "chats.jsonl").write_text(
        "".join(json.dumps({"input": "a", "output": "b", **one}) + "\n" for one in chats)
    )
    return found | {"chats": str(folder / "chats.jsonl")}


def samples(folder: Path, changes: dict[str, Any]) -> Any:
    """All batches of an epoch: names, and what is read and predicted."""
    places = files(folder)
    document: dict[str, Any] = {
        "trainer": {"limit_val_batches": 0},
        "model": {"encoder_seq_length": 60, "data": {"data_impl": "jsonl", "path": places["first"]}},
    }
    bpe(folder / "bpe")
    for key, value in changes.items():
        filled = [places.get(one, one) for one in value] if isinstance(value, list) else places.get(str(value), value)
        dotted_paths.put(document, key, str(folder / "bpe") if filled == "BPE" else filled)
    data = build_data(RootBlock.model_validate(document))
    found: list[Any] = []
    for split in ("train", "validation", "test"):
        part: Any = data.split(split)
        batch = None if part is None else part.batch(0, part.samples)
        found.append(None if batch is None else {name: tensor.tolist() for name, tensor in batch.items()})
    return found


CHAT = {DATA + "chat": True, DATA + "path": "chats", "model.encoder_seq_length": 300}
FILES = {DATA + "path": None, SET + "file_names": ["first"]}
TOKENIZER = {"model.tokenizer.library": "huggingface", "model.tokenizer.type": "BPE"}
ROWS: list[tuple[str, Any, dict[str, Any]]] = [
    ("model.answer_only_loss", False, {}),
    ("model.answer_only_loss", False, CHAT),
    ("model.tokenizer.chat_template", SMOL, CHAT),
    (DATA + "packed_sequence", True, {"model.encoder_seq_length": 300}),
    (DATA + "packed_sequence", True, CHAT),
    (DATA + "context_key", "other", {}),
    (DATA + "label_key", "other", {}),
    (DATA + "chat", True, {DATA + "path": "chats", "model.encoder_seq_length": 300}),
    (SET + "file_names", ["second"], FILES),
    (SET + "file_names", "second", FILES),
    (SET + "file_names", ["first", "second"], FILES),
    (SET + "concat_sampling_probabilities", [0.25, 0.75], {**FILES, SET + "file_names": ["first", "second"]}),
    (DATA + "validation_ds.file_names", ["third"], FILES),
    (DATA + "test_ds.file_names", "third", FILES),
    (SET + "prompt_template", "{other}: {output}", {}),
    (SET + "truncation_field", "other", {SET + "prompt_template": "{input} {other} {output}"}),
    (SET + "truncation_method", "left", {"model.encoder_seq_length": 30}),
    (SET + "add_bos", False, {}),
    (SET + "add_bos", True, TOKENIZER),
    (SET + "add_eos", False, {}),
]
KEYS = {key for key, _, _ in ROWS} - {DATA + "packed_sequence", DATA + "context_key", DATA + "label_key"}
"""Those that `test_key_effects.py` leaves to this file."""


FIRST = {row[0]: row for row in reversed(ROWS)}.values()


@pytest.mark.parametrize(
    ("key", "value", "others"),
    [pytest.param(*row, id=f"{row[0]}-{row[1]}") for row in ROWS if row in FIRST or extra(row)],
)
def test_a_key_changes_the_samples(key: str, value: Any, others: dict[str, Any], tmp_path: Path) -> None:
    assert samples(tmp_path, others) != samples(tmp_path, {**others, key: value})


def test_truncation_takes_one_end_of_the_question_and_no_answer(tmp_path: Path) -> None:
    def decoded(**changes: Any) -> list[tuple[str, str]]:
        train: Any = samples(tmp_path, {"model.encoder_seq_length": 30, **{SET + k: v for k, v in changes.items()}})[0]
        pairs = zip(train["tokens"], train["labels"], strict=True)
        to_text = lambda ids: bytes(i - 3 for i in ids if i > 2).decode()  # noqa: E731
        return [(to_text(read), to_text([i for i in said if i != IGNORE_INDEX])) for read, said in pairs]

    for read, said in decoded():
        assert read.startswith("first a long")
        assert said.startswith(" answer ")
    for read, said in decoded(truncation_method="left"):
        assert not read.startswith("first")
        assert "fit" in read
        assert said.startswith(" answer ")


SFT = ["data=sft", "model.data.path=x"]


@looped(
    ("overrides", "key"),
    [
        ([f"{SET}prompt_template='{{input}} {{output}}'"], SET + "prompt_template"),
        (["data=chat", "model.data.path=x", f"{SET}prompt_template='{{input}} {{output}}'"], SET + "prompt_template"),
        (["data=chat", "model.data.path=x", f"{SET}add_eos=false"], SET + "add_eos"),
        (["data=chat", "model.data.path=x", "model.data.label_key=y"], DATA + "label_key"),
        (
            [*SFT, f"{SET}prompt_template='{{a}} {{output}}'", "model.data.context_key=y"],
            DATA + "context_key",
        ),
        (["model.answer_only_loss=true"], "model.answer_only_loss"),
        ([*SFT, "model.data.reset_attention_mask=true"], DATA + "reset_attention_mask"),
        ([*SFT, f"{SET}concat_sampling_probabilities=[1.0]"], SET + "concat_sampling_probabilities"),
        (["data=sft", f"{SET}file_names=[x]", f"{DATA}validation_ds.file_names=y", "model.data.splits_string='1,1'"],
         DATA + "splits_string"),
        (["model=t5_tiny", "model.tokenizer.chat_template=x"], "model.tokenizer.chat_template"),
    ],
)  # fmt: skip
def test_a_key_without_effect_is_told(overrides: list[str], key: str) -> None:
    warned = [finding.keys[0] for finding in load(*overrides).findings if finding.level == "warning"]
    assert warned == [key]


@looped(
    ("overrides", "key", "says"),
    [
        (["data=sft"], DATA + "path", "needs a file"),
        (["data=chat", "model.data.data_impl=pystd_docstring"], DATA + "chat", "`data_impl: jsonl`"),
        (["model=t5_tiny", "data=jsonl", "model.data.path=x", "model.data.chat=true"], DATA + "chat", "family: t5"),
        ([*SFT, f"{SET}prompt_template='{{input}} {{x}}'"], SET + "prompt_template", "must end with the answer"),
        ([*SFT, f"{SET}prompt_template='{{output}} {{output}}'"], SET + "prompt_template", "once"),
        ([*SFT, f"{SET}prompt_template='{{ {{output}}'"], SET + "prompt_template", "no other braces"),
        ([*SFT, f"{SET}truncation_field=y"], SET + "truncation_field", "fields before the answer: input"),
        (["data=docstring", f"{SET}prompt_template='{{x}} {{output}}'"], SET + "prompt_template", "data have only"),
        ([*SFT, f"{SET}file_names=[y]", f"{DATA}validation_ds.file_names=z"], SET + "file_names", "both set the data"),
        (["data=sft", f"{SET}file_names=[y]"], DATA + "validation_ds.file_names", "validation is on"),
        ([*SFT, f"{DATA}validation_ds.file_names=[y]"], DATA + "validation_ds.file_names", "need training files"),
        ([f"{SET}file_names=[y]"], SET + "file_names", "it is `pystd`"),
        (
            ["data=sft", f"{SET}file_names=[y]", f"{SET}concat_sampling_probabilities=[1,2]",
             "trainer.limit_val_batches=0"],
            SET + "concat_sampling_probabilities",
            "one number per file",
        ),
        ([*SFT, "tokenizer=char"], "model.tokenizer.library", "end an answer"),
        ([*SFT, f"{SET}add_sep=true"], SET + "add_sep", "prompt_template"),
        ([*SFT, f"{SET}max_seq_length=77"], SET + "max_seq_length", "model.encoder_seq_length"),
        ([*SFT, f"{DATA}validation_ds.add_eos=false"], DATA + "validation_ds.add_eos", "like training data"),
        ([*SFT, f"{SET}prompt_tmplate=x"], SET + "prompt_tmplate", "no such key"),
    ],
)  # fmt: skip
def test_what_contradicts_is_one_line(overrides: list[str], key: str, says: str) -> None:
    found = problems(*overrides)
    assert list(found) == [key]
    assert says in found[key].rule


@pytest.mark.parametrize(
    ("template", "fix"),
    [
        ("{question} {answer}", "model.data.label_key=answer"),
        ("{q} {answer}.", f"model.data.label_key=answer {SET}prompt_template='{{q}} {{answer}}'"),
        ("{output} {q}", f"{SET}prompt_template='{{output}}'"),
        ("{input}:", f"{SET}prompt_template='{{input}}: {{output}}'"),
        ("{ {output}", f"{SET}prompt_template='{{input}} {{output}}'"),
    ],
)
def test_a_template_that_ends_otherwise_has_a_cure(template: str, fix: str) -> None:
    """The fix that the error names is accepted."""
    typed = f"{SET}prompt_template='{template}'"
    (problem,) = problems(*SFT, typed).values()
    assert problem.fix == fix
    cured = dict(one.split("=", 1) for one in (typed, *re.findall(r"\S+='[^']*'|\S+", fix)))
    assert load(*SFT, *(f"{key}={value}" for key, value in cured.items()))


def test_the_shipped_files_need_nothing_more() -> None:
    for experiment in ("docstring_gpt", "docstring_t5"):
        assert not [one for one in load(f"experiment={experiment}").findings if one.level != "info"]
    for group in ("sft", "chat"):
        assert not load(f"data={group}", "model.data.path=x").findings
    assert load("data=docstring").root.model.data.dataset_type is None


def test_a_file_of_nemo_is_read_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "nemo.yaml").write_text(
        "model:\n  encoder_seq_length: 64\n  answer_only_loss: true\n  data:\n"
        "    train_ds:\n      file_names: [a.jsonl]\n"
        "      micro_batch_size: ${model.micro_batch_size}\n      global_batch_size: ${model.global_batch_size}\n"
        "      shuffle: true\n      num_workers: 0\n      memmap_workers: 2\n      max_seq_length: 64\n"
        "      min_seq_length: 1\n      drop_last: true\n      concat_sampling_probabilities: null\n"
        "      label_key: output\n      add_eos: true\n      add_sep: false\n      add_bos: false\n"
        "      truncation_field: input\n      index_mapping_dir: null\n      prompt_template: '{input} {output}'\n"
        "      packed_sequence: false\n"
        "    validation_ds:\n      file_names: [b.jsonl]\n      names: null\n      shuffle: false\n"
        "      drop_last: false\n"
        "      label_key: ${model.data.train_ds.label_key}\n      add_eos: ${model.data.train_ds.add_eos}\n"
        "      add_bos: ${model.data.train_ds.add_bos}\n      truncation_method: right\n      tokens_to_generate: 32\n"
        "      prompt_template: ${model.data.train_ds.prompt_template}\n      write_predictions_to_file: false\n"
        "      metric: {name: loss, average: null, num_classes: null}\n"
    )
    loaded = load(name="nemo", directory=tmp_path)
    data = loaded.root.model.data
    assert (data.data_impl, data.train_ds.file_names, data.train_ds.add_bos) == ("jsonl", ["a.jsonl"], False)
    assert data.validation_ds.file_names == ["b.jsonl"]
    assert {finding.level for finding in loaded.findings} == {"info"}
