"""`--ema`: the moving average of the weights is what generates, is evaluated and is exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapter_runs import base_folder, finetune, our_logits, some_tokens, their_logits
from hf_folders import random_model
from safetensors.torch import load_file
from tiers import full_only

from stoker.trainer.cli.main import main
from stoker.trainer.conversion.load_model import LoadedModel, load_model
from stoker.trainer.utils.errors import EXIT_BAD_INPUT, EXIT_OK, UserError

AVERAGED = ["exp_manager.ema.enable=true", "exp_manager.ema.decay=0.5", "trainer.max_steps=3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a run that trained all of it with an average, and one that trained an adapter."""
    folder = tmp_path_factory.mktemp("averaged")
    base = base_folder("llama", folder / "llama")
    finetune(base, folder / "whole", *AVERAGED, peft=None)
    finetune(base, folder / "adapter", *AVERAGED, "model.peft.lora_tuning.row_init_method=normal")
    finetune(base, folder / "plain", peft=None)
    return folder


def model_in(folder: Path) -> Any:
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded.eval()


def tensors_of(restored: LoadedModel) -> dict[str, torch.Tensor]:
    return dict(restored.model.named_parameters())


@pytest.mark.parametrize("run", ["whole", "adapter"])
def test_the_average_is_what_the_model_gets(folder: Path, run: str) -> None:
    average = load_file(folder / run / "checkpoints" / "step-3" / "ema.safetensors")
    ours, plain = tensors_of(load_model(folder / run, "cpu", ema=True)), tensors_of(load_model(folder / run, "cpu"))
    assert set(average) <= set(ours)
    for name, tensor in ours.items():
        if name in average:
            assert torch.equal(tensor, average[name]), name
        else:
            assert torch.equal(tensor, plain[name]), name
    differ = [name for name in average if not torch.equal(ours[name], plain[name])]
    assert len(differ) == len(average)


def test_transformers_gets_the_average(folder: Path, tmp_path: Path) -> None:
    assert main(["convert", str(folder / "whole"), str(tmp_path / "hf"), "--ema"]) == EXIT_OK
    wanted = our_logits(load_model(folder / "whole", "cpu", ema=True), some_tokens())
    found = their_logits(model_in(tmp_path / "hf"), some_tokens(), is_t5=False)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    without = our_logits(load_model(folder / "whole", "cpu"), some_tokens())
    assert not torch.allclose(found, without, atol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of peft and transformers
def test_an_adapters_average_is_merged_and_given_to_peft(folder: Path, tmp_path: Path) -> None:
    wanted = our_logits(load_model(folder / "adapter", "cpu", ema=True), some_tokens())
    for words in ([], ["--merge"]):
        target = tmp_path / f"out{len(words)}"
        assert main(["convert", str(folder / "adapter"), str(target), "--ema", *words]) == EXIT_OK
    merged = their_logits(model_in(tmp_path / "out1"), some_tokens(), is_t5=False)
    torch.testing.assert_close(merged, wanted, atol=2e-4, rtol=1e-4)
    peft = pytest.importorskip("peft")
    loaded = peft.PeftModel.from_pretrained(random_model("llama"), tmp_path / "out0").eval()
    torch.testing.assert_close(their_logits(loaded, some_tokens(), is_t5=False), wanted, atol=2e-4, rtol=1e-4)


def test_commands_take_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def loss(*words: str) -> float:
        run = ["evaluate", "--checkpoint", str(folder / "whole"), "--data-path", str(folder / "text.txt")]
        assert main([*run, "--device", "cpu", "--json", "--limit-batches", "1", *words]) == EXIT_OK
        return json.loads(capsys.readouterr().out)["loss"]

    assert loss("--ema") != loss()
    told = ["generate", "--checkpoint", str(folder / "plain"), "--prompt", "to be", "--ema", "--device", "cpu"]
    assert main(told) == EXIT_BAD_INPUT
    assert "exp_manager.ema.enable=True" in capsys.readouterr().err


def test_what_has_no_average_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="holds no moving average"):
        load_model(folder / "plain", "cpu", ema=True)
    for source in ("plain", "llama"):
        assert main(["convert", str(folder / source), str(tmp_path / "out"), "--ema"]) == EXIT_BAD_INPUT
        assert "no moving average" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@full_only  # importing lm_eval takes seconds
def test_the_harness_takes_true_and_false(folder: Path) -> None:
    pytest.importorskip("lm_eval")
    from stoker.trainer.evaluation.harness.lm_eval_model import StokerLM

    for given in (True, "true", "False"):
        StokerLM(str(folder / "whole"), "cpu", ema=given)
    with pytest.raises(UserError, match="ema=maybe must be true or false"):
        StokerLM(str(folder / "whole"), "cpu", ema="maybe")
