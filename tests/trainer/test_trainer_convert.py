"""`stoker convert`: every architecture of Hugging Face's comes in and goes out, bit for bit and with equal logits."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_folders import (
    MODELS,
    TOKENS,
    VOCAB,
    change_config,
    change_tensors,
    letter_tokenizer,
    random_model,
    save,
    tensors_of,
)
from hf_fp64 import keep_input_dtype
from resolved import batch_spec
from safetensors.torch import load_file
from tiers import cases
from torch import Tensor

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.build import LanguageModel, build_model
from stoker.models.t5 import T5
from stoker.trainer.checkpoint.reader import find_checkpoint, open_checkpoint
from stoker.trainer.cli.main import main
from stoker.trainer.config.load import config_from_document
from stoker.trainer.conversion.load_model import load_model
from stoker.trainer.conversion.to_hf import convert_to_hf
from stoker.trainer.utils.errors import EXIT_BAD_INPUT, EXIT_OK
from stoker.trainer.utils.safetensors_io import DamagedFileError

BYTES = ("--tokenizer", "byte-level")
SCALED = ("llama3_rotary", "llama_yarn", "llama_linear")
"""Rotary frequencies that transformers calculates in fp32."""


def convert(*arguments: str | Path) -> None:
    assert main(["convert", *map(str, arguments)]) == EXIT_OK


def our_model(folder: Path, dtype: torch.dtype) -> LanguageModel:
    """The model of a converted folder."""
    checkpoint, complaints = find_checkpoint(folder)
    assert complaints == []
    root = config_from_document(checkpoint.config_document).root
    model = build_model(
        root.model,
        vocab_size=VOCAB,
        device="cpu",
        dtype=dtype,
        flags=AttentionFlags(),
        micro_batch_size=2,
        batch_spec=batch_spec(root),
        kinds=("evaluation", "generation"),
    )
    checkpoint.load_weights(model, cast=True)
    return model.eval()


def difference(reference: transformers.PreTrainedModel, ours: LanguageModel, tokens_per_text: int = TOKENS) -> float:
    """The largest difference of logits, relative to the largest logit."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCAB, (2, tokens_per_text), generator=generator)
    called: Any = reference
    with torch.no_grad():
        if isinstance(ours, T5):
            answers = torch.randint(3, VOCAB, (2, 9), generator=generator)
            theirs = called(input_ids=tokens, decoder_input_ids=answers).logits
            logits: Tensor = ours(tokens, answers)
        else:
            theirs = called(input_ids=tokens).logits
            logits = ours(tokens)
    assert logits[..., :VOCAB].shape == theirs.shape
    return float((logits[..., :VOCAB] - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", cases(MODELS, fast=2))
def test_round_trip_and_logits(name: str, tmp_path: Path) -> None:
    """HF -> stoker -> HF is the same files of weights, bit for bit; the logits of both are equal."""
    model = random_model(name)
    theirs, ours, back = save(model, tmp_path / "theirs"), tmp_path / "ours", tmp_path / "back"
    convert(theirs, ours, *BYTES)
    convert(ours, back, *(("--model-type", "mt5") if name == "mt5" else ()))
    assert (theirs / "model.safetensors").read_bytes() == (back / "model.safetensors").read_bytes()

    table = open_checkpoint(ours / "checkpoints" / "step-0", with_optimizer=False).weight_files[0]
    assert not load_file(table)["token_embedding.weight"][VOCAB:].any(), "padding"

    before, after = (transformers.AutoConfig.from_pretrained(folder).to_dict() for folder in (theirs, back))
    written = json.loads((back / "config.json").read_text())
    tokens = {"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"}
    said_twice = {"rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base", "torch_dtype"}
    changed = {field for field in after if before.get(field) != after[field]} - tokens - said_twice
    changed -= {field for field in changed if field in before and field not in written}  # training, left to defaults
    spelled_out = {"head_dim", "num_key_value_heads", "max_window_layers", "n_inner"}
    spelled_out |= {"rope_parameters"} if name == "llama_yarn" else set()
    assert changed <= spelled_out, changed

    model.set_attn_implementation("eager" if name.startswith(("t5", "byt5", "mt5", "bert")) else "sdpa")
    assert difference(model, our_model(ours, torch.float32)) <= 1e-5
    if name in SCALED:
        return
    with keep_input_dtype():
        assert difference(model.double(), our_model(ours, torch.float64)) <= 1e-10


@pytest.mark.parametrize("name", cases(["llama", "mixtral", "t5_v1_1", "qwen2", "bert"], fast=2))
def test_transformers_loads_what_is_written(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    convert(save(model, tmp_path / "theirs"), tmp_path / "ours", *BYTES)
    convert(tmp_path / "ours", tmp_path / "back")
    kind: Any = type(model)
    loaded, report = kind.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for (key, value), (_, again) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(value, again), key


def test_files_of_several_shards_both_ways(tmp_path: Path) -> None:
    model = random_model("mixtral")
    theirs = save(model, tmp_path / "theirs", max_shard_size="60KB")
    assert len(list(theirs.glob("model-*.safetensors"))) > 3
    convert(theirs, tmp_path / "ours", *BYTES)
    convert_to_hf(tmp_path / "ours", tmp_path / "back", shard_bytes=60_000)
    shards = sorted((tmp_path / "back").glob("model-*.safetensors"))
    assert len(shards) > 3
    assert all(path.stat().st_size < 70_000 for path in shards)
    ours, wanted = tensors_of(tmp_path / "back"), tensors_of(theirs)
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name], value) for name, value in wanted.items())
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == wanted.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_torch_files_and_names_of_older_versions(tmp_path: Path) -> None:
    """`pytorch_model.bin` with copies of tied tensors and masks; GPT-2 without a prefix; BERT with gamma and beta."""
    for name, renamed in (("gpt2", ("transformer.", "")), ("bert", ("LayerNorm.weight", "LayerNorm.gamma"))):
        model = random_model(name)
        folder = save(model, tmp_path / name)
        tensors = {key.replace(*renamed): value for key, value in tensors_of(folder).items()}
        if name == "gpt2":
            tensors["lm_head.weight"] = tensors["wte.weight"]
            tensors["h.0.attn.bias"] = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.uint8)
        else:
            tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"]
            tensors["bert.pooler.dense.weight"] = torch.zeros(36, 36)
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
        convert(folder, tmp_path / f"{name}-ours", *BYTES)
        model.set_attn_implementation("eager")
        assert difference(model, our_model(tmp_path / f"{name}-ours", torch.float32)) <= 1e-5


def test_weights_that_have_no_place_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(random_model("bert"), tmp_path / "bert")
    change_tensors(folder, lambda tensors: tensors.update({"bert.pooler.dense.bias": torch.zeros(36)}))
    convert(folder, tmp_path / "ours", *BYTES)
    assert "skipped weights that stoker does not support: bert.pooler.dense.bias" in capsys.readouterr().out


def test_the_command_to_train_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(save(random_model("bert"), tmp_path / "bert"), tmp_path / "sp ace", *BYTES)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train on: ")]
    command = shlex.split(line.removeprefix("train on: "))
    assert command[1:4] == ["train", "--config-dir", f"{tmp_path}/sp ace/conf"]
    assert command[-1] == f"model.restore_from_path={tmp_path}/sp ace"


def test_other_dtypes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = save(random_model("llama", torch.bfloat16), tmp_path / "theirs")
    convert(theirs, tmp_path / "same", *BYTES)
    convert(tmp_path / "same", tmp_path / "back")
    assert (theirs / "model.safetensors").read_bytes() == (tmp_path / "back" / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    convert(theirs, tmp_path / "wide", *BYTES, "--dtype", "fp32")
    convert(tmp_path / "wide", tmp_path / "narrow", "--dtype", "bf16")
    assert (theirs / "model.safetensors").read_bytes() == (tmp_path / "narrow" / "model.safetensors").read_bytes()
    change_tensors(theirs, lambda tensors: tensors.update({"model.norm.weight": torch.full((36,), 1e5)}))
    assert main(["convert", str(theirs), str(tmp_path / "half"), *BYTES, "--dtype", "fp16"]) == EXIT_BAD_INPUT
    assert "model.norm.weight holds 1e+05, more than fp16 can" in capsys.readouterr().err
    assert not (tmp_path / "half").exists()


# ---------------------------------------------------------------- the tokenizer, and what stoker does with the result


def test_the_tokenizer_comes_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = save(random_model("llama"), tmp_path / "theirs")
    letter_tokenizer(theirs)
    convert(theirs, tmp_path / "ours")
    restored = load_model(tmp_path / "ours", "cpu")
    assert restored.tokenizer.encode("cab").tolist() == [2, 0, 1]
    assert restored.tokenizer.eos_id == 29
    assert restored.config.root.model.tokenizer.type == str(tmp_path / "ours" / "tokenizer")

    convert(tmp_path / "ours", tmp_path / "back")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (theirs / name).read_bytes()
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (28, 29)

    convert(tmp_path / "ours", tmp_path / "named", "--tokenizer", theirs)
    assert (tmp_path / "named" / "chat_template.jinja").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text((theirs / "tokenizer.json").read_text().replace('"</s>"', '"</t>"'))
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "x"), "--tokenizer", str(other)]) == EXIT_BAD_INPUT
    assert "differs from the tokenizer of the checkpoint" in capsys.readouterr().err

    # Where the files are gone, they are written from what the checkpoint knows.
    (tmp_path / "ours" / "tokenizer" / "tokenizer.json").unlink()
    convert(tmp_path / "ours", tmp_path / "again")
    again: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again("cab", add_special_tokens=False)["input_ids"] == [2, 0, 1]
    assert again.eos_token_id == 29


def test_train_generate_and_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A converted model is trained on by its own YAML, goes on with a text, and is scored."""
    theirs = save(random_model("llama"), tmp_path / "theirs")
    letter_tokenizer(theirs)
    ours = tmp_path / "ours"
    convert(theirs, ours)
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be that is the question " * 30)
    assert main(["generate", "--checkpoint", str(ours), "--prompt", "to be", "--max-new-tokens", "3"]) == EXIT_OK
    capsys.readouterr()
    assert main(["evaluate", "--checkpoint", str(ours), "--data-path", str(text), "--json"]) == EXIT_OK
    figures = json.loads(capsys.readouterr().out)
    assert figures["loss"] > 0
    assert main(["evaluate", str(theirs), "--data-path", str(text), "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out) == {**figures, "checkpoint": str(theirs)}
    run = tmp_path / "run"
    keys = [
        "data=text", f"model.data.path={text}", "trainer=cpu", "trainer.max_steps=2", "trainer.val_check_interval=2",
        "trainer.limit_val_batches=1", "model.global_batch_size=2", f"exp_manager.explicit_log_dir={run}",
        "model.encoder_seq_length=16", "trainer.enable_progress_bar=false", f"model.restore_from_path={ours}",
    ]  # fmt: skip
    command = ["train", "--config-dir", str(ours / "conf"), "model=converted", "tokenizer=converted", *keys]
    assert main(command) == EXIT_OK, capsys.readouterr().err
    assert "weights from" in capsys.readouterr().out
    convert(run, tmp_path / "tuned")
    assert (tmp_path / "tuned" / "chat_template.jinja").exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    before, after = tensors_of(theirs)["lm_head.weight"], loaded.lm_head.weight
    assert not torch.equal(before, after.float())
    assert (before - after.float()).abs().max() < 0.1


def test_a_folder_is_asked_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files are those that the converted model writes; nothing is left behind; what cannot act is refused."""
    theirs, ours = save(random_model("gpt2"), tmp_path / "theirs"), tmp_path / "ours"
    letter_tokenizer(theirs)
    convert(theirs, ours)
    there = sorted(theirs.iterdir())
    options = ["--prompt", "to be", "--max-new-tokens", "9", "--temperature", "0", "--device", "cpu"]
    written = []
    for model in ([str(theirs)], ["--checkpoint", str(theirs)], [str(ours)]):
        capsys.readouterr()
        assert main(["generate", *options, *model]) == EXIT_OK
        written.append(capsys.readouterr().out)
    assert len(set(written)) == 1
    assert sorted(theirs.iterdir()) == there
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / name).write_bytes((theirs / name).read_bytes())
    for words, says in (
        ([], "no model is given; pass its folder as DIR or --checkpoint DIR"),
        ([str(ours), "--checkpoint", str(theirs)], f"{ours} and --checkpoint {theirs} both give the model"),
        ([str(theirs), "--ema"], f"--ema: {theirs} is a Hugging Face model, which has no EMA weights"),
        ([str(theirs), "--base", "x"], f"--base x: {theirs} holds a whole model; leave --base out"),
        ([str(ours), "--base", "x"], "step-0 holds a whole model; leave --base out"),
        ([str(tmp_path / "bare")], f"`stoker convert {tmp_path / 'bare'} FOLDER` takes --tokenizer"),
    ):
        for verb in ("generate", "evaluate"):
            assert main([verb, *words]) == EXIT_BAD_INPUT
            assert says in capsys.readouterr().err


def test_a_t5_answers_and_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ByT5's tokenizer needs no file: tokenizer_config.json names it."""
    theirs = save(random_model("byt5"), tmp_path / "theirs")
    (theirs / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    convert(theirs, tmp_path / "ours")
    ask = ["generate", "--checkpoint", str(tmp_path / "ours"), "--prompt", "to <extra_id_0>", "--max-new-tokens", "3"]
    assert main(ask) == EXIT_OK
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be that is the question " * 60)
    capsys.readouterr()
    score = ["evaluate", "--checkpoint", str(tmp_path / "ours"), "--data-path", str(text), "--json"]
    assert main(score) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["loss"] > 0
    convert(tmp_path / "ours", tmp_path / "back")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (written["decoder_start_token_id"], written["eos_token_id"], written["pad_token_id"]) == (0, 1, 0)
    settings = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())
    assert settings == {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125}


def test_no_run_goes_on_from_a_converted_model(tmp_path: Path) -> None:
    convert(save(random_model("gpt2"), tmp_path / "theirs"), tmp_path / "ours", *BYTES)
    path = tmp_path / "ours" / "checkpoints" / "step-0"
    assert open_checkpoint(path, with_optimizer=False).state.data_fingerprint == ""
    with pytest.raises(
        DamagedFileError, match=r"converted model without optimizer state; use model\.restore_from_path"
    ):
        open_checkpoint(path)


def test_a_model_that_none_of_theirs_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(save(random_model("llama"), tmp_path / "theirs"), tmp_path / "ours", *BYTES)
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "x"), "--model-type", "qwen3"]) == EXIT_BAD_INPUT
    told = capsys.readouterr().err
    assert "problems with Qwen3ForCausalLM" in told
    assert "stack.attention.qk_norm is false, which would become true" in told
    convert(tmp_path / "ours", tmp_path / "mistral", "--model-type", "mistral")
    assert json.loads((tmp_path / "mistral" / "config.json").read_text())["sliding_window"] is None
    change_config(tmp_path / "mistral", sliding_window=7)
    convert(tmp_path / "mistral", tmp_path / "window", *BYTES)
    convert(tmp_path / "window", tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["sliding_window"] == 7
