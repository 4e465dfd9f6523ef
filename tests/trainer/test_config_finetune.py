"""Meaning of typed keys for `stoker finetune` beside the model, the tokenizer and the adapter it begins with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_runs import TEXT, base_folder, finetune, finetune_config
from hf_folders import change_tensors, letter_tokenizer

from stoker.models.hf.config_fields import format_value
from stoker.trainer.config.load import load_run_config
from stoker.trainer.config.problems import ConfigError, Problem
from stoker.trainer.config.schema.root import ModelBlock
from stoker.trainer.conversion.convert_adapters import convert_adapter
from stoker.trainer.conversion.finetune_defaults import load_finetune_config
from stoker.trainer.conversion.from_hf import convert_to_stoker
from stoker.trainer.data.sources.indexed_tokens import IndexedWriter
from stoker.trainer.data.tokenizers.tokenizer_files import SpecialTokens, load_tokenizer_json
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and a LoRA of it of rank 3."""
    folder = tmp_path_factory.mktemp("finetune")
    finetune(base_folder("llama", folder / "llama"), folder / "lora", "model.peft.lora_tuning.adapter_dim=3")
    return folder


def problems(folder: Path, *overrides: str, peft: str | None = "lora") -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        finetune_config(folder / "llama", folder / "run", *overrides, peft=peft)
    return {problem.key: problem for problem in caught.value.problems}


def test_a_tokenizer_key_of_the_user_leaves_the_others_to_the_base(folder: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    config = finetune_config(folder / "llama", folder / "run", f"model.tokenizer.chat_template='{template}'")
    tokenizer = config.root.model.tokenizer
    assert (tokenizer.library, tokenizer.type) == ("huggingface", str(folder / "llama"))
    assert tokenizer.chat_template == template


def test_another_tokenizer_than_that_of_the_base_is_refused(folder: Path, tmp_path: Path) -> None:
    for number, words in enumerate((["tokenizer=byte"], ["tokenizer=char"])):
        with pytest.raises(UserError, match="was trained with a different tokenizer"):
            run_training(finetune_config(folder / "llama", tmp_path / f"run{number}", *words))
    (tmp_path / "same").mkdir()
    letter_tokenizer(tmp_path / "same")
    same = ["tokenizer=huggingface", f"model.tokenizer.type={tmp_path / 'same'}"]
    assert run_training(finetune_config(folder / "llama", tmp_path / "run", *same)).step == 1


@pytest.mark.parametrize("source", ["data", "char", "moved file", "bert"])
def test_a_tokenizer_that_no_file_gives_comes_from_the_checkpoint(tmp_path: Path, source: str) -> None:
    """Tokenized data bring a tokenizer that no key names, other text has other characters, and files move."""
    letter_tokenizer(tmp_path)
    tokenizer = load_tokenizer_json(tmp_path / "tokenizer.json", "test", SpecialTokens())
    (tmp_path / "text.txt").write_text(TEXT)
    data = ["data=text", f"model.data.path={tmp_path / 'text.txt'}", "tokenizer=huggingface"]
    data.append(f"model.tokenizer.type={tmp_path / 'tokenizer.json'}")
    if source == "char":
        (tmp_path / "letters.txt").write_text("abcdefghijklmnopqrstuvwxyz \n" * 40)
        data = ["data=text", f"model.data.path={tmp_path / 'letters.txt'}", "tokenizer=char"]
    if source == "data":
        with IndexedWriter(tmp_path / "set", np.uint16) as writer:
            for _ in range(40):
                writer.add_document(np.arange(20))
            writer.finish()
        (tmp_path / "set.json").write_text(
            json.dumps({"format": 1, "tokenizer": tokenizer.to_dict(), "documents": 40, "tokens": 800})
        )
        data = ["data=mmap", f"model.data.data_prefix={tmp_path / 'set'}"]
    bert = ["model.tokenizer.num_sentinel_tokens=2", "model.tokenizer.special_tokens.mask_token='<hole>'"]
    data += [] if source != "bert" else bert
    shape = ["model.num_layers=1", "model.encoder_seq_length=16", "trainer.max_steps=1", "trainer.limit_val_batches=0"]
    shape += ["trainer.accelerator=cpu", f"exp_manager.explicit_log_dir={tmp_path / 'base'}"]
    run_training(
        load_run_config(None, None, [f"model={'bert' if source == 'bert' else 'gpt'}_tiny", *data, *shape], {})
    )
    (tmp_path / "tokenizer.json").unlink()
    config = finetune_config(tmp_path / "base", tmp_path / "run", peft=None)
    step = tmp_path / "base" / "checkpoints" / "step-1"
    assert (config.root.model.tokenizer.library, config.root.model.tokenizer.type) == ("checkpoint", str(step))
    given = config.root.model.tokenizer
    wanted = (2, "<hole>") if source == "bert" else (None, None)
    assert (given.num_sentinel_tokens, given.special_tokens.mask_token) == wanted
    result = run_training(config)
    assert result.checkpoint is not None
    assert (result.checkpoint / "tokenizer.json").read_bytes() == (step / "tokenizer.json").read_bytes()
    again = finetune_config(result.directory, tmp_path / "again", peft=None)  # of its own checkpoint, in turn
    assert again.root.model.tokenizer.type == str(result.checkpoint)
    with pytest.raises(UserError, match=r"`model\.tokenizer\.type`: .* is no checkpoint with a tokenizer: "):
        run_training(
            finetune_config(
                step, tmp_path / "x", *[f"model.tokenizer.{key}" for key in ("library=checkpoint", "type=x")]
            )
        )


def test_typed_keys_of_an_adapter_are_its_shape_or_refused(folder: Path) -> None:
    again = f"model.peft.restore_from_path={folder / 'lora'}"
    dim, scheme = "model.peft.lora_tuning.adapter_dim", "model.peft.peft_scheme"
    for peft in ("lora", None):
        config = finetune_config(folder / "llama", folder / "run", again, peft=peft)
        assert config.root.model.peft.lora_tuning.adapter_dim == 3  # the adapter's, not the preset's
        (problem,) = problems(folder, again, f"{dim}=4", peft=peft).values()
        assert (problem.key, problem.fix) == (dim, f"~{dim}")
        assert "must be 3" in problem.rule
    for other in ([f"{scheme}=ia3"], []):
        problem = problems(folder, again, *other, peft=None if other else "ia3")[scheme]
        assert problem.fix == "peft=lora"
    config = finetune_config(folder / "llama", folder / "run", again, "model.peft.lora_tuning.adapter_dropout=0.5")
    assert config.root.model.peft.lora_tuning.adapter_dropout == 0.5  # no shape: what is typed counts


def test_what_to_learn_must_be_said(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_finetune_config(None, None, [f"model.restore_from_path={folder / 'llama'}"], {})
    (problem,) = caught.value.problems
    assert problem.key == "model.data.data_impl"
    assert "data=sft" in problem.fix


@pytest.mark.parametrize(("peft", "rate"), [(None, 2e-5), ("lora", 2e-4), ("adapter", 2e-4), ("ia3", 3e-3)])
def test_each_scheme_has_its_learning_rate(folder: Path, peft: str | None, rate: float) -> None:
    given = [f"model.restore_from_path={folder / 'llama'}", "data=mock", *([f"peft={peft}"] if peft else [])]
    assert load_finetune_config(None, None, given, {}).root.model.optim.lr == rate
    typed = load_finetune_config(None, None, [*given, "model.optim.lr=1e-3"], {})
    assert typed.root.model.optim.lr == 1e-3


def test_an_adapter_of_another_base_is_refused_where_that_is_certain(folder: Path, tmp_path: Path) -> None:
    """The weights decide, whatever files they lie in; where the former are gone, there is a doubt, which is told."""
    base, other, moved = folder / "llama", tmp_path / "llama", tmp_path / "moved"
    base_folder("llama", other)
    change_tensors(other, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"] + 1}))
    convert_to_stoker(base, tmp_path / "same", dtype=torch.bfloat16)

    def run(begins: Path, adapter: Path, name: str) -> str:
        again = f"model.peft.restore_from_path={adapter}"
        return (finetune(begins, tmp_path / name, again, peft=None).directory / "run.log").read_text()

    assert "was trained on" not in run(tmp_path / "same", folder / "lora", "one")
    with pytest.raises(UserError) as caught:
        run(other, folder / "lora", "two")
    (told,) = caught.value.lines
    assert told.startswith(f"`model.peft.restore_from_path`: {folder / 'lora'}")
    assert f"was trained on {base}, but this run starts from {other}, whose weights differ" in told
    assert f" (first in decoder.final_norm.weight); set model.restore_from_path={base}; to use it with" in told
    convert_adapter(
        folder / "lora", tmp_path / "peft", merge=False, to=None, base=None, dtype=None, tokenizer=None, model_type=None
    )
    assert "warning" not in run(other, tmp_path / "peft", "three")  # a name proves nothing, and this one is the same
    other.rename(moved)
    doubt = f"names {format_value(str(base))} as its base model, but this run starts from {moved}"
    assert doubt in run(moved, tmp_path / "peft", "four")
    base.rename(folder / "gone")
    try:
        warning = "the original ones are gone, so the weights cannot be compared"
        assert warning in run(moved, folder / "lora", "five")
    finally:
        (folder / "gone").rename(base)


@pytest.mark.parametrize("data", ["chat", "sft"])
def test_virtual_tokens_stand_in_front_of_one_example(folder: Path, data: str) -> None:
    given = [f"model.restore_from_path={folder / 'llama'}", f"data={data}", "model.data.path=x", "peft=ptuning"]
    given += ["model.encoder_seq_length=8", "model.peft.p_tuning.virtual_tokens=2"]
    packed = "model.data.packed_sequence"
    config = load_finetune_config(None, None, given, {})
    assert not config.root.model.data.packed_sequence
    (note,) = [finding for finding in config.findings if packed in finding.keys]
    assert note.level == "info"
    assert not load_finetune_config(None, None, [*given, f"{packed}=false"], {}).findings
    with pytest.raises(ConfigError) as caught:
        load_finetune_config(None, None, [*given, f"{packed}=true"], {})
    assert [(problem.key, problem.fix) for problem in caught.value.problems] == [(packed, f"{packed}=false")]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("[q_proj,v_proj]", "[attention_qkv]"),
        ("[o_proj,gate_proj,up_proj,down_proj]", "[attention_dense,mlp_fc1,mlp_fc2]"),
        ("[c_attn,c_fc,c_proj]", "[attention_qkv,mlp_fc1,attention_dense,mlp_fc2]"),
        ("[q,k,v,o,wi,wo,mine]", "[attention_qkv,attention_dense,mlp_fc1,mlp_fc2]"),
        ("all-linear", "[all]"),
    ],
)
def test_names_of_peft_are_answered_with_ours(folder: Path, theirs: str, ours: str) -> None:
    key = "model.peft.lora_tuning.target_modules"
    problem = problems(folder, f"{key}={theirs}")[key]
    assert problem.fix.endswith(f": {key}={ours}")
    finetune_config(folder / "llama", folder / "run", f"{key}={ours}")


def test_nemos_list_of_files_says_what_is_learnt(folder: Path, tmp_path: Path) -> None:
    text = "model:\n  restore_from_path: {}\n  data:\n    {}\ntrainer: {{limit_val_batches: 0}}\n"
    base = folder / "llama"
    (tmp_path / "nemo.yaml").write_text(text.format(base, "train_ds: {file_names: [a.jsonl]}"))
    config = load_finetune_config("nemo", tmp_path, [], {})
    assert config.root.model.data.data_impl == "jsonl"
    (tmp_path / "none.yaml").write_text(text.format(base, "seq_length: null"))
    with pytest.raises(ConfigError) as caught:
        load_finetune_config("none", tmp_path, [], {})
    (problem,) = [problem for problem in caught.value.problems if problem.key == "model.data.data_impl"]
    assert (problem.rule, problem.origin) == ("must be set: the fine-tuning data", "default")


def test_examples_of_nemos_files_are_not_as_long_as_those_of_the_base(folder: Path, tmp_path: Path) -> None:
    sets = "train_ds: {file_names: [a], max_seq_length: 6}\n    validation_ds: {file_names: [b], max_seq_length: 6}"
    (tmp_path / "sft.yaml").write_text(f"model:\n  restore_from_path: '???'\n  data:\n    {sets}\n")
    config = load_finetune_config("sft", tmp_path, [f"model.restore_from_path={folder / 'llama'}"], {})
    assert isinstance(config.root.model, ModelBlock)
    assert config.root.model.encoder_seq_length == 6
    with pytest.raises(ConfigError) as caught:
        load_finetune_config("sft", tmp_path, [], {})
    assert [problem.fix for problem in caught.value.problems] == ["model.restore_from_path=FOLDER"]  # once
