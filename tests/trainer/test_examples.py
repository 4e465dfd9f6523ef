"""The commands of every README in `examples/` run, shrunk, and what the pages claim holds."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_metrics import logged
from safetensors.torch import load_file
from tiers import cases

from stoker.trainer.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/README.md"))
SHRINK = (
    *("trainer.accelerator=cpu", "trainer.limit_val_batches=1", "trainer.log_every_n_steps=1"),
    *("model.micro_batch_size=2", "model.global_batch_size=4", "model.encoder_seq_length=64"),
    *("model.num_layers=1", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.num_attention_heads=2"),
    "exp_manager.create_tensorboard_logger=false",
)


@pytest.fixture
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_registered: None
) -> Iterator[Path]:
    """A copy of an example, as the working directory; nothing is registered."""
    shutil.copytree(request.param, tmp_path / "example")
    monkeypatch.chdir(tmp_path / "example")
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path / "example"
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of each `stoker` command of a page; steps are a fifth."""
    for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            program, *words = shlex.split(line)
            assert program == "stoker", line
            steps = (r"(trainer\.(?:max_steps|val_check_interval)=)(\d+)", lambda each: f"{each[1]}{int(each[2]) // 5}")
            words = [re.sub(*steps, word) for word in words]
            yield [*words, *SHRINK] if words[0] in ("train", "finetune", "plan") else words


@pytest.mark.parametrize("folder", cases(EXAMPLES, 4), indirect=True, ids=lambda path: path.name)
def test_every_command_runs(folder: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    outputs: list[str] = []
    for words in commands(folder / "README.md"):
        assert main(words) == 0, (words, capsys.readouterr())
        outputs.append(capsys.readouterr().out)
    kind = request.node.callspec.params["folder"].name
    assert outputs
    if kind in CLAIMS:
        CLAIMS[kind](folder, outputs)


def sources(folder: Path, step: int = 4) -> dict[str, str]:
    return json.loads((folder / "run" / "checkpoints" / f"step-{step}" / "state.json").read_text())["components"]


def of_dataset(folder: Path, outputs: list[str]) -> None:
    assert sources(folder) == {"model.data.data_impl": "sentences:Sentences"}
    assert "validation split of sentences" in outputs[1]


def of_tokenizer(folder: Path, outputs: list[str]) -> None:
    document = json.loads((folder / "run" / "checkpoints" / "step-4" / "tokenizer.json").read_text())
    words = document["state"]["words"]
    assert document == {"tokenizer": "words", "state": {"words": words}}
    assert len(words) == 200
    assert set(outputs[1].split()) <= {*words, "<unk>"}
    assert json.loads((folder / "tokens.json").read_text())["tokenizer"]["state"] == {"words": []}


def of_loss(folder: Path, outputs: list[str]) -> None:
    assert sources(folder) == {"model.loss": "focal:focal"}
    # at the first step all tokens are about equally probable: (1 - 1/V)^2 of the cross-entropy
    assert logged(folder / "run", "loss")[0] < logged(folder / "run", "val_loss")[0] + 0.2
    assert logged(folder / "run", "loss")[-1] < logged(folder / "run", "loss")[0]


def of_metric(folder: Path, outputs: list[str]) -> None:
    assert sources(folder) == {"trainer.validation_metrics.top5": "top5:top5"}
    values = logged(folder / "run", "val_top5")
    assert len(values) == 2
    assert all(0 <= value <= 1 for value in values)
    state = json.loads((folder / "run" / "checkpoints" / "step-4" / "state.json").read_text())
    assert state["metrics"]["val_top5"] == values[-1]
    assert re.search(r"^top5 +0\.\d{4}$", outputs[1], re.MULTILINE)


def of_optimizer(folder: Path, outputs: list[str]) -> None:
    assert sources(folder, 8) == {"model.optim.name": "lion:Lion"}
    state = load_file(folder / "run" / "checkpoints" / "step-8" / "optimizer.safetensors")
    assert {name.rpartition(".")[2] for name in state} == {"exp_avg"}
    assert all(tensor.any() for tensor in state.values())


def of_schedule(folder: Path, outputs: list[str]) -> None:
    rates = logged(folder / "run", "lr")
    assert rates == pytest.approx([4e-5, (4e-5 + 1e-3) / 2, 1e-3, 1e-3 * 0.55])
    assert "one_cycle" in outputs[1]


CLAIMS: dict[str, Callable[[Path, list[str]], None]] = {
    "dataset": of_dataset,
    "tokenizer": of_tokenizer,
    "loss": of_loss,
    "metric": of_metric,
    "optimizer": of_optimizer,
    "schedule": of_schedule,
}
