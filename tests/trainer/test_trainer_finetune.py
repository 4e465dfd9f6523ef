"""`stoker finetune`: what comes from the model it begins with, what its checkpoints hold, and that frozen bits stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_runs import base_folder, finetune, finetune_config, our_logits, some_tokens
from hf_folders import TOKENS
from safetensors.torch import load_file
from tiers import cases, extra
from tiny_run import tiny_config

from stoker.models.peft.apply import trainable_parameters
from stoker.trainer.checkpoint.reader import find_checkpoint, model_tensors
from stoker.trainer.cli import main
from stoker.trainer.config.problems import ConfigError
from stoker.trainer.config.schema.root import ModelBlock
from stoker.trainer.conversion.load_model import load_model
from stoker.trainer.conversion.pretrained import find_pretrained
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import EXIT_BAD_INPUT, EXIT_OK, UserError

SCHEMES = ("lora", "adapter", "ia3", "ptuning", "selective")
PEFT: dict[str, Any] = {
    "model__peft__lora_tuning__target_modules": ["all"],
    "model__peft__lora_tuning__adapter_dim": 3,
    "model__peft__p_tuning__virtual_tokens": 3,
    "model__peft__p_tuning__bottleneck_dim": 8,
    "model__peft__selective_tuning__tunable_base_param_names": ["mlp"],
    "model__max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    """A run of stoker's."""
    directory = tmp_path_factory.mktemp("ours") / "run"
    run_training(tiny_config(directory, trainer__max_steps=2, model__max_position_embeddings=32))
    return directory


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """A folder of Hugging Face's."""
    return base_folder("llama", tmp_path_factory.mktemp("theirs") / "llama")


def peft_run(base: Path, directory: Path, scheme: str, **changes: Any) -> Any:
    shared = {**PEFT, "model__peft__peft_scheme": scheme, "model__restore_from_path": str(base)}
    return run_training(tiny_config(directory, **{**shared, **changes}))


# ---------------------------------------------------------------- frozen weights and checkpoints


@pytest.mark.parametrize("scheme", SCHEMES)
def test_frozen_weights_keep_their_bits(ours: Path, scheme: str, tmp_path: Path) -> None:
    whole = peft_run(ours, tmp_path / "whole", scheme, trainer__max_steps=3)
    before = load_file(find_checkpoint(ours)[0].weight_files[0])
    after = model_tensors(whole.model)
    trained = trainable_parameters(whole.model)
    for name, weight in before.items():
        assert torch.equal(weight, after[name]) == (name not in trained), name
    assert set(trained) & set(before) == (
        {name for name in before if "mlp" in name} if scheme == "selective" else set()
    )

    checkpoint, _ = find_checkpoint(whole.directory, with_optimizer=True)
    assert checkpoint.is_adapter
    assert set(load_file(checkpoint.adapter_files[0])) == set(trained)
    state = load_file(checkpoint.path / "optimizer.safetensors")
    assert {name.rpartition(".")[0] for name in state} == set(trained), "frozen weights have no state"
    assert checkpoint.state.base == find_pretrained(ours).record()

    restored = model_tensors(load_model(whole.directory, "cpu").model)
    assert all(torch.equal(tensor, after[name]) for name, tensor in restored.items())


@pytest.mark.parametrize("scheme", ["lora", *extra(*(scheme for scheme in SCHEMES if scheme != "lora"))])
def test_a_resumed_run_is_exact(ours: Path, scheme: str, tmp_path: Path) -> None:
    after = model_tensors(peft_run(ours, tmp_path / "whole", scheme).model)
    peft_run(ours, tmp_path / "halves", scheme, trainer__max_steps=4)
    halves = peft_run(ours, tmp_path / "halves", scheme)
    assert all(torch.equal(tensor, after[name]) for name, tensor in model_tensors(halves.model).items())


@pytest.fixture(scope="module")
def t5(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder of Hugging Face's, and its weights as they are here."""
    folder = tmp_path_factory.mktemp("t5")
    base = base_folder("t5_v1_1", folder / "t5")
    whole = finetune(base, folder / "whole", "trainer.max_steps=1", "model.optim.lr=1e-30", peft=None)
    return base, model_tensors(whole.model)


@pytest.mark.parametrize("scheme", cases(SCHEMES, fast=2))
def test_every_scheme_trains_a_t5(t5: tuple[Path, dict[str, torch.Tensor]], scheme: str, tmp_path: Path) -> None:
    base, before = t5
    named = ["model.peft.selective_tuning.tunable_base_param_names=[final_norm]", "model.peft.peft_scheme=selective"]
    if scheme == "selective":
        run = finetune(base, tmp_path / "run", *named, peft=None)
    else:
        run = finetune(base, tmp_path / "run", peft=scheme)
    after, trained = model_tensors(run.model), trainable_parameters(run.model)
    assert trained
    for name, weight in before.items():
        assert torch.equal(weight, after[name]) == (name not in trained), name
    restored = model_tensors(load_model(run.directory, "cpu").model)
    assert all(torch.equal(tensor, after[name]) for name, tensor in restored.items())


@pytest.mark.parametrize("kind", cases(["muon", "adafactor", "sgd"], fast=1))
def test_every_optimizer_trains_an_adapter(ours: Path, kind: str, tmp_path: Path) -> None:
    run = peft_run(ours, tmp_path / "run", "lora", model__optim={"name": kind, "lr": 1e-2}, trainer__max_steps=2)
    assert any(
        parameter.any() for name, parameter in trainable_parameters(run.model).items() if name.endswith("lora_b")
    )


def test_an_average_is_of_what_is_trained(ours: Path, tmp_path: Path) -> None:
    run = peft_run(ours, tmp_path / "run", "lora", exp_manager__ema={"enable": True, "decay": 0.5})
    held = load_file(find_checkpoint(run.directory)[0].path / "ema.safetensors")
    assert set(held) == set(trainable_parameters(run.model))


EXPERTS: dict[str, Any] = {
    "model__num_moe_experts": 4,
    "model__moe_router_score_function": "sigmoid",
    "model__moe_router_enable_expert_bias": True,
    "model__moe_router_bias_update_rate": 0.5,
    "model__max_position_embeddings": None,
    "model__global_batch_size": 2,
    "trainer__limit_val_batches": 0,
}


@pytest.mark.usefixtures("without_plots")
def test_frozen_experts_keep_their_bias(tmp_path: Path) -> None:
    base = run_training(tiny_config(tmp_path / "base", **EXPERTS, trainer__max_steps=1))
    run = peft_run(base.directory, tmp_path / "run", "lora", **EXPERTS, trainer__max_steps=1)
    before, after = model_tensors(base.model), model_tensors(run.model)
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


@pytest.mark.usefixtures("without_plots")
def test_trained_routers_move_their_bias_and_an_adapter_holds_it(tmp_path: Path) -> None:
    base = run_training(tiny_config(tmp_path / "base", **EXPERTS, trainer__max_steps=1))
    bias = "decoder.layers.0.mlp.expert_bias"
    runs = {}
    for name, stops in (("unbroken", (4,)), ("resumed", (3, 4))):
        for steps in stops:
            changes = {**EXPERTS, "trainer__max_steps": steps}
            runs[name] = peft_run(base.directory, tmp_path / name, "selective", **changes)
    held = {
        name: load_file(find_checkpoint(run.directory)[0].path / "adapter.safetensors") for name, run in runs.items()
    }
    assert not torch.equal(held["unbroken"][bias], model_tensors(base.model)[bias])
    assert all(torch.equal(tensor, held["resumed"][name]) for name, tensor in held["unbroken"].items())
    merged = tmp_path / "merged"
    assert main.main(["convert", "--merge", "--to", "stoker", str(tmp_path / "resumed"), str(merged)]) == EXIT_OK
    for place in (merged, tmp_path / "resumed"):
        assert torch.equal(model_tensors(load_model(place, "cpu").model)[bias], held["unbroken"][bias])


def test_a_run_goes_on_with_an_adapter(ours: Path, tmp_path: Path) -> None:
    first = peft_run(ours, tmp_path / "first", "lora")
    config = finetune_config(
        ours, tmp_path / "second", f"model.peft.restore_from_path={first.directory}", "data=mock", "~model.data.path",
        "model.optim.lr=1e-12", peft=None,
    )  # fmt: skip
    lora = config.root.model.peft.lora_tuning
    assert (config.root.model.peft.peft_scheme, lora.adapter_dim, lora.target_modules) == ("lora", 3, ["all"])
    second = run_training(config)
    before, after = model_tensors(first.model), model_tensors(second.model)
    assert all(torch.allclose(after[name], before[name], atol=1e-6) for name in before)


def test_a_whole_model_is_no_adapter_and_an_adapter_no_whole_model(ours: Path, tmp_path: Path) -> None:
    adapter = peft_run(ours, tmp_path / "adapter", "lora", trainer__max_steps=1).directory
    with pytest.raises(UserError, match=r"holds an adapter of .*stoker convert --merge"):
        finetune_config(adapter, tmp_path / "next")
    with pytest.raises(UserError, match=r"holds a whole model; set model\.restore_from_path"):
        peft_run(ours, tmp_path / "wrong", "lora", model__peft__restore_from_path=str(ours))
    with pytest.raises(UserError, match="this run uses none; use the same"):
        run_training(tiny_config(tmp_path / "adapter", model__max_position_embeddings=32))


# ---------------------------------------------------------------- what comes from where


def test_the_model_is_that_of_the_folder(theirs: Path, tmp_path: Path) -> None:
    config = finetune_config(theirs, tmp_path / "run")
    model = config.root.model
    assert isinstance(model, ModelBlock)
    facts = json.loads((theirs / "config.json").read_text())
    assert model.hidden_size == facts["hidden_size"]
    assert model.num_query_groups == facts["num_key_value_heads"]
    assert (model.encoder_seq_length, model.max_position_embeddings) == (16, TOKENS)
    assert (model.tokenizer.library, model.tokenizer.type) == ("huggingface", str(theirs))
    assert model.peft.lora_tuning.adapter_dim == 16
    assert str(config.origins["model.hidden_size"]) == str(theirs / "config.json")
    assert not config.findings


def test_the_model_is_that_of_the_run(ours: Path, tmp_path: Path) -> None:
    model = finetune_config(
        ours, tmp_path / "run", "data=mock", "~model.data.path", "model.hidden_dropout=0.3"
    ).root.model
    assert isinstance(model, ModelBlock)
    assert (model.hidden_size, model.num_layers, model.max_position_embeddings) == (32, 1, 32)
    assert (model.hidden_dropout, model.attention_dropout) == (0.3, 0.1)
    assert model.micro_batch_size == 2, "batches are of this run"


def test_weights_are_read_from_a_folder(theirs: Path, tmp_path: Path) -> None:
    run = finetune(theirs, tmp_path / "run", "model.optim.lr=1e-12", peft=None)
    from stoker.trainer.conversion.from_hf import convert_to_stoker

    convert_to_stoker(theirs, tmp_path / "converted")
    tokens = some_tokens()
    logits = [our_logits(load_model(place, "cpu"), tokens) for place in (run.directory, tmp_path / "converted")]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    assert not find_checkpoint(run.directory)[0].is_adapter


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("model.hidden_size=64", "model.hidden_size", "must be 36"),
        ("model.num_query_groups=6", "model.num_query_groups", "must be 2"),
        ("model=gpt_tiny", "model=gpt_tiny", "they differ in hidden_size, ffn_hidden_size, "),
        ("model=bert_tiny", "model=bert_tiny", "they differ in family"),
        ("model.family=bert", "model.family", "must be gpt"),
    ],
)
def test_another_shape_contradicts(theirs: Path, override: str, key: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        finetune_config(theirs, tmp_path / "run", override)
    found = {problem.key: problem for problem in caught.value.problems}
    assert said in found[key].rule
    if "=" in key:
        assert list(found) == [key]
        assert found[key].fix == f"leave out {key}: the shape comes from the pretrained model"


def test_a_folder_without_a_tokenizer_needs_one(theirs: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((theirs / name).read_bytes())
    with pytest.raises(ConfigError) as caught:
        finetune_config(bare, tmp_path / "run")
    assert [problem.key for problem in caught.value.problems] == ["model.tokenizer.library"]
    run = finetune(bare, tmp_path / "run", "tokenizer=byte")
    assert load_model(run.directory, "cpu").state.base


def test_the_verb(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "stoker.trainer.train.train", lambda config: print(config.root.model.restore_from_path) or EXIT_OK
    )
    assert main.main(["finetune", f"model.restore_from_path={theirs}", "data=mock", "peft=ia3"]) == EXIT_OK
    assert str(theirs) in capsys.readouterr().out
    assert main.main(["finetune", "peft=lora"]) == EXIT_BAD_INPUT
    assert "model.restore_from_path" in capsys.readouterr().err
    assert main.main(["finetune", f"model.restore_from_path={tmp_path}", "peft=lora"]) == EXIT_BAD_INPUT
    assert "give a run directory" in capsys.readouterr().err
    assert main.main(["finetune", "model.restore_from_path=org/name", "peft=lora"]) == EXIT_BAD_INPUT
    assert "there is no such folder; import a Hugging Face hub model with `stoker convert" in capsys.readouterr().err
    assert main.main(["config", "--finetune", f"model.restore_from_path={theirs}", "data=mock"]) == EXIT_OK
    assert "hidden_size: 36" in capsys.readouterr().out


def test_convert_merges_what_was_trained(ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = peft_run(ours, tmp_path / "adapter", "lora", trainer__max_steps=2).directory
    merged = tmp_path / "merged"
    assert main.main(["convert", "--merge", "--to", "stoker", str(adapter), str(merged)]) == EXIT_OK
    assert " merged into " in capsys.readouterr().out
    whole, with_base = (load_model(place, "cpu") for place in (merged, adapter))
    assert whole.state.base is None
    assert whole.config.root.model.restore_from_path is None
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(our_logits(whole, tokens), our_logits(with_base, tokens), atol=1e-5, rtol=1e-5)
    again = ["convert", "--merge", "--base", str(tmp_path / "nowhere"), str(adapter), str(tmp_path / "other")]
    for arguments, said in (
        (["convert", "--merge", str(ours), str(tmp_path / "x")], "is not an adapter"),
        (["convert", "--to", "stoker", str(adapter), str(tmp_path / "x")], "already has that format"),
        (again, "no usable checkpoint"),
    ):
        assert main.main(arguments) == EXIT_BAD_INPUT
        assert said in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert not (tmp_path / "x").exists()
